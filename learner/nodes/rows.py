"""Rows of all nodes (``node.<R>``) and of the attempt, as an agent reads them, and the leader's writes of the attempt.

A row of another shape is refused by ``bus/wire/row_reader.py``, one with values that contradict each other here.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from tidemill.bus.client.addresses import KeptPort, in_url
from tidemill.bus.client.rows import Value
from tidemill.bus.errors import BusError, WireError
from tidemill.bus.streams.bus import Bus, raise_epoch
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import MAX_TEXT, Attempt, NodeRow, State, row_of
from tidemill.bus.wire.subjects import NODE_KEY, nonce
from tidemill.learner.errors import NodeRefused
from tidemill.learner.nodes.rendezvous import Seen, refuse_unlike
from tidemill.learner.ranks.process import NodePart

log = logging.getLogger(__name__)

ATTEMPT_KEY = "attempt"


def cut(text: str) -> str:
    """Return a text as a row can carry it: bounded, printable."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text[:MAX_TEXT])


def node_of(key: str, value: JsonObject) -> NodeRow:
    """Return the row of a node. Raises WireError naming the field that does not fit."""
    row = row_of(NodeRow, value)
    if key != f"{NODE_KEY}.{row.node}":
        raise WireError("node", f"that of the key {key}", row.node)
    if row.node >= row.nodes:
        raise WireError("node, nodes", "node < nodes", (row.node, row.nodes))
    return row


def attempt_of(value: JsonObject) -> Attempt:
    """Return the attempt. Raises WireError naming the field that does not fit."""
    attempt = row_of(Attempt, value)
    if len(set(attempt.nonces)) < len(attempt.nonces):
        raise WireError("nonces", "each once", attempt.nonces[:4])
    if len(attempt.ranks) != len(attempt.nonces):
        raise WireError("ranks", "a number of ranks for each nonce", attempt.ranks[:4])
    if not 0 < int(attempt.master.rpartition(":")[2]) < 65_536:
        raise WireError("master", "host:port", attempt.master[:60])
    return attempt


def row_value(row: NodeRow | Attempt) -> JsonObject:
    value: JsonObject = json.loads(msgspec.json.encode(row))
    return value


GRACE_S = 5.0  # seconds after an outage of the bus before ages count again: all agents have to connect and write first


class Silences:
    """Seconds since each row changed. A row that is seen for the first time counts as just changed."""

    def __init__(self) -> None:
        self._stamps: dict[int, Hashable] = {}
        self._silent: dict[int, float] = {}
        self._read_s: float | None = None  # time of the last reading; None while the bus is away or full
        self._count_from_s = float("-inf")

    def lost(self, now: float) -> None:
        """Note that the bus cannot be read, or stores nothing."""
        self._read_s, self._count_from_s = None, float("inf")

    def read(self, stamps: Mapping[int, Hashable], now: float) -> dict[int, float]:
        """Note a reading of all rows; ``stamps`` change with their writes. Returns the seconds without a change."""
        if self._count_from_s == float("inf"):
            self._count_from_s = now + GRACE_S
        passed = 0.0 if self._read_s is None else max(0.0, now - max(self._read_s, self._count_from_s))
        self._read_s = now
        silent = {}
        for node, stamp in stamps.items():
            is_unchanged = node in self._stamps and self._stamps[node] == stamp
            silent[node] = self._silent[node] + passed if is_unchanged else 0.0
        self._stamps, self._silent = dict(stamps), silent
        return dict(silent)


LOOK_S = 1.0
READ_S = 5.0  # seconds after which a reading without an answer counts as an outage of the bus


@dataclass(frozen=True, slots=True)
class Reading:
    """Rows of the nodes with the seconds of their silence, the attempt, and the revision of its row."""

    seen: Mapping[int, Seen]
    attempt: Attempt | None
    revision: int


class View:
    """The newest reading; ``run`` keeps it."""

    def __init__(self, bus: Bus, on_read: Callable[[], None]) -> None:
        """``on_read`` is called after each reading, and each failed one."""
        self._bus, self._rows, self._on_read = bus, bus.rows("run"), on_read
        self._silences = Silences()
        self._writes = 0
        self.reading: Reading | None = None
        """None while the bus is away."""
        self.read_s = time.monotonic()
        """Time of the newest reading."""

    def wrote(self, attempt: Attempt, revision: int) -> None:
        """Note an own write of the attempt."""
        self._writes += 1
        if self.reading is not None:
            self.reading = Reading(self.reading.seen, attempt, revision)
        self._on_read()

    async def run(self) -> None:
        """Background loop: read at every change and every second."""
        changed = Waiter()
        while True:
            try:
                async with (
                    self._rows.on_change(f"{NODE_KEY}.*", changed.wake),
                    self._rows.on_change(ATTEMPT_KEY, changed.wake),
                ):
                    while True:
                        await self._read()
                        self._on_read()
                        await changed.wait(LOOK_S)
            except BusError as error:
                log.warning("rows not watched: %s", error)
                await asyncio.sleep(LOOK_S)

    async def _read(self) -> None:
        # The nodes come first: an agent that leaves has recorded the end of the attempt before.
        writes = self._writes
        try:
            async with asyncio.timeout(READ_S):
                node_values = await self._rows.all(NODE_KEY)
                value, revision = await self._rows.read(ATTEMPT_KEY)
        except (BusError, TimeoutError):
            self._silences.lost(time.monotonic())
            self.reading = None
            return
        rows = {
            row.node: (row, stamp)
            for key, (row_map, stamp) in node_values.items()
            if (row := self._node(key, row_map, stamp)) is not None
        }
        now = time.monotonic()
        stamps = {node: stamp for node, (_, stamp) in rows.items()}
        silent = self._silences.read(stamps, now)
        if (
            max(silent.values(), default=0.0) > GRACE_S and await self._bus.full()
        ):  # no row can be written, so none is silent
            self._silences.lost(now)
            silent = self._silences.read(stamps, now)
        seen = {node: Seen(row, silent[node]) for node, (row, _) in rows.items()}
        if writes == self._writes:  # else it may be older than an own write that ended meanwhile
            self.reading, self.read_s = Reading(seen, self._attempt(value, revision), revision), now

    def _node(self, key: str, value: Value, revision: int) -> NodeRow | None:
        return self._bus.refusals.read("run", f"{key} (revision {revision})", lambda: node_of(key, value))

    def _attempt(self, value: Value | None, revision: int) -> Attempt | None:
        if value is None:
            return None
        return self._bus.refusals.read("run", f"{ATTEMPT_KEY} (revision {revision})", lambda: attempt_of(value))


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
