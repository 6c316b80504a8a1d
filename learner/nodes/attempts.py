"""The leader's writes of the row ``attempt``, by compare-and-set: a new attempt, and states of the present one."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import replace
from typing import Protocol

from tidemill.bus.client.addresses import KeptPort, in_url
from tidemill.bus.errors import BusError
from tidemill.bus.streams.bus import Bus, raise_epoch
from tidemill.bus.wire.rows import Attempt, NodeRow, State
from tidemill.bus.wire.subjects import nonce
from tidemill.learner.errors import NodeRefused
from tidemill.learner.nodes.rendezvous import refuse_unlike
from tidemill.learner.nodes.view import ATTEMPT_KEY, READ_S, View, cut, row_value
from tidemill.learner.ranks.process import NodePart

log = logging.getLogger(__name__)


class Work(Protocol):
    """The ranks of one node."""

    def opened(self, bus: Bus) -> AbstractAsyncContextManager[None]:
        """Run the node's servers, from the claim of its row to the end of its agent. Raises OSError, BusUnavailable."""
        raise NotImplementedError

    def layout(self, offers: Sequence[NodeRow]) -> tuple[int, ...]:
        """Return the number of ranks of each node, for the leader. Raises NodeRefused for nodes that do not fit."""
        raise NotImplementedError

    async def check(self, proof: str) -> None:
        """Check this node before its ranks start. ``proof``: of the leader's directory. Raises NodeRefused."""
        raise NotImplementedError

    async def prove(self, proof: str) -> None:
        """Write the proof that ``check`` reads on the other nodes. Only the leader's. Raises OSError."""
        raise NotImplementedError

    async def run(self, part: NodePart, draining: asyncio.Event, on_step: Callable[[], None]) -> None:
        """Run the processes until they succeed, or have drained; a cancellation ends them. Raises ChildFailed."""
        raise NotImplementedError


_OVER = (State.ENDING, State.FAILED, State.DONE)


class Attempts:
    """The attempts of one agent, which is the leader."""

    def __init__(self, bus: Bus, view: View, work: Work, *, bind: str) -> None:
        self._bus, self._rows, self._view, self._work, self._bind = bus, bus.rows("run"), view, work, bind
        self._ports = ExitStack()
        self.raised = 0
        """Epoch that was raised last."""

    def close(self) -> None:
        """Give up the ports that are kept for the ranks."""
        self._ports.close()

    async def form(self, me: NodeRow, offers: Sequence[NodeRow], feeder_key: str) -> None:
        """Write the next attempt, or a failed one for nodes that do not fit. Raises RowConflict, BusError, OSError."""
        reading = self._view.reading
        assert reading is not None
        refused: NodeRefused | None = None
        ranks = tuple(1 for _ in offers)
        try:
            refuse_unlike(offers)
            ranks = self._work.layout(offers)
        except NodeRefused as error:
            refused = error
        # Before the attempt is written: ranks of an earlier epoch are fenced wherever they still run.
        epoch = self.raised = await raise_epoch(self._bus)
        self._ports.close()
        feeder, master = (self._ports.enter_context(KeptPort(self._bind)).number for _ in range(2))
        proof = nonce()
        await self._work.prove(proof)
        attempt = Attempt(
            epoch=epoch,
            nonces=tuple(row.nonce for row in offers),
            ranks=ranks,
            master=f"{me.address}:{master}",
            feeder=f"tcp://{in_url(me.address)}:{feeder}",
            feeder_key=feeder_key,
            proof=proof,
            state=State.FAILED if refused else State.FORMING,
            reason=cut(str(refused or "")),
            exit_code=refused.exit_code if refused else 0,
        )
        log.info("attempt epoch=%d nodes=%d ranks=%s state=%s", epoch, len(ranks), ranks, attempt.state)
        await self._write(attempt, reading.revision)

    async def record(self, me: NodeRow, state: State, reason: str, exit_code: int = 0) -> None:
        """Write the state of the present attempt, if it is this agent's. Raises RowConflict, BusError, TimeoutError."""
        reading = self._view.reading
        if reading is None or reading.attempt is None or not reading.attempt.has(me):
            return
        log.info("attempt epoch=%d state=%s reason=%s", reading.attempt.epoch, state, reason or "-")
        await self._write(
            replace(reading.attempt, state=state, reason=cut(reason), exit_code=exit_code), reading.revision
        )

    async def try_record(self, me: NodeRow, state: State, reason: str, exit_code: int = 0) -> None:
        """Record a state unless the attempt is over; other agents see it in this node's row as well."""
        reading = self._view.reading
        try:
            if reading is not None and reading.attempt is not None and reading.attempt.state not in _OVER:
                await self.record(me, state, reason, exit_code)
        except (BusError, TimeoutError) as error:
            log.warning("attempt not recorded as %s: %s", state, str(error) or "no answer")

    async def _write(self, attempt: Attempt, revision: int) -> None:
        async with asyncio.timeout(READ_S):
            written = await self._rows.update(ATTEMPT_KEY, row_value(attempt), revision)
        self._view.wrote(attempt, written)
