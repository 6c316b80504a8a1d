"""Hooks: lines in the log of every rank about the passes for log-probs and the weights before a step."""

import logging

import torch

from tidemill.learner import BeforeLogProbs, BeforeStep

log = logging.getLogger(__name__)


def log_pass(moment: BeforeLogProbs) -> None:
    """Log the policy whose log-probs follow, and the tokens of this rank."""
    tokens = sum(len(row.tokens_T) for row in moment.batch.micro_batches)
    log.info("log-probs step=%d policy=%s tokens=%d", moment.batch.step, moment.policy, tokens)


@torch.no_grad()
def log_norms(moment: BeforeStep) -> None:
    """Log the largest weight of this rank, every tenth step."""
    if moment.batch.step % 10 == 0:
        largest = max(float(weight.abs().max()) for chunk in moment.chunks for weight in chunk.parameters())
        log.info("before step=%d minibatch=%d largest_weight=%.3f", moment.batch.step, moment.minibatch, largest)
