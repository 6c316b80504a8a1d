"""Waiting that ends as it should: over any outage of the bus, and at a cancellation."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from bus.errors import BusUnavailable

if TYPE_CHECKING:
    from bus.connection import Bus

log = logging.getLogger(__name__)

RETRY_S = 1.0
CANCEL_AGAIN_S = 0.2
OUTAGE_S = 3600.0
"""An outage longer than this is an error."""

T = TypeVar("T")


async def patiently(bus: "Bus", call: Callable[[], Awaitable[T]]) -> T:
    """What ``call`` (which may be repeated) gives. Raises BusUnavailable after an hour without the bus, or when it is closed."""
    while True:
        try:
            return await call()
        except BusUnavailable as error:
            log.warning("bus: still trying error=%s", error)
            await bus.wait_connected(OUTAGE_S)
            await asyncio.sleep(RETRY_S)


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
    """``work``, ended for certain when this is cancelled.

    ``asyncio.wait_for`` of Python 3.11, which client libraries use, forgets a cancellation that comes together with its result
    (CPython issue 86296); a loop that goes on for ever then does so. Told again until it ends.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task,))
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=CANCEL_AGAIN_S)
    return task.result()
