"""The agent of a node: parent of its ranks, and on the leader's node of the feeder.

    view      rows of all nodes, row ``attempt`` ──► decide (rendezvous.py) ──► start, drain, end ranks, the attempt
    row       own row, every second
    probes    calls to the other nodes, while there are no ranks
    ranks     run_part (ranks/process.py), while an attempt runs

Waits for the other nodes (at most ``nodes_wait_s``, its row names them) and for its children. Unblocked by a change of
a row, the end of a child, or ``draining``.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from tidemill.bus import exit_codes
from tidemill.bus.client.addresses import in_url
from tidemill.bus.errors import BusError, RowConflict, UnreadableRow
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter, ended
from tidemill.bus.wire.rows import Attempt, NodeRow, Phase, State
from tidemill.bus.wire.subjects import nonce
from tidemill.learner.errors import LearnerEnded, NodeRefused
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.nodes.own_row import OwnRow, Probes, answering
from tidemill.learner.nodes.rendezvous import (
    LEADER,
    Action,
    Drain,
    End,
    Form,
    Leave,
    Record,
    Renew,
    Start,
    Wait,
    decide,
)
from tidemill.learner.nodes.rows import LOOK_S, Attempts, View, Work, cut
from tidemill.learner.ranks.process import ChildFailed, NodePart

log = logging.getLogger(__name__)

RENEWED_S = 10.0  # seconds in which the last state of the row should be stored before the agent ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Deadlines of a node agent, in seconds."""

    wait_s: float = 600.0
    """Time for all nodes to be there."""
    silence_s: float = 30.0
    """Time without a heartbeat after which a node counts as dead."""
    fence_s: float = 60.0
    """Time without an answer of the bus, and without a step, after which the ranks end."""
    leave_s: float = 120.0
    """Time for the ranks to end by themselves after the last step."""
    bad_ends: int = 6
    window_s: float = 300.0
    """An agent gives up after ``bad_ends`` failed attempts within this time."""


