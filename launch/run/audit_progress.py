"""Progress of the audit at the end of a run: a line on the terminal every few seconds, and a live row for ``tidemill status``."""

import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tidemill.bus.liveness.heartbeats import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import LiveRow

ROLE = "up"
REPORT_EVERY_S, SHOW_EVERY_S = 5.0, 1.0
"""Shortest intervals in seconds of lines on the terminal, and of updates of the live row."""


@asynccontextmanager
async def shown(
    bus: Bus, report: Callable[[str], None], *, report_every_s: float = REPORT_EVERY_S, show_every_s: float = SHOW_EVERY_S
) -> AsyncIterator[Callable[[int, int], None]]:
    """Yield the function to which the audit reports its progress: messages read, and their total number."""
    row = LiveRow(role=ROLE, id=ROLE, host=socket.gethostname(), pid=os.getpid(), phase="auditing", waits_for="the log of plans")
    reported_s = shown_s = time.monotonic()

    def progress(done: int, total: int) -> None:
        """Report ``done`` of ``total`` messages, to the live row and on the terminal, each no more often than its interval."""
        nonlocal reported_s, shown_s
        now, text = time.monotonic(), f"{done:,} of {total:,} messages of SAMPLES read"
        if now - shown_s >= show_every_s:
            shown_s = now
            heartbeat.update(waits_for=text)
        if now - reported_s >= report_every_s:
            reported_s = now
            report(f"auditing: {text}")

    async with HeartbeatPublisher(bus, row) as heartbeat:
        yield progress
