"""Metrics of a step's episodes: turns, sequences, budgets and seconds (docs/metrics.md)."""

from collections.abc import Sequence

import numpy as np

from bus.wire.messages import Sample

LIMITS = ("turns", "tokens", "context", "total_tokens")
"""Limits of a budget that end an episode and leave it trained."""
_OVERRIDDEN, _MALFORMED = "overridden_sampling", "malformed_calls"


def episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return ``data/...`` of the samples that a rollout has made; empty if there are none."""
    episodes = [sample for sample in samples if sample.turns is not None]
    if not episodes:
        return {}
    turns = np.array([len(sample.turns.at) for sample in episodes if sample.turns is not None])
    finishes = [finish for sample in episodes if sample.turns is not None for finish in sample.turns.finish]
    tokens = sum(len(sample.tokens) for sample in episodes)
    sampled = sum(int(sample.turns.tokens.sum()) for sample in episodes if sample.turns is not None)
    timings = [sample.timings for sample in episodes]
    return {
        "data/episodes": float(len(episodes)),
        "data/turns_mean": float(turns.mean()),
        "data/turns_max": float(turns.max()),
        "data/sequences_mean": float(np.mean([len(sample.sizes) for sample in episodes])),
        "data/context_share": 1 - sampled / max(1, tokens),
        "data/cut_turns_share": finishes.count("cut") / max(1, int(turns.sum())),  # a sample of another actor may have no turn
        "data/overridden_share": float(np.mean([bool(sample.metadata.get(_OVERRIDDEN)) for sample in episodes])),
        "data/malformed_calls_share": float(np.mean([bool(sample.metadata.get(_MALFORMED)) for sample in episodes])),
        "data/episode_queued_seconds": float(np.mean([timing.queued_s for timing in timings])),
        "data/episode_generating_seconds": float(np.mean([timing.generating_s for timing in timings])),
        "data/episode_tools_seconds": float(np.mean([timing.tools_s for timing in timings])),
        "data/episode_reward_seconds": float(np.mean([timing.reward_s for timing in timings])),
    } | {
        f"data/budget_share/{limit}": float(np.mean([sample.finish_reason == f"budget.{limit}" for sample in episodes])) for limit in LIMITS
    }
