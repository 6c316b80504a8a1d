"""Waits of tests for what sends no event: files, counters, other processes."""

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], object], *, every_s: float = 0.02) -> None:
    """Return when the condition holds. (Bounded by the test's own limit.)"""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(every_s)
