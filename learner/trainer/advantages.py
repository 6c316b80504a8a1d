"""Advantages of the samples, turns and tokens of a step: of the objective, of its running baselines, or of a critic.

Shape letters: T = tokens of a packed micro-batch, N = samples of the step on all ranks, K = parts of the reward.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidemill.learner.algorithms.choices import RUNNING
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.gae_vtrace import with_token_advantages
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.algorithms.tokens import Tokens, sequence_sums
from tidemill.learner.trainer.adaptive import Adaptive
from tidemill.learner.trainer.critic import Critic
from tidemill.learner.trainer.passes import Passes
from tidemill.learner.trainer.rows import Row, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """The advantages under the settings of a step."""

    objective: Objective
    algorithm: AlgorithmConfig
    turn_gamma: float | None
    """Discount of the returns of turns, which have advantages of their own; None = no turns."""
    adaptive: Adaptive
    """Its baselines move with each step."""
    critic: Critic | None
    passes: Passes
    device: torch.device

    def of_step(self, step: Step, rows: list[Row] | None = None) -> Tensor:
        """Return the advantage of each sample, or of each turn, float32 on the CPU. ``rows``: scored ones, for a
        penalty of their KL.
        """
        rewards_N = self._shaped_rewards(step, rows or [])
        if self.turn_gamma is None:
            return self._of_samples(rewards_N, step).float()
        place = (rewards_N, step.groups_N, step.turns)
        return self.objective.turn_advantages(*place, gamma=self.turn_gamma).float()

    def of_rows(self, rows: list[Row], step: Step, advantages: Tensor | None = None) -> list[Row]:
        """Return the rows with the advantages of their tokens. ``advantages``: of ``of_step``; None = not yet known."""
        scale, summed = self.adaptive.kl_scale, self.passes.summed
        if self.critic is not None:
            valued, rewards_N = self.critic.valued(rows), self._shaped_rewards(step, rows)
            tokens = with_token_advantages(valued, rewards_N, self.algorithm, kl_scale=scale, summed=summed)
            return [replace(row, seen=row_tokens) for row, row_tokens in zip(rows, tokens, strict=True)]
        if advantages is None:
            advantages = self.of_step(step, rows)
        advantages = advantages.to(self.device)
        places = (row.seen.sample_T if self.turn_gamma is None else row.turn_T for row in rows)
        rows = [
            replace(row, seen=_advised(row.seen, advantages, place_T))
            for row, place_T in zip(rows, places, strict=True)
        ]
        if not self.objective.by_token:
            return rows
        tokens = self.objective.with_token_returns([row.seen for row in rows], kl_scale=scale, summed=summed)
        return [replace(row, seen=row_tokens) for row, row_tokens in zip(rows, tokens, strict=True)]

    def _shaped_rewards(self, step: Step, rows: list[Row]) -> Tensor:
        """Return the rewards of the samples less their penalties. ``rows``: scored ones, for a penalty of their KL."""
        kl = self.algorithm.kl
        by_sample = kl.reward_coef and kl.reward_by == "sample"
        kl_N = self._divergences(rows, len(step.rewards_N)) if by_sample else None
        return self.objective.shaped_rewards(
            step.rewards_N,
            step.sampled_N,
            max_tokens=step.max_new_tokens,
            kl_N=kl_N,
            kl_scale=self.adaptive.kl_scale,
        )

    def _of_samples(self, rewards_N: Tensor, step: Step) -> Tensor:
        """Return the advantage of each sample; demonstrations have none, and are in no baseline."""
        kept_N = ~step.demonstration_N
        advantages_N = torch.zeros_like(rewards_N)
        if not kept_N.any():
            return advantages_N
        parts = replace(step.parts, values_NK=step.parts.values_NK[kept_N])
        columns = (rewards_N, step.groups_N, step.lengths_N, step.trainable_N)
        metadata = list(itertools.compress(step.metadata, kept_N.tolist()))
        if self.algorithm.advantage in RUNNING:
            place = (rewards_N[kept_N], step.trainable_N[kept_N], metadata)
            advantages_N[kept_N], self.adaptive.baselines = self.objective.over_running_baselines(
                *place, self.adaptive.baselines
            )
            return advantages_N
        advantages_N[kept_N] = self.objective.advantages(
            *(column_N[kept_N] for column_N in columns),
            parts=parts,
            truncated_N=step.truncated_N[kept_N],
            metadata=metadata,
        )
        return advantages_N

    def _divergences(self, rows: list[Row], num_samples: int) -> Tensor:
        """Return ``sum_t log pi_old - log pi_reference`` of every sample of the step, on all ranks, [N] on the CPU."""
        total_N = torch.zeros(num_samples, dtype=torch.float64)
        for row in rows:
            tokens = row.seen
            assert tokens.old_T is not None and tokens.reference_T is not None
            gap_T = (tokens.old_T - tokens.reference_T).double()
            total_N += sequence_sums(gap_T, tokens.mask_T, tokens.sample_T, num_samples).cpu()
        return self.passes.summed(total_N)


def _advised(tokens: Tokens, advantages: Tensor, place_T: Tensor) -> Tokens:
    """Return the inputs with the advantage of each token: ``place_T`` is its index in ``advantages``, -1 = none."""
    # -1 reads the first advantage and is set to 0.
    advantages_T = torch.where(place_T >= 0, advantages[place_T.clamp(min=0)], 0.0)
    return replace(tokens, advantages_T=advantages_T)
