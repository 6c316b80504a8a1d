"""The accounting of a whole run: ``tidemill up`` writes it at the end, ``tidemill audit`` for any run on a bus.

Reads the streams, the registry of weights, the rows of the run and the newest checkpoint; observes no process.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Cursor
from tidemill.bus.wire.rows import VersionRow, row_of
from tidemill.bus.wire.subjects import BEST_KEY
from tidemill.launch.run import summary
from tidemill.launch.run.audit import Progress, RunAccounting, audit
from tidemill.launch.run.checkpoint_cursor import CheckpointCursor, read_cursor
from tidemill.launch.run.feeder_process import model_shape
from tidemill.launch.settings.config_loader import SettingsError
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY

NO_CHECKPOINT = "trimmed samples without a record, and samples trained behind the checkpoint: no checkpoint here"
NO_MODEL = "tokens of samples against the vocabulary: the model is not here"
GOES_ON = "the steps of versions in plans: the run goes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """Everything that a run has left behind."""

    config: RunConfig
    samples: RunAccounting
    lines: list[JsonObject]  # Metrics of each step
    versions: list[VersionRow]
    evaluations: list[JsonObject]
    best: JsonMapping | None
    not_checked: list[str] = field(default_factory=list)

    def summary(
        self,
        *,
        lines: Sequence[JsonMapping] = (),
        observed: summary.Observed | None = None,
        ended_by: str,
        require_reward: float = -math.inf,
    ) -> JsonObject:
        """Return the map of summary.json. ``lines``: of the steps, with more values; ``observed``: None = absent."""
        config = self.config
        max_lag = config.learner.steps if config.debug.rollout_only else config.staleness.max_lag
        result = summary.summarize(
            self.samples, lines or self.lines, self.versions, observed, run=config.run, max_lag=max_lag
        )
        return result | {
            "ended_by": ended_by,
            "best": self.best,
            "evaluations": self.evaluations,
            "not_checked": self.not_checked,
            "promises_broken": summary.broken_promises(result, require_reward=require_reward),
            "config_digest": config.digest(),
        }


async def read_accounts(
    bus: Bus,
    config: RunConfig,
    *,
    checkpoints: Path | None,
    newest: tuple[float, float] | None = None,
    goes_on: bool = False,
    after_epoch: int = 0,
    progress: Progress = lambda done, total: None,
) -> Accounts:
    """Read the streams and rows of a run. ``checkpoints``: their directory, None = not on this machine. ``newest``:
    step and epoch of the last one that counts; None = all do.

    ``goes_on``: processes may write meanwhile. ``after_epoch``: scores up to it are of another run.
    Raises ValueError for checkpoints of another run, BusUnavailable.
    """
    cursor, not_checked = await _cursor(bus, config, checkpoints, newest)
    versions = [row_of(VersionRow, value) for value, _ in (await bus.rows("weights").all("v")).values()]
    vocab_size = None
    try:
        vocab_size, _ = model_shape(Path(config.model.path))
    except SettingsError:
        not_checked.append(NO_MODEL)
    not_checked += [GOES_ON] if goes_on else []
    samples, outcomes = await audit(
        bus,
        cursor,
        versions=None if goes_on else {row.version: row.step for row in versions},
        after={row.version: row.position for row in versions},
        vocab_size=vocab_size,
        progress=progress,
    )
    best, _ = await bus.rows("run").read(BEST_KEY)
    return Accounts(
        config=config,
        samples=samples,
        lines=summary.metric_lines(outcomes),
        versions=versions,
        evaluations=summary.scores_lines(await summary.read_scores(bus, after_epoch=after_epoch)),
        best=best,
        not_checked=not_checked,
    )


async def _cursor(
    bus: Bus, config: RunConfig, checkpoints: Path | None, newest: tuple[float, float] | None
) -> tuple[CheckpointCursor | None, list[str]]:
    """Return the newest checkpoint's cursor, None where the run has none, and the checks that lack it."""
    first = await bus.samples.cursor()
    if checkpoints is not None:
        stored = bool(config.learner.checkpoint.url)
        cursor = await asyncio.to_thread(partial(read_cursor, checkpoints, stored=stored, newest=newest))
        if cursor is not None and cursor.created != first.created:
            want = f"checkpoints of run {bus.run} on this bus (samples since {first.created})"
            raise ValueError(f"checkpoints: want {want}, got those of another (since {cursor.created}): {checkpoints}")
        return cursor, []
    if (await bus.rows("run").read(CHECKPOINT_KEY))[0] is None:
        return None, []
    return _trimmed_alone(first), [NO_CHECKPOINT]


def _trimmed_alone(first: Cursor) -> CheckpointCursor:
    """Return a cursor that is past the trimmed samples and no more: only samples behind a checkpoint are trimmed."""
    return CheckpointCursor(first.floor, frozenset(), floors=first.floors)
