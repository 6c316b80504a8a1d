"""Metrics ``data/...`` of a step (docs/metrics.md): of its samples and of its episodes; the alarm for long episodes."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.messages import Plan, Sample, Turns
from tidemill.learner.algorithms.alarms import AlarmConfig, Context, check
from tidemill.learner.batch.batch import StepBatch

log = logging.getLogger(__name__)

SECONDS, SHARE = "data/episode_seconds_p95", "data/episode_lag_share_p95"
NUM_STEPS = 16
"""Number of newest steps whose mean time counts: a checkpoint or an evaluation makes single steps long."""
LIMITS = ("turns", "tokens", "context", "total_tokens")
"""Limits of a budget that end an episode and leave it trained."""
MOST_PARTS = 32
"""Parts of the reward that are metrics: their names come from rewards, which may make any number of them."""
_OVERRIDDEN, _MALFORMED = "overridden_sampling", "malformed_calls"
"""Remarks of actors in the metadata of episodes."""
_COUNTS = {"branched_turns": ("forks", "begins"), "untrained_turns": ("asked", "log_probs", "empty")}
"""Remarks that have counts, by kind."""
_MAX_COUNT = 2**31


def episode_metrics(samples: Sequence[Sample], plan: Plan) -> dict[str, float]:
    """Return the metrics of the samples of a plan that a rollout has made; empty if there are none."""
    episodes = [(sample, sample.turns) for sample in samples if sample.turns is not None]
    if not episodes:
        return {}
    rollouts = [sample for sample, _ in episodes]
    num_turns = np.array([len(turns.at) for _, turns in episodes])
    finishes = [finish for _, turns in episodes for finish in turns.finish]
    sampled = sum(int(turns.tokens.sum()) for _, turns in episodes)
    seconds = [float((turns.begin_s + turns.seconds).max(initial=0.0)) for _, turns in episodes]

    def share(flags: Iterable[object]) -> float:
        return float(np.mean([bool(flag) for flag in flags]))

    return {
        "data/episodes": float(len(episodes)),
        "data/turns_mean": float(num_turns.mean()),
        "data/turns_max": float(num_turns.max()),
        "data/sequences_mean": float(np.mean([len(sample.sizes) for sample in rollouts])),
        "data/context_share": 1 - sampled / max(1, sum(len(sample.tokens) for sample in rollouts)),
        SECONDS: float(np.percentile(seconds, 95)),
        # Samples of other actors may have no turn.
        "data/cut_turns_share": finishes.count("cut") / max(1, int(num_turns.sum())),
        "data/overridden_share": share(sample.metadata.get(_OVERRIDDEN) for sample in rollouts),
        "data/malformed_calls_share": share(sample.metadata.get(_MALFORMED) for sample in rollouts),
        **{
            f"data/{remark}/{kind}": _mean_count(rollouts, remark, kind)
            for remark, kinds in _COUNTS.items()
            for kind in kinds
        },
        "data/episode_queued_seconds": float(np.mean([sample.timings.queued_s for sample in rollouts])),
        "data/episode_generating_seconds": float(np.mean([sample.timings.generating_s for sample in rollouts])),
        "data/episode_tools_seconds": float(np.mean([sample.timings.tools_s for sample in rollouts])),
        "data/episode_reward_seconds": float(np.mean([sample.timings.reward_s for sample in rollouts])),
        **{
            f"data/budget_share/{limit}": share(sample.finish_reason == f"budget.{limit}" for sample in rollouts)
            for limit in LIMITS
        },
        **_masked_shares(episodes, plan),
    }


def _mean_count(episodes: Sequence[Sample], remark: str, kind: str) -> float:
    """Return the mean of a count in the remarks of episodes; anything else that an actor wrote there counts as 0."""
    remarks = [sample.metadata.get(remark) for sample in episodes]
    counts = [value.get(kind) if isinstance(value, Mapping) else 0 for value in remarks]
    return float(np.mean([count if isinstance(count, int) and 0 <= count <= _MAX_COUNT else 0 for count in counts]))


def _masked_shares(episodes: Sequence[tuple[Sample, Turns]], plan: Plan) -> dict[str, float]:
    """Return the shares of sampled tokens that the gate masks for their age: of all turns, and of all first turns."""
    counts = np.zeros((2, 2))
    for episode, turns in episodes:
        steps = [plan.version_steps[span.version] for span in episode.spans]
        step_R = np.repeat(np.array(steps, np.int64), [span.num_tokens for span in episode.spans])
        sampled_R = episode.loss_mask.astype(bool)
        masked_R = sampled_R & (step_R < plan.oldest_step) if plan.oldest_step is not None else np.zeros_like(sampled_R)
        first = slice(int(turns.at[0]), int(turns.at[0] + turns.tokens[0])) if len(turns.at) else slice(0, 0)
        counts += [[masked_R.sum(), sampled_R.sum()], [masked_R[first].sum(), sampled_R[first].sum()]]
    all_turns, first_turns = (float(masked / max(1, sampled)) for masked, sampled in counts)
    return {"data/masked_share_all_turns": all_turns, "data/masked_share_first_turn": first_turns}


def facts_of(plan: Plan, batches: Sequence[StepBatch], filtered: int = 0) -> dict[str, float]:
    """Return the metrics of a step's samples. ``filtered``: groups that filters dropped for it."""
    in_queue, in_flight = lags_of(batches)
    lags = in_queue + in_flight
    first = batches[0]
    packed = sum(len(part.tokens_T) for batch in batches for part in batch.micro_batches)
    return {
        "data/groups": float(len(plan.tasks)),
        "data/samples": float(len(plan.seqs)),
        "data/filtered_share": filtered / (filtered + len(plan.tasks)),
        "data/masked_samples": 0.0 if plan.masked is None else float(len(plan.masked)),
        "data/tokens": float(first.num_tokens),
        "data/packed_tokens": float(packed),
        "data/micro_batches": float(plan.num_micro_batches),
        "data/reward_mean": float(first.rewards_N[first.scored_N].mean()),
        **_reward_parts(first),
        "data/response_length_mean": float(first.response_lengths_N.mean()),
        "data/truncated_share": float(first.truncated_N.mean()),
        "data/lag_mean": float(lags.mean()) if len(lags) else 0.0,
        "data/lag_max": float(lags.max(initial=0)),
        "data/lag_in_flight_mean": float(in_flight.mean()) if len(lags) else 0.0,
        "data/lag_in_queue_mean": float(in_queue.mean()) if len(lags) else 0.0,
    }


