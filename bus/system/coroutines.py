"""Concurrent coroutines: run until the first of them ends, and find the first error in a group."""

import asyncio
from collections.abc import Awaitable


async def first_of(*works: Awaitable[object]) -> tuple[asyncio.Future[object], ...]:
    """Run several until the first ends; the others are cancelled. Raises its error, if it has one.

    Returns the future of each; those that did not end first are cancelled. A task that must continue is given as ``asyncio.shield(task)``.
    """
    futures = tuple(asyncio.ensure_future(work) for work in works)
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
    return futures


def first_error(error: BaseException) -> BaseException:
    """Return the first error inside of an exception group, however deep; any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
