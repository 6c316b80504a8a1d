"""Waits of tests for what sends no event: files, counters, other processes."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 300.0
"""Seconds that no wait of a test takes on any machine, if it ends as it should."""


async def until(
    holds: Callable[[], object],
    *,
    alive: Callable[[], object] = lambda: True,
    every_s: float = 0.02,
    timeout_s: float = LIMIT_S,
) -> Any:
    """Return the first true result of ``holds``, or of the coroutine that it gives. ``alive``: false = it never is."""
    async with asyncio.timeout(timeout_s):
        while not (result := await _result(holds)):
            assert alive(), "what is waited for has ended"
            await asyncio.sleep(every_s)
        return result


async def until_gone(found: Callable[[], object]) -> None:
    """Return when the result of ``found``, or of the coroutine that it gives, is empty."""

    async def gone() -> bool:
        return not await _result(found)

    await until(gone)


async def turn(times: int = 1) -> None:
    """Let every task that can run take a step, or several: an order of events, and no time."""
    for _ in range(times):
        await asyncio.sleep(0)


async def _result(holds: Callable[[], object]) -> object:
    result = holds()
    return await result if inspect.isawaitable(result) else result


def poll(holds: Callable[[], object], *, every_s: float = 0.01, timeout_s: float = LIMIT_S) -> None:
    """Return when the condition holds, as ``until`` does, in a thread of its own or a process without a loop."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not so within {timeout_s:g} s"
        time.sleep(every_s)
