"""Progress of the audit at the end of a run: a line on the terminal every few seconds, and a live row for ``tidemill status``."""

import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bus.liveness.live import HeartbeatPublisher
from bus.streams.bus import Bus
from bus.wire.messages import LiveRow

ROLE = "up"
SAY_EVERY_S, SHOW_EVERY_S = 5.0, 1.0


@asynccontextmanager
async def shown(
    bus: Bus, say: Callable[[str], None], *, say_every_s: float = SAY_EVERY_S, show_every_s: float = SHOW_EVERY_S
) -> AsyncIterator[Callable[[int, int], None]]:
    """Yield the function to which the audit reports its progress: messages read, and their total number."""
    row = LiveRow(role=ROLE, id=ROLE, host=socket.gethostname(), pid=os.getpid(), phase="auditing", waits_for="the log of plans")
    said_s = shown_s = time.monotonic()

    def note(done: int, total: int) -> None:
        nonlocal said_s, shown_s
        now, text = time.monotonic(), f"{done:,} of {total:,} messages of SAMPLES read"
        if now - shown_s >= show_every_s:
            shown_s = now
            heartbeat.update(waits_for=text)
        if now - said_s >= say_every_s:
            said_s = now
            say(f"auditing: {text}")

    async with HeartbeatPublisher(bus, row) as heartbeat:
        yield note
