"""The feeder's live row and its heartbeats to the ranks: its phase, the event that it waits for, and its numbers.

Consumes the state of the other parts; produces heartbeats every ``BEAT_S``. Ends with NoProgress when a rank has waited too long.
"""

import asyncio
import time
from dataclasses import dataclass

from bus.liveness.heartbeats import HeartbeatPublisher
from learner.data.curriculum import Curriculum
from learner.data.datasource import DataSource
from learner.data.prompts import PromptFile
from learner.data.selection import is_filtered
from learner.data.senders import Senders
from learner.errors import NoProgress
from learner.feed.copies import Copies
from learner.feed.episode_age import EpisodeAge
from learner.feed.evaluations import Evaluations
from learner.feed.feed_server import FeedServer
from learner.feed.filtering import Filtering
from learner.feed.intake import Intake

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

    def __init__(self, server: FeedServer, *, batch_timeout_s: float) -> None:
        self._server, self._batch_timeout_s = server, batch_timeout_s
        self.phase = "starting"
        self.text = "the bus"
        """The event that the feeder waits for."""
        self.copies: Copies | None = None
        """Set when each node has checkpoints of its own, or there is a store."""
        self.parts: Parts | None = None
        """None until the state is restored: heartbeats begin before."""

    async def beat(self, heartbeat: HeartbeatPublisher) -> None:
        """Background loop: heartbeats on the bus and for waiting ranks. Raises NoProgress when a rank has waited too long for a batch."""
        while True:
            starved_s = self._server.starved_s(time.monotonic())
            await self._server.beat(self._waits_for())
            if starved_s > self._batch_timeout_s:
                raise NoProgress("feeder", starved_s, self._waits_for())
            heartbeat.update(**self._fields(starved_s))
            await asyncio.sleep(BEAT_S)

    @property
    def copies_waited_for(self) -> str:
        """The copies, or the upload, that a checkpoint waits for; empty = none waits."""
        return "" if self.copies is None else self.copies.waits_for

    def _waits_for(self) -> str:
        evaluation = self.parts.evaluations.waits_for if self.parts is not None and self.phase == "ending" else ""
        return "; ".join(text for text in (self.text, evaluation, self.copies_waited_for) if text)

    def _fields(self, starved_s: float) -> dict[str, object]:
        parts = self.parts
        if parts is None:
            return {"phase": self.phase, "waits_for": self._waits_for()}
        if self.phase not in ("ending", "draining"):
            self.phase = "waiting" if starved_s else ("working" if parts.replayed.is_set() else "replaying")
        accounting = parts.source.accounting()
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
        }
        load |= {"invalid": sum(accounting.invalid.values()), **parts.senders.load(accounting.invalid, accounting.invalid_of)}
        load["filtered"] = sum(count for reason, count in accounting.settled.items() if is_filtered(reason))
        troubles = (parts.prompts.trouble, *parts.evaluations.troubles)
        version = parts.source.head[0] if parts.source.head else -1
        return {
            "phase": self.phase,
            "waits_for": self._waits_for(),
            "trouble": "; ".join(text for text in (*troubles, parts.filtering.trouble, parts.age.trouble) if text),
            "version": version,
            "load": {key: float(value) for key, value in load.items()} | parts.filtering.load(),
        }
