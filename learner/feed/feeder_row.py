"""The feeder's live row and its heartbeats to the ranks: its phase, the event that it waits for, and its numbers.

Consumes the state of the other parts; produces heartbeats every ``BEAT_S``. Ends with NoProgress when a rank has waited
too long, and with TasksFail when every task fails.
"""

import asyncio
import time
from dataclasses import dataclass

from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.failures import UNTRAINED_SHARE, Senders
from tidemill.learner.buffer.step_plan import is_filtered
from tidemill.learner.errors import NoProgress
from tidemill.learner.evaluation.evaluations import Evaluations
from tidemill.learner.feed.copies import Copies
from tidemill.learner.feed.data_metrics import EpisodeAge
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.filtering import Filtering
from tidemill.learner.feed.intake import Intake
from tidemill.learner.feed.issuing import Curriculum
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.settings.config import LearnerConfig

BEAT_S = 1.0
"""Interval of the heartbeats to ranks and on the bus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a feeder that a start restores."""

    source: DataSource
    prompts: PromptFile
    curriculum: Curriculum
    senders: Senders
    intake: Intake
    filtering: Filtering
    evaluations: Evaluations
    age: EpisodeAge
    replayed: asyncio.Event
    """Set when all recorded steps are repeated."""


class FeederRow:
    """Phase and waits of the feeder, which its loops set."""

    def __init__(self, server: FeedServer, learner: LearnerConfig) -> None:
        self._server, self._learner = server, learner
        self.phase = "starting"
        self.text = "the bus"
        """The event that the feeder waits for."""
        self.held = False
        """True while the next step waits for an evaluation."""
        self._evaluated_s = 0.0
        """Time of the last result of an evaluation that a step has waited for."""
        self.copies: Copies | None = None
        """Set when each node has checkpoints of its own, or there is a store."""
        self.parts: Parts | None = None
        """None until the state is restored: heartbeats begin before."""

    async def beat(self, heartbeat: HeartbeatPublisher) -> None:
        """Background loop: heartbeats on the bus and for waiting ranks. Raises NoProgress, TasksFail."""
        while True:
            now = time.monotonic()
            starved_s = self._server.starved_s(now)
            await self._server.beat(self._waits_for())
            if self.held and self.parts is not None:
                self._evaluated_s = self.parts.evaluations.moved_s
            if min(starved_s, now - self._evaluated_s) > self._learner.batch_timeout_s:
                raise NoProgress("feeder", starved_s, self._waits_for())
            self._refuse_failing()
            heartbeat.update(**self._fields(starved_s))
            await asyncio.sleep(BEAT_S)

    def _refuse_failing(self) -> None:
        """Raise TasksFail where every task fails."""
        if self.parts is None:
            return
        # A run that has trained may wait for a server of its reward; one that never has is more likely to have a
        # defect.
        within_s = self._learner.failing_s * (1.0 if self.parts.source.step else UNTRAINED_SHARE)
        self.parts.intake.failing.refuse(self._learner.failing_tasks, within_s)

    @property
    def copies_waited_for(self) -> str:
        """The copies, or the upload, that a checkpoint waits for; empty = none waits."""
        return "" if self.copies is None else self.copies.waits_for

    def _waits_for(self) -> str:
        evaluation = self.parts.evaluations.rounds.open if self.parts is not None and self.phase == "ending" else ""
        return "; ".join(text for text in (self.text, evaluation, self.copies_waited_for) if text)

    def _fields(self, starved_s: float) -> dict[str, object]:
        parts = self.parts
        if parts is None:
            return {"phase": self.phase, "waits_for": self._waits_for()}
        if self.phase not in ("ending", "draining"):
            self.phase = "waiting" if starved_s else ("working" if parts.replayed.is_set() else "replaying")
        accounting = parts.source.accounting()
        reasons = accounting.settled.items()
        load = {
            "step": parts.source.step,
            "buffered": accounting.buffered,
            "trained": accounting.trained,
            "open_tasks": accounting.open,
            "tasks_dead": accounting.settled.get("dead", 0),
            "failed": accounting.dropped.get("failed", 0),
            "bad_rows": len(parts.prompts.bad_rows) + parts.evaluations.num_bad_rows,
            "prompts_left_out": len(parts.curriculum),
            "behind": parts.intake.behind,
            "invalid": accounting.invalid.total(),
            **{f"accounted/{name}": count for name, count in accounting.counts().items()},
            **parts.senders.load(accounting.invalid, accounting.invalid_of),
            "filtered": sum(count for reason, count in reasons if is_filtered(reason)),
        }
        troubles = [parts.prompts.trouble, *parts.evaluations.troubles, parts.filtering.trouble]
        troubles += [parts.age.trouble, parts.intake.failing.trouble]
        version = parts.source.head[0] if parts.source.head else -1
        return {
            "phase": self.phase,
            "waits_for": self._waits_for(),
            "trouble": "; ".join(filter(None, troubles)),
            "version": version,
            "load": {key: float(value) for key, value in load.items()} | parts.filtering.load(),
        }
