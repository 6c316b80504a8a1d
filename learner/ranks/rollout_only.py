"""The one rank of a learner that trains nothing: it reports the figures of each step's samples. Loads no torch.

    feeder -- batch --> figures --> done --> checkpoint (the position in the data, without weights)

Waits for the feeder, bounded by its silence. After SIGTERM the feeder ends the run behind the last step.
"""

import logging
from functools import partial
from pathlib import Path

import numpy as np

from tidemill.bus import exit_codes
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.checkpoints import disk
from tidemill.learner.errors import NoCheckpoint
from tidemill.learner.feed.feed_client import FeedClient, note_step
from tidemill.learner.feed.feed_messages import FeedEnd, Last
from tidemill.learner.feed.feeder_settings import RankPlaces

log = logging.getLogger(__name__)


def main(places: RankPlaces) -> int:
    """Take all steps of the run. Returns the exit code of the process, as a rank does."""
    return exit_codes.run(partial(_consume, places), log)


def _consume(places: RankPlaces) -> None:
    with FeedClient(places.feeder_url, keys=places.feeder_keys, rank=0, dp_rank=0, dp_size=1) as feed:
        with feed.drained_by_sigterm(places.progress):
            _Consumer(places, feed).run()


class _Consumer:
    def __init__(self, places: RankPlaces, feed: FeedClient) -> None:
        self._places, self._feed = places, feed

    def run(self) -> None:
        start = self._feed.hello()
        if start.checkpoint is not None and not (Path(start.checkpoint) / disk.NO_WEIGHTS).exists():
            reason = "want one of a run with debug.rollout_only, got one with weights"
            raise NoCheckpoint(start.checkpoint, reason)
        step = start.step + 1
        while not isinstance(batch := self._feed.next(step), FeedEnd):
            if isinstance(batch, Last):
                self._checkpoint(batch.step, start.epoch, batch.state)
                continue
            self._feed.done(batch.step, figures(batch))
            note_step(self._places.progress)
            log.info("step=%d reward=%.4f samples=%d", batch.step, float(batch.rewards_N.mean()), len(batch.rewards_N))
            self._checkpoint(batch.step, start.epoch, batch.state)
            step += 1

    def _checkpoint(self, step: int, epoch: int, state: bytes) -> None:
        if state:
            staged = disk.staging(self._places.checkpoints, step=step, epoch=epoch)
            (staged / disk.NO_WEIGHTS).write_bytes(b"debug.rollout_only\n")
            self._feed.checkpointed(step, str(disk.commit(staged, state)))


def figures(batch: StepBatch) -> dict[str, float]:
    """Return the metrics of a step's samples, under the names that a training rank reports them by."""
    kept_N, log_probs = batch.scored_N, batch.engine_log_probs
    rewards_N, lengths_N, groups_N = (
        batch.rewards_N[kept_N].astype(np.float64),
        batch.response_lengths_N[kept_N],
        batch.groups_N[kept_N],
    )
    groups = [rewards_N[groups_N == group] for group in np.unique(groups_N)]
    metrics = {
        "train/reward_mean": rewards_N.mean(),
        "train/reward_std": rewards_N.std(),
        "train/groups": len(groups),
        "train/zero_variance_group_share": np.mean([np.ptp(group) == 0 for group in groups]),
        "train/response_length_mean": lengths_N.mean(),
        "train/response_length_max": lengths_N.max(),
        "train/truncated_share": batch.truncated_N[kept_N].mean(),
        "train/tokens": batch.num_tokens,
    }
    if batch.unended_share is not None:
        metrics["train/unended_share"] = batch.unended_share
    if len(log_probs):
        metrics["data/logprob_mean"] = log_probs.mean(dtype=np.float64)
    return {name: float(value) for name, value in metrics.items()}
