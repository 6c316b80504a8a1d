"""The checkpoint of the best version (``eval.best``): ordered with its step, kept beside the newest ones, named in the
row run/best.

plan of step k --> wants(k): version due? --> checkpoint k --> evaluated --> best --> spared from removal
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from tidemill.bus.client.rows import Value
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.subjects import BEST_KEY
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import Checkpoint
from tidemill.learner.evaluation.evaluations import Evaluations
from tidemill.learner.evaluation.scores import Scored

log = logging.getLogger(__name__)


class BestCheckpoint:
    """Knows which checkpoints have the best score, or may get it. Without ``eval.best`` there are none."""

    def __init__(
        self, bus: Bus, root: Path, evaluations: Evaluations, *, epoch: int, head: tuple[int, int] | None
    ) -> None:
        """``head``: version and step of the newest weights when this start began."""
        self._bus, self._root, self._evaluations, self._epoch, self._first_head = bus, root, evaluations, epoch, head
        self._row: Value = {}

    @property
    def wanted(self) -> bool:
        """True if the settings have a score by which versions are compared."""
        return bool(self._evaluations.best.set)

    async def begin(self) -> None:
        """Write the row as of the scores of earlier starts; without ``eval.best``, remove it. Raises BusError."""
        if self.wanted:
            await self.note()
        elif (await self._bus.rows("run").read(BEST_KEY))[1]:
            await self._bus.rows("run").delete(BEST_KEY)

    def due(self, step: int, *, versions: Mapping[int, int], head: tuple[int, int] | None, push_every: int) -> bool:
        """Return whether the weights of a planned step will be evaluated, as far as that is known before they have a
        version.

        ``versions``: step of every version so far. ``head``: the newest of them, and its step.
        """
        republished = head == self._first_head
        candidates = versions_of(step, versions=versions, head=head, push_every=push_every, republished=republished)
        return any(self._evaluations.rounds.due(version, step) for version in candidates)

    async def spared(self) -> list[str]:
        """Return the checkpoints of the best version, and of versions that are being evaluated or will be next."""
        if not self.wanted:
            return []
        listed = await asyncio.to_thread(disk.listed, self._root)
        names = {
            checkpoint.path.name for checkpoint in listed if checkpoint.step in self._evaluations.rounds.pending_steps
        }
        best = self._best(listed)
        return sorted(names if best is None else names | {best[1].path.name})

    async def note(self) -> None:
        """Write the row, if the best version has changed. Raises BusError."""
        best = self._best(await asyncio.to_thread(disk.listed, self._root)) if self.wanted else None
        if best is None:
            return
        scored, checkpoint = best
        score = self._evaluations.best
        row: Value = {
            "step": scored.step,
            "version": scored.version,
            "set": score.set,
            "metric": score.metric,
            "value": scored.value,
            "directory": str(checkpoint.path),
            "epoch": self._epoch,
        }
        if row != self._row:
            await self._bus.retry(lambda: self._bus.rows("run").put(BEST_KEY, row))
            text = "best checkpoint=%s version=%d %s/%s=%.4g"
            log.info(text, checkpoint.path, scored.version, score.set, score.metric, scored.value)
            self._row = row

    def _best(self, listed: Collection[Checkpoint]) -> tuple[Scored, Checkpoint] | None:
        """Return the best version that has a checkpoint, with the newest one of its step."""
        for scored in self._evaluations.best.ranked:
            for checkpoint in listed:
                if checkpoint.step == scored.step:
                    return scored, checkpoint
        return None


def versions_of(
    step: int, *, versions: Mapping[int, int], head: tuple[int, int] | None, push_every: int, republished: bool
) -> Collection[int]:
    """Return the versions of a repeated step, or the versions that the weights of a new one may become.

    ``republished``: a start publishes once more the weights of its first step, or of the last step that it repeats, and
    it is not known whether it has; later versions may then be one higher.
    """
    if published := [version for version, version_step in versions.items() if version_step == step]:
        return published
    if head is None or step % push_every:
        return ()
    version = head[0] + step // push_every - head[1] // push_every
    return (version, version + 1) if republished else (version,)
