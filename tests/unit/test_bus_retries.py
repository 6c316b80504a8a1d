"""Retries while the bus is away: their duration, the errors that are retried, and the conditions that end them."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.refusals import refusal
from tidemill.bus.client.connection import Connection, before_retry, retry
from tidemill.bus.errors import BusFull, BusUnavailable, NotFound


class FakeConnection(Connection):
    """A connection without a server: ``up`` and ``closed`` are set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False
        self.waits: list[float] = []
        self.comes_back = True

    @property
    def closed(self) -> bool:
        return self.is_closed

    async def wait_up(self, timeout_s: float, where: str = "bus") -> None:
        self.waits.append(timeout_s)
        if not self.comes_back:
            raise BusUnavailable(where, "not back")


class Asked:
    """A call that fails ``failures`` times, then returns the number of calls."""

    def __init__(self, failures: int, on_call: Callable[[int], None] = lambda call: None) -> None:
        self.calls, self._failures, self._on_call = 0, failures, on_call

    async def __call__(self) -> int:
        self.calls += 1
        self._on_call(self.calls)
        if self.calls <= self._failures:
            raise BusUnavailable("x", f"failure {self.calls}")
        return self.calls


def test_a_call_is_repeated_while_the_bus_is_away_and_each_failure_is_reported() -> None:
    errors: list[str] = []
    connection, asked = FakeConnection(), Asked(3)
    assert asyncio.run(retry(connection, asked, report=lambda error: errors.append(str(error)))) == 4
    assert [error.rpartition(" ")[2] for error in errors] == ["1", "2", "3"]
    assert connection.waits == [], "without outage_s the call itself waits for the connection"


def test_a_full_bus_is_waited_for_without_end_and_its_restart_after_it() -> None:
    errors: list[type[BusUnavailable]] = []
    answers: list[BusUnavailable | int] = [
        BusFull("x", "no room"),
        BusFull("x", "no room"),
        BusUnavailable("x", "not connected"),
        4,
    ]

    async def ask() -> int:
        answer = answers.pop(0)
        if isinstance(answer, BusUnavailable):
            raise answer
        return answer

    late = time.monotonic() - 1
    assert (
        asyncio.run(retry(FakeConnection(), ask, deadline=late, report=lambda error: errors.append(type(error)))) == 4
    )
    assert errors == [BusFull, BusFull, BusUnavailable]


def test_any_other_error_ends_it() -> None:
    async def missing() -> int:
        raise NotFound("stream", "x")

    with pytest.raises(NotFound):
        asyncio.run(retry(FakeConnection(), missing))


def test_a_closed_connection_ends_it_with_the_last_error() -> None:
    connection = FakeConnection()

    def close(call: int) -> None:
        connection.is_closed = call == 2

    asked = Asked(5, close)
    with refusal(BusUnavailable, reason="failure 2"):
        asyncio.run(retry(connection, asked, outage_s=1.0))
    assert (asked.calls, connection.waits) == (2, [1.0])


def test_no_try_begins_behind_the_deadline() -> None:
    for _ in range(20):  # a process that stands still meanwhile tries once, or wakes behind the deadline
        begins = list[float]()
        asked = Asked(10**6, lambda call, begins=begins: begins.append(time.monotonic()))  # type: ignore[misc]
        deadline = time.monotonic() + 0.07
        with pytest.raises(BusUnavailable):
            asyncio.run(retry(FakeConnection(), asked, pause_s=0.02, deadline=deadline))
        assert asked.calls <= 4
        assert all(begin + 0.02 < deadline for begin in begins[:-1]), (
            "the pause behind each was to end before the deadline"
        )
        if asked.calls >= 2 and begins[-1] < deadline:
            break
    assert asked.calls >= 2 and begins[-1] < deadline
    asked = Asked(1)
    with refusal(BusUnavailable, reason="failure 1"):
        asyncio.run(retry(FakeConnection(), asked, pause_s=5.0, deadline=time.monotonic() + 1.0))
    assert asked.calls == 1, "a pause that would outlast the deadline is not begun"


def test_an_outage_that_is_too_long_ends_it() -> None:
    connection, asked = FakeConnection(), Asked(3)
    assert asyncio.run(retry(connection, asked, outage_s=9.0)) == 4
    assert connection.waits == [9.0] * 3
    connection.comes_back = False
    with refusal(BusUnavailable, reason="not back"):
        asyncio.run(retry(connection, Asked(1), outage_s=9.0))


def test_it_can_be_cancelled_between_two_tries() -> None:
    async def main() -> None:
        failed = asyncio.Event()
        task = asyncio.create_task(retry(FakeConnection(), Asked(10**6, lambda call: failed.set()), pause_s=60.0))
        await failed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_the_pause_itself_takes_its_time() -> None:
    begin = time.monotonic()
    asyncio.run(before_retry(FakeConnection(), BusUnavailable("x", "y"), pause_s=0.05))
    assert time.monotonic() - begin >= 0.04
