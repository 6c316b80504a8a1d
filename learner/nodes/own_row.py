"""The row of an agent: claimed at its start, renewed every second by compare-and-set, so a node rank has one agent.

A claim waits until the row of an agent before it has been silent for long enough. ``reached`` has the results of calls
to the other nodes at their advertised addresses, before ranks connect there (``Probes``).
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tidemill.bus.client.rows import Rows
from tidemill.bus.errors import BusError, BusUnavailable, RowConflict, WireError
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.rows import NodeRow, Phase
from tidemill.bus.wire.subjects import NODE_KEY
from tidemill.learner.errors import NodeRefused, NodeReplaced
from tidemill.learner.nodes.rows import cut, node_of, row_value

log = logging.getLogger(__name__)

BEAT_S = 1.0
WRITE_S = 5.0  # seconds after which an unanswered write is made again
_LOOK_S = 0.5


def here() -> str:
    """Return the boot id and the process-id namespace of this process; empty where there is none (not Linux)."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class OwnRow:
    """The row of this agent."""

    def __init__(self, rows: Rows, row: NodeRow) -> None:
        self.row = row
        self._rows, self._key = rows, f"{NODE_KEY}.{row.node}"
        self._revision = 0
        self._wake, self._written = Waiter(), Waiter()
        self._changes = self._stored = 0

    def update(self, **changes: object) -> None:
        """Change fields of the row, which is written at once."""
        self.row = replace(self.row, **changes)  # type: ignore[arg-type]
        self._changes += 1
        self._wake.wake()

    async def stored(self, within_s: float) -> bool:
        """Return whether the bus has the row as it is now, or a newer one, within this time."""
        changes = self._changes
        deadline = time.monotonic() + within_s
        while self._stored < changes and (remaining_s := deadline - time.monotonic()) > 0:
            await self._written.wait(remaining_s)
        return self._stored >= changes

    async def claim(self, silence_s: float) -> None:
        """Write the first row. Raises NodeRefused when another agent has this node rank, BusUnavailable."""
        began = time.monotonic()
        last_revision: int | None = None
        while True:
            value, revision = await self._rows.read(self._key)
            rival = None if value is None else self._parsed(value)
            changed = last_revision is not None and revision != last_revision
            if rival is not None and changed and rival.phase is not Phase.FAILED:
                raise _taken(self.row, rival)
            over = time.monotonic() - began > silence_s
            if rival is None or over or rival.phase is Phase.FAILED or _is_gone(rival, self.row):
                try:
                    self._revision = await self._rows.update(self._key, row_value(self.row), revision)
                    return
                except RowConflict:  # another agent was faster: the next reading shows it
                    last_revision = -1 if last_revision is None else last_revision
                    continue
            if last_revision is None:
                log.warning(
                    "%s has a row from %s pid=%d: waiting up to %.0f s for its next heartbeat",
                    self._key,
                    rival.host,
                    rival.pid,
                    silence_s,
                )
            last_revision = revision
            # Two looks at the revision tell a live agent from the row of a dead one, whatever its clock.
            await asyncio.sleep(_LOOK_S)

    async def keep(self) -> None:
        """Write the row every second and after each change. Raises NodeReplaced when another agent has it."""
        while True:
            changes = self._changes
            self.row = replace(self.row, beats=self.row.beats + 1)
            try:
                async with asyncio.timeout(WRITE_S):
                    self._revision = await self._rows.update(self._key, row_value(self.row), self._revision)
                self._stored = changes
                self._written.wake()
            except RowConflict:
                await self._reconcile()
                continue
            except (BusError, TimeoutError) as error:
                log.warning("row unsent key=%s error=%s", self._key, str(error) or "no answer")
            await self._wake.wait(BEAT_S)

    async def remove(self) -> None:
        """Remove the row, unless another agent has it; give up after some seconds."""
        try:
            async with asyncio.timeout(WRITE_S):
                value, _ = await self._rows.read(self._key)
                row = None if value is None else self._parsed(value)
                if row is not None and row.agent == self.row.agent:
                    await self._rows.delete(self._key)
        except (BusError, TimeoutError) as error:
            log.warning("row not removed key=%s error=%s", self._key, str(error) or "no answer")

    async def _reconcile(self) -> None:
        """Adopt the revision of a write of ours that got no answer. Raises NodeReplaced for another agent's."""
        try:
            value, revision = await self._rows.read(self._key)
        except BusUnavailable:
            return
        row = None if value is None else self._parsed(value)
        if row is not None and row.agent != self.row.agent:
            raise NodeReplaced(self.row.node, f"{row.host} pid {row.pid}")
        self._revision = revision  # also where the row is unreadable, or missing

    def _parsed(self, value: dict[str, object]) -> NodeRow | None:
        try:
            return node_of(self._key, value)
        except WireError as error:
            log.warning("row %s cannot be read and is replaced: %s", self._key, error)
            return None


