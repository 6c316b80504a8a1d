"""Over any outage of the bus: for what must happen, however long the server is away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bus.connection import Bus
from bus.errors import BusUnavailable

log = logging.getLogger(__name__)

RETRY_S = 1.0
OUTAGE_S = 3600.0
"""An outage longer than this is an error."""

T = TypeVar("T")


async def patiently(bus: Bus, call: Callable[[], Awaitable[T]]) -> T:
    """What ``call`` (which may be repeated) gives. Raises BusUnavailable after an hour without the bus, or when it is closed."""
    while True:
        try:
            return await call()
        except BusUnavailable as error:
            log.warning("bus: still trying error=%s", error)
            await bus.wait_connected(OUTAGE_S)
            await asyncio.sleep(RETRY_S)
