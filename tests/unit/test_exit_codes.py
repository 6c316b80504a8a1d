"""The errors that are final, the file that a process writes at its end, and its interpretation by the parent."""

import logging

import pytest

from tidemill.bus import exit_codes
from tidemill.bus.errors import BusError, Fenced, StreamReplaced
from tidemill.learner.errors import ConfigRefused, FeederFailed, PromptError
from tidemill.rewards.errors import UnknownReward


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PromptError("a.jsonl:2", "key 'question'", "keys ['answer']"), exit_codes.CONFIG),
        (ConfigRefused("sampling", "1", 2), exit_codes.CONFIG),
        (UnknownReward("nosuch", "want one of"), exit_codes.CONFIG),
        (StreamReplaced("SAMPLES", "then", "now"), exit_codes.CONFIG),
        (Fenced("run.epoch", 1, 2), exit_codes.TAKEN_OVER),
        (FeederFailed("tcp://feeder", "a.jsonl:2: want", exit_codes.CONFIG), exit_codes.CONFIG),
        (FeederFailed("tcp://feeder", "out of memory"), exit_codes.CRASHED),
        (BusError("away"), exit_codes.CRASHED),
        (KeyError("x"), exit_codes.CRASHED),
    ],
)
def test_what_a_process_writes_of_its_end_is_what_its_parent_reads(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert exit_codes.report(error, logging.getLogger("test")) == code
    written = capsys.readouterr().err
    assert exit_codes.reason(
        ["error: an earlier one", *written.splitlines(), "a line behind it"]
    ) == exit_codes.message(error)
    assert bool(caplog.records) == (code not in exit_codes.FINAL), "a traceback is for errors of the program"


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (KeyError("x"), exit_codes.CRASHED), (UnknownReward("x", "y"), exit_codes.CONFIG)]
)
def test_the_work_of_a_process_ends_with_its_code(
    error: Exception | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        if error is not None:
            raise error

    assert exit_codes.run(work, logging.getLogger("test")) == code
    assert bool(capsys.readouterr().err) is (code != 0)


def test_a_message_is_one_line_and_names_the_type_of_a_foreign_error() -> None:
    assert exit_codes.message(KeyError("output_layer.weight")) == "KeyError: 'output_layer.weight'"
    assert exit_codes.message(RuntimeError()) == "RuntimeError"
    assert exit_codes.message(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert exit_codes.message(PromptError("a.jsonl", "a prompt", "none")) == "a.jsonl: want a prompt, got none"


def test_how_a_process_ended() -> None:
    assert exit_codes.how(1) == "ended with code 1"
    assert exit_codes.how(-9) == "killed by signal 9 (SIGKILL)"
    assert exit_codes.how(-999) == "killed by signal 999"
