"""Several streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from tidemill.bus.system.coroutines import ended

T = TypeVar("T")


async def as_they_arrive(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield what the sources yield, until all have ended. A source goes on once the caller requests the next item."""
    if len(sources) == 1:  # without a task for each item
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield item
        return
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                source = waiting.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                yield item
                waiting[asyncio.ensure_future(anext(source))] = source
    finally:
        for future in waiting:
            await ended(future)
        for source in sources:
            await source.aclose()


async def in_order(sources: Sequence[AsyncGenerator[T]], key: Callable[[T], Any]) -> AsyncGenerator[T]:
    """Yield what the sources, each in the order of ``key``, yield in that order, until all have ended."""
    async with AsyncExitStack() as stack:
        for source in sources:
            await stack.enter_async_context(aclosing(source))
        heads = {source: await anext(source, None) for source in sources}
        while ready := [(key(head), number, source) for number, (source, head) in enumerate(heads.items()) if head]:
            _, _, source = min(ready)
            item = heads[source]
            assert item is not None
            yield item
            heads[source] = await anext(source, None)
