"""Rows of all nodes, ``node.<R>``, and the row ``attempt``, as an agent reads them at every change and every second.

They are input like any other: a row of another shape is refused (``bus/wire/row_reader.py``), and here one with values
that contradict each other.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import msgspec

from tidemill.bus.client.rows import Value
from tidemill.bus.errors import BusError, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import MAX_TEXT, Attempt, NodeRow, row_of
from tidemill.learner.nodes.rendezvous import Seen

log = logging.getLogger(__name__)

NODE_KEY = "node"
"""Rows ``node.<R>``."""
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
    """Return a row as JSON has it."""
    value: JsonObject = json.loads(msgspec.json.encode(row))
    return value


GRACE_S = 5.0
"""Seconds after an outage of the bus before ages count again: all agents have to connect and write first."""


class Silences:
    """Seconds since each row changed. A row that is seen for the first time counts as just changed."""

    def __init__(self) -> None:
        self._stamps: dict[int, Hashable] = {}
        self._silent: dict[int, float] = {}
        self._read_s: float | None = None
        """Time of the last reading; None while the bus is away or full."""
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
READ_S = 5.0
"""Seconds after which a reading without an answer counts as an outage of the bus."""


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
        """Read once. The nodes come first: an agent that leaves has recorded the end of the attempt before."""
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
