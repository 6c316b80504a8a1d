"""The learner's parent: a child that ends badly ends them all, and its last words are repeated."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from learner.process import ChildFailed, _Child, run_learner


def _children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


async def test_a_failed_child_ends_the_others_and_is_quoted() -> None:
    before = _children()
    with pytest.raises(ChildFailed) as caught:
        await run_learner(["--no-such-option"], num_ranks=2, draining=asyncio.Event())
    assert caught.value.code == 2
    assert "--config" in str(caught.value), "its own complaint is not repeated"
    assert _children() == before
    assert "RANK" not in os.environ


async def test_draining_before_they_have_begun_is_an_orderly_end() -> None:
    before = _children()
    draining = asyncio.Event()
    draining.set()
    try:
        await run_learner(["--no-such-option"], num_ranks=1, draining=draining)
    except ChildFailed as error:  # it was quick enough to read its arguments
        assert error.code == 2
    assert _children() == before


async def test_a_child_that_ended_a_moment_ago_can_be_signalled() -> None:
    process = await asyncio.create_subprocess_exec("true", start_new_session=True)
    while os.path.exists(f"/proc/{process.pid}"):  # noqa: ASYNC240  # reaped by asyncio's thread; the loop cannot hear of it meanwhile
        time.sleep(0.001)  # noqa: ASYNC251
    assert process.returncode is None
    _Child("true", process).signal(signal.SIGTERM)
    assert await process.wait() == 0
