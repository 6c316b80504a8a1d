"""A failure that occurs a thousand times a minute is one log line a minute."""

import logging

import pytest

from tidemill.bus.system.output import FailureLog


def test_the_first_has_its_traceback_and_the_rest_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    repeated = FailureLog(logging.getLogger("test"), every_s=60, clock=lambda: now[0])
    for number in range(4313):
        now[0] = number * 60 / 4312
        repeated("reward failed", f"task={number}", error=ValueError("no judge"))
        repeated("task failed", f"task={number}", level=logging.ERROR)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "reward failed: task=0",
        "task failed: task=0",
        "reward failed 4312 times in 60 s, the newest: task=4312",
        "task failed 4312 times in 60 s, the newest: task=4312",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False, False]
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR] * 2
