"""Recorded steps for tests of the debugging modes."""

import numpy as np

from tests.learner_steps import make_samples
from tidemill.bus.wire.messages import Plan
from tidemill.learner.debug.rollout_file import DumpedRollout

VOCAB = 300


def rollout(
    step: int = 3, *, groups: int = 4, group_size: int = 4, oldest_step: int | None = None, vocab: int = VOCAB
) -> DumpedRollout:
    """Return a step with random samples, packed for one rank in one micro-batch."""
    samples = make_samples(vocab=vocab, step=step, groups=groups, group_size=group_size)
    zeros = np.zeros(len(samples), np.int32)
    plan = Plan(
        epoch=1,
        step=step,
        tasks=np.arange(1, groups + 1, dtype=np.int64),
        seqs=np.arange(1, len(samples) + 1, dtype=np.int64),
        group_sizes=np.full(groups, group_size, np.int32),
        ranks=zeros,
        micro_batches=zeros,
        version_steps={version: version for version in range(step)},
        oldest_step=oldest_step,
        data_parallel=1,
        num_micro_batches=1,
        num_minibatches=1,
        config_digest="d",
        chain="0" * 64,
    )
    return DumpedRollout(run="r", plan=plan, samples=samples, token_limits={1: 12})
