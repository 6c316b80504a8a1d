"""The learner's parent: a child that fails ends them all, and its last error message is repeated."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.feeder_kit import KEYS
from tests.refusals import refusal
from tests.waits import poll
from tidemill.bus.system.processes import Child
from tidemill.learner.ranks import process
from tidemill.learner.ranks.process import ChildFailed, run_learner

LATE = """
import signal, sys
def end(*_):
    print("error: a.jsonl:2: want key 'question'", file=sys.stderr)
    sys.exit(78)
signal.signal(signal.SIGTERM, end)
print("late", flush=True)
signal.pause()
"""
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
signal.pause()
"""


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended in between
            found |= set(map(int, (task / "children").read_text().split()))
    return found


async def test_a_failed_child_ends_the_others_and_is_quoted() -> None:
    before = _children()
    with pytest.raises(ChildFailed) as caught:
        await run_learner(["--no-such-option"], num_ranks=2, draining=asyncio.Event())
    assert caught.value.code == 2
    assert "--config" in str(caught.value), "its own complaint is not repeated"
    assert _children() == before
    assert "RANK" not in os.environ


async def test_a_child_that_no_restart_can_cure_ends_the_learner_with_its_code_and_its_message(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(f"run: wrong\nmodel: {{path: {tmp_path}/none}}\n")
    with pytest.raises(ChildFailed) as caught:
        await run_learner(["--config", str(file), "--bus", "nats://127.0.0.1:1"], num_ranks=1, draining=asyncio.Event())
    assert caught.value.exit_code == 78
    assert (
        str(caught.value)
        == f"model.path: want a directory with a Hugging Face model (config.json in it), got '{tmp_path}/none'"
    )


async def test_a_killed_child_is_named_with_its_signal_and_the_others_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A feeder that waits for a dead rank to leave would wait without end: here it does not even notice the stop
    signal.
    """
    monkeypatch.setattr(process, "STOP_S", 0.1)
    deaf = await process.start_child("feeder", [sys.executable, "-c", DEAF], {}, KEYS)
    killed = await process.start_child("rank 0", [sys.executable, "-c", DEAF], {}, KEYS)
    for child in (deaf, killed):
        assert child.process is not None and child.process.stdout is not None
        assert await child.process.stdout.readline() == b"deaf\n"
    killed.send(signal.SIGKILL)
    with refusal(ChildFailed, name="rank 0", code=-signal.SIGKILL) as caught:
        await process.watch_children(deaf, [killed], asyncio.Event(), 30)
    assert caught.value.exit_code == 1
    await process.end_children([deaf, killed])
    assert deaf.returncode == -signal.SIGKILL


async def test_the_message_of_a_child_that_ends_last_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that receives the feeder's error may end before the feeder does: the feeder's message counts."""
    monkeypatch.setattr(process, "STOP_S", 60.0)
    feeder = await process.start_child("feeder", [sys.executable, "-c", LATE], {}, KEYS)
    assert feeder.process is not None and feeder.process.stdout is not None
    assert await feeder.process.stdout.readline() == b"late\n"
    rank = await process.start_child("rank 0", [sys.executable, "-c", "raise SystemExit(1)"], {}, KEYS)
    with refusal(ChildFailed, name="rank 0", code=1):
        await process.watch_children(feeder, [rank], asyncio.Event(), 30)
    await process.end_children([feeder, rank])
    assert process.failure_of(feeder).exit_code == 78
    assert str(process.failure_of(feeder)) == "a.jsonl:2: want key 'question'"


async def test_draining_before_they_have_begun_is_an_orderly_end() -> None:
    before = _children()
    draining = asyncio.Event()
    draining.set()
    try:
        await run_learner(["--no-such-option"], num_ranks=1, draining=draining)
    except ChildFailed as error:  # the child had time to read its arguments
        assert error.code == 2
    assert _children() == before


async def test_a_child_that_ended_a_moment_ago_can_be_signalled() -> None:
    child = Child("sleep", ["sleep", "600"])
    await child.start()
    os.kill(
        child.pid, signal.SIGKILL
    )  # from here to the signal in one step of the loop, so that the loop cannot notice the end
    poll(lambda: not os.path.exists(f"/proc/{child.pid}"))  # reaped by asyncio's thread
    assert child.running
    child.send(signal.SIGTERM)
    assert await child.wait() == -signal.SIGKILL
