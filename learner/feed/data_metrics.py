"""Metrics ``data/...`` of a step (docs/metrics.md): of its samples and of its episodes; the alarm for long episodes."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.messages import Plan
from tidemill.learner.algorithms.alarms import AlarmConfig, Context, check
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.batch.batching import kept_spans
from tidemill.learner.buffer.sample_index import COUNTS, EpisodeIndex, SampleIndex

log = logging.getLogger(__name__)

SECONDS, SHARE = "data/episode_seconds_p95", "data/episode_lag_share_p95"
NUM_STEPS = 16
"""Number of newest steps whose mean time counts: a checkpoint or an evaluation makes single steps long."""
LIMITS = ("turns", "tokens", "context", "total_tokens")
"""Limits of a budget that end an episode and leave it trained."""
MOST_PARTS = 32
"""Parts of the reward that are metrics: their names come from rewards, which may make any number of them."""
_TIMES = ("queued", "generating", "tools", "reward")
"""Names of the times in the order of ``Timings``."""


def episode_metrics(samples: Sequence[SampleIndex], plan: Plan) -> dict[str, float]:
    """Return the metrics of the samples of a plan that a rollout has made; empty if there are none."""
    rollouts = [(sample, sample.episode) for sample in samples if sample.episode is not None]
    if not rollouts:
        return {}
    episodes = [episode for _, episode in rollouts]
    num_turns = np.array([episode.num_turns for episode in episodes])
    counts = np.array([episode.counts for episode in episodes], np.float64).mean(axis=0)
    times = np.array([astuple(episode.timings) for episode in episodes]).mean(axis=0)

    def share(flags: Iterable[bool]) -> float:
        return float(np.mean(list(flags)))

    return {
        "data/episodes": float(len(episodes)),
        "data/turns_mean": float(num_turns.mean()),
        "data/turns_max": float(num_turns.max()),
        "data/sequences_mean": float(np.mean([len(sample.sizes) for sample, _ in rollouts])),
        "data/context_share": 1
        - sum(episode.sampled for episode in episodes) / max(1, sum(sample.num_tokens for sample, _ in rollouts)),
        SECONDS: float(np.percentile([episode.seconds for episode in episodes], 95)),
        # Samples of other actors may have no turn.
        "data/cut_turns_share": sum(episode.num_cut for episode in episodes) / max(1, int(num_turns.sum())),
        "data/overridden_share": share(episode.is_overridden for episode in episodes),
        "data/malformed_calls_share": share(episode.is_malformed for episode in episodes),
        **{f"data/{remark}/{kind}": float(count) for (remark, kind), count in zip(COUNTS, counts, strict=True)},
        **{f"data/episode_{name}_seconds": float(value) for name, value in zip(_TIMES, times, strict=True)},
        **{
            f"data/budget_share/{limit}": share(episode.finish_reason == f"budget.{limit}" for episode in episodes)
            for limit in LIMITS
        },
        **_masked_shares(rollouts, plan),
    }


def _masked_shares(episodes: Sequence[tuple[SampleIndex, EpisodeIndex]], plan: Plan) -> dict[str, float]:
    """Return the shares of sampled tokens that the gate masks for their age: of all turns, and of all first turns."""

    def masked_share(counts: Iterable[tuple[int, int]]) -> float:
        """Return the share of the tokens in (version, tokens) that are too old."""
        pairs = [(plan.version_steps[version], tokens) for version, tokens in counts]
        masked = sum(tokens for step, tokens in pairs if plan.oldest_step is not None and step < plan.oldest_step)
        return masked / max(1, sum(tokens for _, tokens in pairs))

    first_turns = [
        (version, tokens) for _, episode in episodes for turn, version, tokens in episode.by_turn if turn == 0
    ]
    return {
        "data/masked_share_all_turns": masked_share(pair for sample, _ in episodes for pair in sample.by_version),
        "data/masked_share_first_turn": masked_share(first_turns),
    }


def facts_of(
    plan: Plan, samples: Sequence[SampleIndex], columns: StepBatch, *, filtered: int = 0, pad_to: int = 1
) -> dict[str, float]:
    """Return the metrics of a step's samples. ``columns``: the batch of any rank. ``filtered``: groups that filters
    dropped for it. ``pad_to``: as for ``build_batches``.
    """
    in_queue, in_flight, tokens = lags_of(plan, samples)
    lags, total = in_queue + in_flight, max(1, int(tokens.sum()))
    return {
        "data/groups": float(len(plan.tasks)),
        "data/samples": float(len(plan.seqs)),
        "data/filtered_share": filtered / (filtered + len(plan.tasks)),
        "data/masked_samples": 0.0 if plan.masked is None else float(len(plan.masked)),
        "data/tokens": float(columns.num_tokens),
        "data/packed_tokens": float(_packed_tokens(plan, samples, pad_to)),
        "data/micro_batches": float(plan.num_micro_batches),
        "data/reward_mean": float(columns.rewards_N[columns.scored_N].mean()),
        **_reward_parts(columns),
        "data/response_length_mean": float(columns.response_lengths_N.mean()),
        "data/truncated_share": float(columns.truncated_N.mean()),
        "data/lag_mean": float((lags * tokens).sum() / total),
        "data/lag_max": float(lags.max(initial=0)),
        "data/lag_in_flight_mean": float((in_flight * tokens).sum() / total),
        "data/lag_in_queue_mean": float((in_queue * tokens).sum() / total),
    }


def _packed_tokens(plan: Plan, samples: Sequence[SampleIndex], pad_to: int) -> int:
    """Return the tokens of all rows, padding included; a row without sequences is padding."""
    lengths = [length for sample in samples for length in sample.lengths]
    rows = plan.ranks.astype(np.int64) * plan.num_micro_batches + plan.micro_batches
    per_row = np.bincount(rows, lengths, plan.data_parallel * plan.num_micro_batches).astype(np.int64)
    return int((np.maximum(1, -(-per_row // pad_to)) * pad_to).sum())


def _reward_parts(batch: StepBatch) -> dict[str, float]:
    """Return the mean of each part of the rewards, over the samples that have it."""
    parts_NK = batch.parts_NK.reshape(len(batch.rewards_N), -1)[batch.scored_N]
    there_NK = ~np.isnan(parts_NK)
    return {
        f"data/reward/{name}": float(parts_NK[there_NK[:, place], place].mean())
        for place, name in enumerate(batch.part_names[:MOST_PARTS])
        if there_NK[:, place].any()
    }


def lags_of(
    plan: Plan, samples: Sequence[SampleIndex]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the lag of trainable tokens in two parts >= 0, in steps: in the queue and in flight; and how many tokens
    have it.

    The queue's part is the lag of the newest trainable token of the sample, which has grown since the response was
    finished. The rest is the token's age relative to it: the versions that were published while the response was in
    flight.
    """
    sample_S, lag_S, tokens_S = kept_spans(plan, samples).T
    newest_N = np.full(len(samples), np.iinfo(np.int64).max)
    np.minimum.at(newest_N, sample_S, lag_S)
    in_queue_S = newest_N[sample_S]
    return in_queue_S, lag_S - in_queue_S, tokens_S


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
