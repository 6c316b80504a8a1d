"""Metrics of a step's episodes: turns, sequences, budgets and seconds (docs/metrics.md)."""

from collections.abc import Mapping, Sequence

import numpy as np

from tidemill.bus.wire.messages import Plan, Sample
from tidemill.learner.feed.episode_age import SECONDS

LIMITS = ("turns", "tokens", "context", "total_tokens")
"""Limits of a budget that end an episode and leave it trained."""
_OVERRIDDEN, _MALFORMED, _BRANCHED, _UNTRAINED = "overridden_sampling", "malformed_calls", "branched_turns", "untrained_turns"
"""Remarks of actors in the metadata of episodes."""
_MOST_TURNS = 2**31
_KINDS = {_BRANCHED: ("forks", "begins"), _UNTRAINED: ("asked", "log_probs", "empty")}


def episode_metrics(samples: Sequence[Sample], plan: Plan) -> dict[str, float]:
    """Return ``data/...`` of those of a plan's samples that a rollout has made; empty if there are none."""
    episodes = [sample for sample in samples if sample.turns is not None]
    if not episodes:
        return {}
    turns = np.array([len(sample.turns.at) for sample in episodes if sample.turns is not None])
    finishes = [finish for sample in episodes if sample.turns is not None for finish in sample.turns.finish]
    tokens = sum(len(sample.tokens) for sample in episodes)
    sampled = sum(int(sample.turns.tokens.sum()) for sample in episodes if sample.turns is not None)
    timings = [sample.timings for sample in episodes]
    return (
        {
            "data/episodes": float(len(episodes)),
            "data/turns_mean": float(turns.mean()),
            "data/turns_max": float(turns.max()),
            "data/sequences_mean": float(np.mean([len(sample.sizes) for sample in episodes])),
            "data/context_share": 1 - sampled / max(1, tokens),
            SECONDS: float(np.percentile([_seconds(sample) for sample in episodes], 95)),
            "data/cut_turns_share": finishes.count("cut") / max(1, int(turns.sum())),  # a sample of another actor may have no turn
            "data/overridden_share": float(np.mean([bool(sample.metadata.get(_OVERRIDDEN)) for sample in episodes])),
            "data/malformed_calls_share": float(np.mean([bool(sample.metadata.get(_MALFORMED)) for sample in episodes])),
            **{f"data/{remark}/{kind}": _mean_count(episodes, remark, kind) for remark, kinds in _KINDS.items() for kind in kinds},
            "data/episode_queued_seconds": float(np.mean([timing.queued_s for timing in timings])),
            "data/episode_generating_seconds": float(np.mean([timing.generating_s for timing in timings])),
            "data/episode_tools_seconds": float(np.mean([timing.tools_s for timing in timings])),
            "data/episode_reward_seconds": float(np.mean([timing.reward_s for timing in timings])),
        }
        | {
            f"data/budget_share/{limit}": float(np.mean([sample.finish_reason == f"budget.{limit}" for sample in episodes]))
            for limit in LIMITS
        }
        | _masked_shares(episodes, plan)
    )


def _seconds(episode: Sample) -> float:
    """Return the seconds from the begin of an episode to the end of its last model call; 0 for one without any."""
    turns = episode.turns
    return 0.0 if turns is None else float((turns.begin_s + turns.seconds).max(initial=0.0))


def _mean_count(episodes: Sequence[Sample], remark: str, kind: str) -> float:
    """Return the mean of a count in the remarks of episodes; one that is no count is 0: an actor may write anything there."""
    remarks = [sample.metadata.get(remark) for sample in episodes]
    counts = [found.get(kind) if isinstance(found, Mapping) else 0 for found in remarks]
    return float(np.mean([count if isinstance(count, int) and 0 <= count <= _MOST_TURNS else 0 for count in counts]))


def _masked_shares(episodes: Sequence[Sample], plan: Plan) -> dict[str, float]:
    """Return the shares of sampled tokens that the gate masks for their age: of all turns, and of each episode's first one."""
    counts = np.zeros((2, 2))
    for episode in episodes:
        steps = [plan.version_steps[span.version] for span in episode.spans]
        step_R = np.repeat(np.array(steps, np.int64), [span.num_tokens for span in episode.spans])
        sampled_R = episode.loss_mask.astype(bool)
        masked_R = sampled_R & (step_R < plan.oldest_step) if plan.oldest_step is not None else np.zeros_like(sampled_R)
        turns = episode.turns
        first = slice(0, 0) if turns is None or not len(turns.at) else slice(int(turns.at[0]), int(turns.at[0] + turns.tokens[0]))
        counts += [[masked_R.sum(), sampled_R.sum()], [masked_R[first].sum(), sampled_R[first].sum()]]
    of_all, of_first = (float(masked / max(1, sampled)) for masked, sampled in counts)
    return {"data/masked_share_all_turns": of_all, "data/masked_share_first_turn": of_first}
