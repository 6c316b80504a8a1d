"""Retries while the bus is away, all by one rule; and a cancellation that is not lost."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from tidemill.bus.client.connection import Connection
from tidemill.bus.errors import BusFull, BusUnavailable

RETRY_S = 0.1
"""Seconds between two tries of one request."""
CANCEL_AGAIN_S = 0.2
"""Interval of the cancellations of work that has forgotten one."""

AFTER_FULL_S = 15.0
"""Seconds left for a request from the last time that the bus was full: its server is started again when it has room."""

T = TypeVar("T")


async def retry(
    connection: Connection,
    ask: Callable[[], Awaitable[T]],
    *,
    pause_s: float = 0.0,
    deadline: float = math.inf,
    outage_s: float | None = None,
    report: Callable[[BusUnavailable], None] | None = None,
) -> T:
    """Return the result of ``ask``, which is called again for as long as it raises BusUnavailable and ``before_retry`` does not.

    A full bus is waited for without end. ``report`` is called with each error that another try follows.

    With ``outage_s`` that try waits for the connection, at most so long.
    """
    while True:
        try:
            return await ask()
        except BusUnavailable as error:
            if isinstance(error, BusFull):
                deadline = max(deadline, time.monotonic() + AFTER_FULL_S)
            await before_retry(connection, error, pause_s=pause_s, deadline=deadline)
            if report is not None:
                report(error)
        if outage_s is not None:
            await connection.wait_up(outage_s)


async def before_retry(connection: Connection, error: BusUnavailable, *, pause_s: float = RETRY_S, deadline: float = math.inf) -> None:
    """Wait between a failed try and the next one. Raises ``error`` when the connection was closed, or the next would be past ``deadline``.

    ``deadline`` is a time of the monotonic clock.
    """
    if connection.closed or time.monotonic() + pause_s >= deadline:
        raise error
    await asyncio.sleep(pause_s)


async def cancellable(work: Coroutine[object, None, T]) -> T:
    """Return the result of ``work``, which ends for certain when this is cancelled.

    ``asyncio.wait_for`` of Python 3.11, which client libraries use, forgets a cancellation that comes together with its result
    (CPython issue 86296); an endless loop would then go on. So ``work`` is cancelled again until it ends.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task,))
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=CANCEL_AGAIN_S)
    return task.result()
