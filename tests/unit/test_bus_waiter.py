"""A waiter: a wake-up ends all present waits, or the next one, and none is lost to a cancelled wait."""

import asyncio
import time

from tests.waits import LIMIT_S, turn
from tidemill.bus.system.coroutines import Waiter

LONG_S = 60.0


async def waiting(waiter: Waiter, number: int) -> list["asyncio.Task[None]"]:
    tasks = [asyncio.create_task(waiter.wait(LONG_S)) for _ in range(number)]
    await turn()
    return tasks


def test_a_wake_up_ends_all_present_waits() -> None:
    async def main() -> None:
        waiter = Waiter()
        tasks = await waiting(waiter, 3)
        waiter.wake()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*tasks)
        assert not any(task.done() for task in await ended(waiter, 1)), (
            "a wake-up that was received must not end a later wait"
        )

    asyncio.run(main())


async def ended(waiter: Waiter, number: int) -> list["asyncio.Task[None]"]:
    """Start new waits and return them after the loop has run once; they are cancelled after the caller has looked."""
    tasks = await waiting(waiter, number)
    await turn()
    asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in tasks])
    return tasks


def test_a_wake_up_without_a_wait_ends_the_next_one() -> None:
    async def main() -> None:
        waiter = Waiter()
        waiter.wake()
        waiter.wake()
        async with asyncio.timeout(LIMIT_S):
            await waiter.wait()
        assert not any(task.done() for task in await ended(waiter, 1)), "two wake-ups in a row are one"

    asyncio.run(main())


def test_a_wake_up_that_meets_a_cancelled_wait_ends_the_next_one() -> None:
    async def main() -> None:
        waiter = Waiter()
        (task,) = await waiting(waiter, 1)
        waiter.wake()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        async with asyncio.timeout(LIMIT_S):
            await waiter.wait()

    asyncio.run(main())


def test_a_wait_ends_after_its_time() -> None:
    async def main() -> None:
        waiter, since = Waiter(), time.monotonic()
        await waiter.wait(0.01)
        assert 0.005 < time.monotonic() - since < LONG_S
        assert not any(task.done() for task in await ended(waiter, 1))

    asyncio.run(main())


def test_a_cancelled_wait_leaves_the_others() -> None:
    async def main() -> None:
        waiter = Waiter()
        first, second = await waiting(waiter, 2)
        first.cancel()
        await asyncio.wait({first})
        assert not second.done()
        waiter.wake()
        async with asyncio.timeout(LIMIT_S):
            await second

    asyncio.run(main())