def _reward_parts(batch: StepBatch) -> dict[str, float]:
    """Return the mean of each part of the rewards, over the samples that have it."""
    parts_NK = batch.parts_NK.reshape(len(batch.rewards_N), -1)[batch.scored_N]
    there_NK = ~np.isnan(parts_NK)
    return {
        f"data/reward/{name}": float(parts_NK[there_NK[:, place], place].mean())
        for place, name in enumerate(batch.part_names[:MOST_PARTS])
        if there_NK[:, place].any()
    }


def lags_of(batches: Sequence[StepBatch]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the lag of every trainable token in two parts >= 0, in steps: in the queue and in flight.

    The queue's part is the lag of the newest trainable token of the sample, which has grown since the response was
    finished. The rest is the token's age relative to it: the versions that were published while the response was in
    flight.
    """
    parts = [part for batch in batches for part in batch.micro_batches]
    lags = np.concatenate([part.lag_T[part.loss_mask_T] for part in parts])
    rows = np.concatenate([part.sample_T[part.loss_mask_T] for part in parts])
    if not len(rows):
        return lags, lags
    newest = np.full(len(batches[0].rewards_N), np.iinfo(np.int32).max, np.int32)
    # The tokens of a sample follow each other, but for what is cut: first the least of each stretch, which is faster.
    starts = np.concatenate([[0], np.flatnonzero(np.diff(rows)) + 1])
    np.minimum.at(newest, rows[starts], np.minimum.reduceat(lags, starts))
    in_queue = newest[rows]
    return in_queue, lags - in_queue


class EpisodeAge:
    """Compares the seconds of a step's episodes with the time for which their tokens may be trained: ``max_lag`` steps.

    The first turns of a longer episode are too old when it ends, however fast the step comes that trains it. Then it
    raises the alarm ``long_episodes``.
    """

    def __init__(self, config: AlarmConfig, context: Context) -> None:
        self._config, self._context = config, context
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._done_s: float | None = None
        self.trouble = ""
        """The alarm of the newest step, for the feeder's row; empty = none."""

    def done(self, metrics: Mapping[str, float], now: float, *, recorded: bool = False) -> dict[str, float]:
        """Return the share for a step that was done at ``now`` (monotonic); nothing without episodes or a step time.

        ``recorded``: an earlier start took the step too. It waited for no samples, so its time is no measure.
        """
        previous_s, self._done_s = self._done_s, now
        if recorded or previous_s is None:
            return {}
        self._steps_s.append(now - previous_s)
        limit_s = self._context.max_lag * sum(self._steps_s) / len(self._steps_s)
        if SECONDS not in metrics or limit_s <= 0:
            self.trouble = ""
            return {}
        share = {SHARE: metrics[SECONDS] / limit_s}
        alarms = check(share, self._config, self._context) if self._config.action != "off" else ()
        self.trouble = "; ".join(str(alarm) for alarm in alarms)
        for alarm in alarms:
            log.warning(
                "alarm %s seconds=%.1f step_seconds=%.1f", alarm, metrics[SECONDS], limit_s / self._context.max_lag
            )
        return share
