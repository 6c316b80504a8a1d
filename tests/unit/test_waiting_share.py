"""The share of time in which an engine has no work, by a clock of the test."""

import pytest

from tidemill.actors.serving.host import WINDOW_S, IdleClock, WaitingShare


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_idle_is_the_time_in_which_no_request_is_unfinished() -> None:
    clock = Clock()
    idle = IdleClock(clock=clock)
    for after_s, change in ((1.0, 2), (5.0, -1), (1.0, -1), (3.0, 1)):
        clock.now_s += after_s
        idle.note(change)
    clock.now_s += 7.0
    assert idle.idle_s == pytest.approx(1.0 + 3.0)


def test_the_share_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    share = WaitingShare(clock=clock)
    assert share.read(50.0) == 0.0, "nothing is known of the time before"
    clock.now_s += 4.0
    assert share.read(51.0) == pytest.approx(0.25)
    for _ in range(20):
        clock.now_s += WINDOW_S / 10
        last = share.read(51.0)
    assert last == 0.0, "the idle second is longer ago"
