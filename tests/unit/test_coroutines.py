"""Several coroutines at once: the first end ends all, unless one is shielded; the error inside groups."""

import asyncio
from contextlib import suppress

import pytest

from tests.waits import LIMIT_S, turn, until
from tidemill.bus.system.coroutines import all_of, beside, ended, first_error, first_of, heard, to_the_end


async def test_the_first_end_cancels_the_others_and_is_reported() -> None:
    cancelled: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("endless")
            raise

    async def quick() -> int:
        return 3

    first, second = await first_of(endless(), quick())
    assert cancelled == ["endless"]
    assert first.cancelled() and second.result() == 3


async def test_an_error_is_raised_and_nothing_is_left_running() -> None:
    before = asyncio.all_tasks()

    async def broken() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await first_of(asyncio.Event().wait(), broken())
    assert asyncio.all_tasks() == before


async def test_a_shielded_task_goes_on() -> None:
    event = asyncio.Event()
    task = asyncio.create_task(event.wait())
    await first_of(asyncio.shield(task), turn())
    assert not task.done()
    event.set()
    assert await task


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("cancellations", [0, 1, 3])
async def test_work_runs_to_its_end_and_a_cancellation_is_raised_then(cancellations: int, fails: bool) -> None:
    go_on, ended = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        await go_on.wait()
        ended.set()
        if fails:
            raise KeyError("x")
        return 3

    running = asyncio.create_task(to_the_end(work()))
    for _ in range(cancellations):
        await turn()
        running.cancel()
        await turn()
        assert not running.done()
    go_on.set()
    await asyncio.wait({running})
    assert ended.is_set()
    assert running.cancelled() == (cancellations > 0)
    if not cancellations:
        assert isinstance(running.exception(), KeyError) if fails else running.result() == 3


async def swallows(event: asyncio.Event) -> int:
    with suppress(asyncio.CancelledError):
        await event.wait()
    return 3


async def test_a_cancellation_that_a_call_swallows_is_raised() -> None:
    task = asyncio.create_task(heard(swallows(asyncio.Event())))
    await turn()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await heard(swallows(asyncio.Event()))


async def test_a_cancellation_that_comes_together_with_the_error_of_a_call_is_raised() -> None:
    """The client library's request waits with ``wait_for``, and raises for an answer of the server without a body."""
    answer = asyncio.get_running_loop().create_future()

    async def request() -> None:
        await asyncio.wait_for(answer, LIMIT_S)
        raise KeyError("no responders")

    task = asyncio.create_task(heard(request()))
    await turn()
    answer.add_done_callback(lambda _: task.cancel())  # after the callback of ``wait_for``
    answer.set_result(None)
    await asyncio.wait({task})
    assert task.cancelled()
    with pytest.raises(KeyError):
        await heard(request())


class Stubborn:
    """Work that swallows its first ``swallows`` cancellations."""

    def __init__(self, swallows: int) -> None:
        self.begun, self.swallows, self.cancellations = asyncio.Event(), swallows, 0

    async def run(self) -> None:
        self.begun.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancellations += 1
                if self.cancellations > self.swallows:
                    raise


async def test_a_task_that_swallows_cancellations_is_cancelled_until_it_ends_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    stubborn = Stubborn(swallows=3)
    task = asyncio.create_task(stubborn.run(), name="room of the bus")
    await stubborn.begun.wait()
    await ended(task, again_s=0.001)
    assert task.cancelled() and stubborn.cancellations == 4
    (record,) = caplog.records
    assert "room of the bus" in record.message


async def test_nothing_that_runs_others_waits_for_ever_for_one_that_swallows_a_cancellation() -> None:
    """Each of them cancels again after the time for a cleanup. The waits of all three pass at the same time."""

    async def leaves(stubborn: Stubborn) -> None:
        async with beside(stubborn.run()):
            await stubborn.begun.wait()

    async def fails(stubborn: Stubborn) -> None:
        await stubborn.begun.wait()
        raise KeyError("x")

    works = [Stubborn(swallows=1) for _ in range(3)]
    results = await asyncio.gather(
        leaves(works[0]),
        first_of(works[1].run(), works[1].begun.wait()),
        all_of([works[2].run(), fails(works[2])]),
        return_exceptions=True,
    )
    assert [work.cancellations for work in works] == [2, 2, 2]
    assert results[0] is None and isinstance(results[2], KeyError)


async def test_a_second_cancellation_reaches_what_swallowed_the_first_at_once() -> None:
    """A TaskGroup passes only the first one on. And the caller ends after its tasks, not before them."""
    stubborn = Stubborn(swallows=1)
    task = asyncio.create_task(all_of([stubborn.run()]))
    await stubborn.begun.wait()
    task.cancel()
    await turn()
    await turn()
    assert not task.done() and stubborn.cancellations == 1
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and stubborn.cancellations == 2


async def test_results_come_in_order_and_each_end_is_reported() -> None:
    ends: list[int] = []

    async def number(value: int) -> int:
        return value

    assert await all_of(map(number, range(3)), on_end=lambda: ends.append(1)) == [0, 1, 2]
    assert await all_of(()) == [] and len(ends) == 3


async def test_a_call_in_the_cleanup_of_a_cancelled_task_gives_its_result() -> None:
    results = []

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            event = asyncio.Event()
            event.set()
            results.append(await heard(swallows(event)))

    task = asyncio.create_task(cleans_up())
    await turn()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and results == [3]


def test_the_first_error_inside_of_groups() -> None:
    inner = KeyError("x")
    assert first_error(BaseExceptionGroup("a", [ExceptionGroup("b", [inner, OSError()]), KeyboardInterrupt()])) is inner
    assert first_error(inner) is inner


async def test_a_background_loop_that_ends_is_logged_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def works() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def breaks() -> None:
        raise KeyError("no such row")

    async with beside(works(), breaks()):
        await running.wait()
        await until(lambda: caplog.records, every_s=0)  # a record of the log has no event
        assert not ended.is_set()
    assert ended.is_set()
    assert "background loop ended" in caplog.text
    assert "no such row" in caplog.text
    assert "breaks" in caplog.text
