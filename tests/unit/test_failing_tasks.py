"""When a run ends because every task fails: counts, seconds and reasons, with a clock of the test."""

from tests.refusals import refusal
from tidemill.bus import exit_codes
from tidemill.bus.wire.messages import Dead
from tidemill.learner.buffer.failures import FailingTasks
from tidemill.learner.errors import TasksFail


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def letter(task: int, reason: str = "no judge\n  Traceback") -> Dead:
    return Dead(task=task, reason=reason, attempts=3, actor="a", prompt="p")


def test_so_many_in_a_row_for_so_long_end_the_run_with_the_last_reason() -> None:
    failing = FailingTasks(clock := Clock())
    for task in range(5):
        failing.refuse(5, 60.0)
        failing.died(letter(task))
    failing.refuse(5, 60.0)
    clock.now += 59.0
    failing.refuse(5, 60.0)
    failing.refuse(0, 0.0)
    failing.refuse(6, 0.0)
    clock.now += 1.0
    with refusal(TasksFail, count=5, seconds=60.0, reason="no judge Traceback") as raised:
        failing.refuse(5, 60.0)
    assert exit_codes.of(raised.value) == 78
    assert exit_codes.message(raised.value) == str(raised.value), "the terminal shows one line"


def test_a_complete_group_begins_a_new_count() -> None:
    failing = FailingTasks(clock := Clock())
    for task in range(50):
        failing.died(letter(task))
        clock.now += 100.0
        if task % 4 == 3:
            failing.completed()
        failing.refuse(5, 60.0)
    assert failing.trouble == "the last 2 tasks failed for good: no judge Traceback"
    failing.completed()
    assert failing.trouble == ""
    failing.died(letter(51))
    assert failing.trouble == "", "one task may fail alone"
