"""Metrics of a step's episodes: turns, sequences, budgets and seconds (docs/metrics.md), and the alarm for episodes
that take too long.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from tidemill.bus.wire.messages import Plan, Sample
from tidemill.learner.algorithms.alarms import AlarmConfig, Context, check

log = logging.getLogger(__name__)

SECONDS, SHARE = "data/episode_seconds_p95", "data/episode_lag_share_p95"
STEPS = 16
"""Number of newest steps whose mean time counts: a checkpoint or an evaluation makes single ones long."""


class EpisodeAge:
    """Compares the seconds of a step's episodes with the time for which their tokens may be trained: ``max_lag`` steps.

    An episode that takes longer has tokens that are too old when it ends (in its first turns), however fast the step
    comes that trains it. Then it raises the alarm ``long_episodes``.
    """

    def __init__(self, config: AlarmConfig, context: Context) -> None:
        self._config, self._context = config, context
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        self._done_s: float | None = None
        self.trouble = ""
        """The alarm of the newest step, for the feeder's row; empty = none."""

    def done(self, metrics: Mapping[str, float], now: float, *, recorded: bool = False) -> dict[str, float]:
        """Return the share for a step that was done at ``now``, monotonic seconds; nothing without episodes or a time
        of steps.

        ``recorded``: an earlier start took the step too, so that it waited for no samples; it is no measure of the time
        between steps.
        """
        before, self._done_s = self._done_s, now
        if recorded or before is None:
            return {}
        self._steps_s.append(now - before)
        limit_s = self._context.max_lag * sum(self._steps_s) / len(self._steps_s)
        if SECONDS not in metrics or limit_s <= 0:
            self.trouble = ""
            return {}
        found = {SHARE: metrics[SECONDS] / limit_s}
        alarms = check(found, self._config, self._context) if self._config.action != "off" else ()
        self.trouble = "; ".join(str(alarm) for alarm in alarms)
        for alarm in alarms:
            log.warning(
                "alarm %s seconds=%.1f step_seconds=%.1f", alarm, metrics[SECONDS], limit_s / self._context.max_lag
            )
        return found


LIMITS = ("turns", "tokens", "context", "total_tokens")
"""Limits of a budget that end an episode and leave it trained."""
_OVERRIDDEN, _MALFORMED, _BRANCHED, _UNTRAINED = (
    "overridden_sampling",
    "malformed_calls",
    "branched_turns",
    "untrained_turns",
)
"""Remarks of actors in the metadata of episodes."""
_MOST_TURNS = 2**31
_KINDS = {_BRANCHED: ("forks", "begins"), _UNTRAINED: ("asked", "log_probs", "empty")}


def episode_metrics(samples: Sequence[Sample], plan: Plan) -> dict[str, float]:
    """Return ``data/...`` of the samples of a plan that a rollout has made; empty if there are none."""
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
            "data/cut_turns_share": finishes.count("cut")
            / max(1, int(turns.sum())),  # a sample of another actor may have no turn
            "data/overridden_share": float(np.mean([bool(sample.metadata.get(_OVERRIDDEN)) for sample in episodes])),
            "data/malformed_calls_share": float(
                np.mean([bool(sample.metadata.get(_MALFORMED)) for sample in episodes])
            ),
            **{
                f"data/{remark}/{kind}": _mean_count(episodes, remark, kind)
                for remark, kinds in _KINDS.items()
                for kind in kinds
            },
            "data/episode_queued_seconds": float(np.mean([timing.queued_s for timing in timings])),
            "data/episode_generating_seconds": float(np.mean([timing.generating_s for timing in timings])),
            "data/episode_tools_seconds": float(np.mean([timing.tools_s for timing in timings])),
            "data/episode_reward_seconds": float(np.mean([timing.reward_s for timing in timings])),
        }
        | {
            f"data/budget_share/{limit}": float(
                np.mean([sample.finish_reason == f"budget.{limit}" for sample in episodes])
            )
            for limit in LIMITS
        }
        | _masked_shares(episodes, plan)
    )


def _seconds(episode: Sample) -> float:
    """Return the seconds from the begin of an episode to the end of its last model call; 0 for one without any."""
    turns = episode.turns
    return 0.0 if turns is None else float((turns.begin_s + turns.seconds).max(initial=0.0))


def _mean_count(episodes: Sequence[Sample], remark: str, kind: str) -> float:
    """Return the mean of a count in the remarks of episodes; one that is no count is 0: an actor may write anything
    there.
    """
    remarks = [sample.metadata.get(remark) for sample in episodes]
    counts = [found.get(kind) if isinstance(found, Mapping) else 0 for found in remarks]
    return float(np.mean([count if isinstance(count, int) and 0 <= count <= _MOST_TURNS else 0 for count in counts]))


def _masked_shares(episodes: Sequence[Sample], plan: Plan) -> dict[str, float]:
    """Return the shares of sampled tokens that the gate masks for their age: of all turns, and of each episode's first
    one.
    """
    counts = np.zeros((2, 2))
    for episode in episodes:
        steps = [plan.version_steps[span.version] for span in episode.spans]
        step_R = np.repeat(np.array(steps, np.int64), [span.num_tokens for span in episode.spans])
        sampled_R = episode.loss_mask.astype(bool)
        masked_R = sampled_R & (step_R < plan.oldest_step) if plan.oldest_step is not None else np.zeros_like(sampled_R)
        turns = episode.turns
        first = (
            slice(0, 0)
            if turns is None or not len(turns.at)
            else slice(int(turns.at[0]), int(turns.at[0] + turns.tokens[0]))
        )
        counts += [[masked_R.sum(), sampled_R.sum()], [masked_R[first].sum(), sampled_R[first].sum()]]
    of_all, of_first = (float(masked / max(1, sampled)) for masked, sampled in counts)
    return {"data/masked_share_all_turns": of_all, "data/masked_share_first_turn": of_first}