def _taken(mine: NodeRow, rival: NodeRow) -> NodeRefused:
    got = f"a second one: node rank {mine.node} has an agent on {rival.host}, pid {rival.pid}"
    return NodeRefused(
        f"--node-rank {mine.node}", "one agent", got, "give every node a rank of its own, or end the other agent"
    )


def _is_gone(rival: NodeRow, mine: NodeRow) -> bool:
    """Return whether the agent ran on this machine and has ended. One elsewhere can only be judged by its silence."""
    if not rival.place or rival.place != mine.place or rival.pid <= 0:
        return False
    try:
        os.kill(rival.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return rival.pid == mine.pid


CALL_S = 3.0  # deadline of a call: a lost first packet is sent again after one second
AGAIN_S = 2.0  # seconds between two calls to a node that was not reached
_GREETING = "tidemill node "
_MOST_LINE = 64
_MOST_REASON = 200
REACHED = ""  # result of a call that was answered by the right agent


@asynccontextmanager
async def answering(agent: str, bind: str) -> AsyncIterator[int]:
    """While entered, answer every connection with the nonce of this agent. Gives the port. Raises OSError."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError):
            writer.write(f"{_GREETING}{agent}\n".encode())
            async with asyncio.timeout(CALL_S):
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, bind.strip("[]"), 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def call(row: NodeRow) -> str:
    """Call a node at its advertised address. Returns ``REACHED``, or why it was not."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CALL_S):
            reader, writer = await asyncio.open_connection(row.address.strip("[]"), row.probe_port, limit=_MOST_LINE)
            line = await reader.readline()
    except TimeoutError:
        return f"no answer within {CALL_S:.0f} s"
    except (OSError, ValueError) as error:  # ValueError: a line that is too long
        number = getattr(error, "errno", None) or 0  # asyncio's own text has the address again
        return cut(os.strerror(number).lower() if number > 0 else str(error) or type(error).__name__)[:_MOST_REASON]
    finally:
        if writer is not None:
            writer.close()
    if line != f"{_GREETING}{row.agent}\n".encode():
        return "another process answers there"
    return REACHED


class Probes:
    """The calls of one agent, made while it has no ranks."""

    def __init__(
        self,
        mine: Callable[[], NodeRow],
        read_rows: Callable[[], Mapping[int, NodeRow]],
        on_results: Callable[..., None],
    ) -> None:
        """``read_rows`` returns the last rows of all nodes. ``on_results`` is called with the new ``reached``."""
        self._mine, self._read_rows, self._on_results = mine, read_rows, on_results
        self._wake = Waiter()

    def wake(self) -> None:
        """Look at the rows again."""
        self._wake.wake()

    async def run(self) -> None:
        """Background loop: call every offer of another node until it is reached."""
        while True:
            await self.look()
            await self._wake.wait(AGAIN_S)

    async def look(self) -> None:
        """Call all offers that are not reached yet, and report the results."""
        mine = self._mine()
        if mine.phase is not Phase.READY:
            return
        offers = [
            row
            for row in self._read_rows().values()
            if row.node != mine.node and row.phase is Phase.READY and row.probe_port
        ]
        called = [row for row in offers if mine.reached.get(row.nonce) != REACHED]
        results = dict(zip([row.nonce for row in called], await asyncio.gather(*map(call, called)), strict=True))
        if self._mine().nonce != mine.nonce:
            return  # the offer has ended meanwhile
        kept = {row.nonce: mine.reached[row.nonce] for row in offers if row.nonce in mine.reached}
        reached = kept | results
        for row in called:
            if (reason := results[row.nonce]) and mine.reached.get(row.nonce) != reason:
                log.warning("%s is not reached at %s:%d: %s", row.name, row.address, row.probe_port, reason)
        if reached != mine.reached:
            self._on_results(reached=reached)