class Agent:
    """One node's agent, from its claim of the node rank to its end."""

    def __init__(
        self, bus: Bus, row: NodeRow, work: Work, *, bind: str, limits: Limits, on_change: Callable[[NodeRow], None]
    ) -> None:
        """``bind``: address to listen on. ``on_change`` is called when phase, wait or reason of the row has changed."""
        self._bus, self._work, self._bind, self.limits, self._on_change = bus, work, bind, limits, on_change
        self._keys = FeedKeys.new()
        self._own_row = OwnRow(bus.rows("run"), replace(row, nonce=nonce(), agent=nonce(), key=self._keys.ranks_public))
        self._wake = Waiter()
        self._view = View(bus, self._on_read)
        self._attempts = Attempts(bus, self._view, work, bind=bind)
        self._probes = Probes(lambda: self.row, self._read_rows, self._own_row.update)
        self._ranks: asyncio.Task[None] | None = None
        self._drain = asyncio.Event()
        self._stopped = False
        self._missing_since: float | None = None
        self._bad_ends: deque[float] = deque(maxlen=limits.bad_ends)
        self.last_step_s = time.monotonic()  # time of the last step of this node's ranks, or of their start

    @property
    def row(self) -> NodeRow:
        """The row of this agent, as it is now."""
        return self._own_row.row

    async def run(self, draining: asyncio.Event) -> None:
        """Run until the last step or a drain. Raises NodeRefused, NodeReplaced, LearnerEnded, BusUnavailable."""
        async with AsyncExitStack() as stack:
            self._own_row.update(probe_port=await stack.enter_async_context(answering(self.row.agent, self._bind)))
            await self._own_row.claim(self.limits.silence_s)
            works = {
                "row": self._own_row.keep(),
                "view": self._view.run(),
                "probes": self._probes.run(),
                "stop": self._stop_on(draining),
            }
            loops = [asyncio.create_task(work, name=name) for name, work in works.items()]
            for loop in loops:
                loop.add_done_callback(lambda _: self._wake.wake())
            stack.push_async_callback(ended, *loops)
            await stack.enter_async_context(self._work.opened(self._bus))
            stack.push_async_callback(self._end_ranks)
            try:
                await self._act_until_left(loops)
            except LearnerEnded as error:  # the row stays: it has the reason
                self._own_row.update(phase=Phase.FAILED, reason=cut(error.reason), exit_code=error.exit_code)
                await self._own_row.stored(RENEWED_S)
                raise
        await self._own_row.remove()

    def _on_read(self) -> None:
        self._wake.wake()
        self._probes.wake()

    def _read_rows(self) -> dict[int, NodeRow]:
        reading = self._view.reading
        return {} if reading is None else {node: seen.row for node, seen in reading.seen.items()}

    async def _act_until_left(self, loops: list[asyncio.Task[None]]) -> None:
        """Act on each change of rows and children until an action ends the agent."""
        shown: tuple[str, str, str] | None = None
        while True:
            for loop in loops[:-1]:  # all but ``stop``, which ends with a drain
                if loop.done():
                    loop.result()  # NodeReplaced; the loops have no other end
            await self._reap()
            if self._stopped and self._ranks is None and self.row.phase is Phase.READY:
                return
            if self._stopped and self.row.phase is Phase.RUNNING:
                self._own_row.update(phase=Phase.DRAINING)  # the leader drains the ranks of all nodes
            action = self._decide()
            if isinstance(action, Leave):
                await self._leave(action)
                return
            await self._act(action)
            now = (self.row.phase, self.row.waits_for, self.row.reason)
            if now != shown:
                self._on_change(self.row)
            shown = now
            await self._wake.wait(LOOK_S)

    def _decide(self) -> Action:
        now = time.monotonic()
        if self._view.reading is None:
            away = now - max(self._view.read_s, self.last_step_s)
            if self._ranks is not None and away > self.limits.fence_s:
                return End(f"the bus has not answered, and no step was made, for {away:.0f} s")
            return Wait("the bus")
        return decide(self.row, self._view.reading.seen, self._view.reading.attempt, silence_s=self.limits.silence_s)

    async def _act(self, action: Action) -> None:
        """Carry out an action. A write to the bus that fails is decided upon again."""
        self._note_wait(action)
        try:
            match action:
                case Form():
                    await self._form(action)
                case Record():
                    await self._attempts.record(self.row, action.state, action.reason, action.exit_code)
                case Start():
                    await self._start(action.attempt)
                case Drain():
                    self._drain.set()
                case End():
                    await self._ended_badly(action.reason)
                case Renew():
                    self._renew(action.reason)
                case _:
                    return
        except RowConflict:
            log.info("another agent has written the attempt; it is read again")
        except UnreadableRow as error:
            await self._give_up(str(error), error.exit_code)
        except (BusError, TimeoutError) as error:
            log.warning("the bus did not answer action=%s error=%s", type(action).__name__, str(error) or "no answer")

    def _note_wait(self, action: Action) -> None:
        """Report a wait in the row, and give up when nodes have been missing for too long. Raises LearnerEnded."""
        text = action.waits_for if isinstance(action, Wait) else ""
        if text.partition(" (silent")[0] != self.row.waits_for.partition(" (silent")[0]:
            log.info("node=%d %s", self.row.node, f"waiting for {text}" if text else type(action).__name__.lower())
            self._own_row.update(waits_for=cut(text))
        now = time.monotonic()
        missing = isinstance(action, Wait) and action.missing
        self._missing_since = (self._missing_since or now) if missing else None
        if self._missing_since is not None and now - self._missing_since > self.limits.wait_s:
            raise LearnerEnded(
                f"not all {self.row.nodes} nodes are there after {self.limits.wait_s:.0f} s; missing: {text}"
            )

    async def _form(self, action: Form) -> None:
        self._keys = replace(
            self._keys, others_public=tuple(row.key for row in action.offers if row.node != self.row.node)
        )
        await self._attempts.form(self.row, action.offers, self._keys.feeder_public)

    # ---- ranks

    async def _start(self, attempt: Attempt) -> None:
        me = self.row
        if me.node == LEADER and attempt.epoch != self._attempts.raised:  # a write that was taken for lost
            await self._attempts.record(me, State.ENDING, "a later epoch was raised")
            return
        host, _, port = attempt.master.rpartition(":")
        part = NodePart(
            first_rank=attempt.first_rank(me.node),
            num_ranks=attempt.ranks[me.node],
            world=sum(attempt.ranks),
            master=(host, int(port)),
            feeder_url=attempt.feeder,
            listen=f"tcp://{in_url(self._bind)}:{attempt.feeder.rpartition(':')[2]}" if me.node == LEADER else "",
            keys=replace(self._keys, feeder_public=attempt.feeder_key),
            epoch=attempt.epoch,
        )
        try:
            await self._work.check(attempt.proof)
        except NodeRefused as error:
            await self._give_up(str(error), error.exit_code)
        self._drain.clear()
        self._stepped()
        self._own_row.update(phase=Phase.RUNNING, epoch=attempt.epoch, reason="")
        self._ranks = asyncio.create_task(self._work.run(part, self._drain, self._stepped), name="ranks")
        self._ranks.add_done_callback(lambda _: self._wake.wake())

    def _stepped(self) -> None:
        self.last_step_s = time.monotonic()

    async def _reap(self) -> None:
        """Note the end of the ranks. Raises LearnerEnded for one that no restart cures."""
        if self._ranks is None or not self._ranks.done():
            return
        ranks, self._ranks = self._ranks, None
        try:
            ranks.result()
        except ChildFailed as error:
            log.error("%s", error)
            reason = f"{error.name} {exit_codes.how(error.code)}" + (f": {error.reason}" if error.reason else "")
            if error.exit_code in exit_codes.FINAL:
                await self._give_up(str(error), error.exit_code)
            await self._ended_badly(reason)
        else:
            self._own_row.update(phase=Phase.FINISHED)

    async def _ended_badly(self, reason: str) -> None:
        """End the ranks of a failed attempt, and offer again. Raises LearnerEnded after too many failures."""
        await self._end_ranks()
        now = time.monotonic()
        self._bad_ends.append(now)
        if len(self._bad_ends) == self.limits.bad_ends and now - self._bad_ends[0] < self.limits.window_s:
            await self._give_up(
                f"{len(self._bad_ends)} failed attempts within {self.limits.window_s:.0f} s; the last one: {reason}"
            )
        if self.row.node == LEADER:
            await self._attempts.try_record(self.row, State.ENDING, reason)
        self._renew(reason)

    async def _give_up(self, reason: str, exit_code: int = exit_codes.CRASHED) -> None:
        """Record that no attempt follows, as far as the bus can be reached, and raise LearnerEnded."""
        await self._end_ranks()
        if self.row.node == LEADER:
            await self._attempts.try_record(self.row, State.FAILED, reason, exit_code)
        raise LearnerEnded(reason, exit_code)

    def _renew(self, reason: str) -> None:
        # No rank of this node is alive here.
        assert self._ranks is None
        self._attempts.close()
        if reason:
            log.warning("node=%d offers itself again: %s", self.row.node, reason)
        self._keys = FeedKeys.new()
        self._own_row.update(
            nonce=nonce(), key=self._keys.ranks_public, phase=Phase.READY, reason=cut(reason), reached={}
        )
        self._wake.wake()

    async def _leave(self, action: Leave) -> None:
        """End the agent. Raises LearnerEnded unless the last step is done."""
        if action.exit_code:
            await self._end_ranks()
            raise LearnerEnded(action.reason, action.exit_code)
        if self._ranks is not None:
            await asyncio.wait({self._ranks}, timeout=self.limits.leave_s)
            await self._end_ranks()

    async def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.cancel()
            await asyncio.gather(ranks, return_exceptions=True)
        self._attempts.close()

    async def _stop_on(self, draining: asyncio.Event) -> None:
        await draining.wait()
        self._stopped = True
        self._wake.wake()
