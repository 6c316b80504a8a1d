"""Calls of a node's agent to the other nodes at their advertised addresses, before ranks connect there.

Consumes rows; produces ``reached`` of the own row. A call has a deadline; a node that was not reached is called again.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.rows import NodeRow, Phase
from tidemill.learner.nodes.view import cut

log = logging.getLogger(__name__)

CALL_S = 3.0
"""Deadline of a call: a lost first packet is sent again after one second."""
AGAIN_S = 2.0
"""Seconds between two calls to a node that was not reached."""
_GREETING = "tidemill node "
_MOST_LINE = 64
_MOST_REASON = 200
REACHED = ""
"""Result of a call that was answered by the right agent."""


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
