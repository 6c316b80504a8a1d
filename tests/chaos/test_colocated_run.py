"""`tidemill up` with learner and engines on one accelerator: never both at work, nothing aborted, with kills in either
one's turn.
"""

import asyncio
import os
import re
import signal
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.storm import drained_and_judged
from tests.chaos.test_instants import new_steps
from tests.waits import until
from tests.whole.running import Up, assert_books_balance, kill, live, until_step, up
from tidemill.actors.serving.engine_process import MEMORY
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.run.audit import audit
from tidemill.learner.checkpoints.disk import listed

COLOCATED = ("learner.colocated=true", "bus.lease_s=3")
LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ")
RELEASED = re.compile(r"memory released tags=kv_cache,weights .*tokens_generated=(\d+)")
RESUMED = re.compile(r"memory resumed tags=kv_cache version=(\d+) tokens_generated=(\d+)")


def events(log: Path) -> list[tuple[float, str]]:
    """Return Unix time and text of the lines of a log."""
    found = []
    for line in log.read_text().splitlines():
        if (match := LINE.search(line)) is not None:
            found.append((datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp(), line))
    return found


def turns_of_the_engine(run: Up, name: str) -> list[tuple[float, float]]:
    """Return the intervals (from, until) in which the engine had no memory. Asserts that no token was generated
    meanwhile.
    """
    found: list[tuple[float, float]] = []
    released: tuple[float, int] | None = None
    for at, line in events(run.directory / "logs" / f"{name}.log"):
        if (match := RELEASED.search(line)) is not None:
            released = (at, int(match[1])) if released is None else released
            assert int(match[1]) == released[1], line
        elif (match := RESUMED.search(line)) is not None and released is not None:
            assert int(match[2]) == released[1], f"tokens were generated between release and resume: {line}"
            found.append((released[0], at))
            released = None
        elif "engine loaded" in line:  # it was started again
            released = None
    return found


def turns_of_the_learner(run: Up) -> list[tuple[float, float]]:
    """Return the intervals (from, until) in which the learner worked on steps."""
    found, began = [], None
    for at, line in events(run.directory / "logs" / "learner.log"):
        if "tidemill.learner.ranks.pushes: turn of the learner" in line:
            began = at
        elif "tidemill.learner.ranks.rank: step=" in line:
            assert began is not None, f"a step outside of the learner's turn: {line}"
            found.append((began, at))
            began = None
    return found


def assert_never_both(run: Up, engines: int, number_of_steps: int) -> None:
    steps = turns_of_the_learner(run)
    assert len(steps) >= number_of_steps
    for number in range(engines):
        away = turns_of_the_engine(run, f"engine-{number}")
        beside = [step for step in steps if any(since <= step[0] and step[1] <= until for since, until in away)]
        assert len(beside) >= number_of_steps - 3, (
            f"engine-{number} had memory in steps of the learner: {len(beside)} of {len(steps)}"
        )


@pytest.mark.slow
def test_learner_and_engines_take_turns(tmp_path: Path) -> None:
    """Two engines, two ranks, and every second step makes no version. The first push, after step 2, waits for both
    engines.
    """
    settings = (
        *COLOCATED,
        "learner.steps=8",
        "learner.checkpoint_every=4",
        "weights.push_every=2",
        "up.engines=2",
        "weights.min_engines=2",
    )
    with up(tmp_path, *settings, "learner.data_parallel=2") as run:
        assert run.wait() == 0, run.log[-4000:]
    summary = run.summary
    assert_books_balance(summary, max_lag=2)
    assert (summary["steps"], summary["pushes"]) == (8, 4), summary
    assert summary["samples_trained"] == 8 * 8 * 4 and not summary["restarts"], summary
    assert_never_both(run, 2, 8)
    for step in run.metrics[2:]:
        assert step["turn/engines"] == 2, step
        assert step["turn/engines_release_seconds"] > 0 and step["turn/engines_resume_seconds"] > 0
        assert step.get("offpolicy/fresh_logprob_diff_abs", 0.0) < 1e-3, "an engine serves the weights it says"


async def test_a_learner_killed_in_its_turn_leaves_nothing_torn(tmp_path: Path) -> None:
    """It has no end of its own, which might come before the kill."""
    settings = (
        "learner.steps=1000000",
        "learner.checkpoint_every=400",
        "learner.weights_digest=true",
        "up.drain_s=120",
    )
    with up(tmp_path, *COLOCATED, *settings) as run:
        async with run.bus() as bus:
            learner = await frozen_in_its_turn(bus)
            before = (await live(bus, "engine")).load
            assert before["released"] == 2, before
            frozen = psutil.Process(learner).children(recursive=True)
            os.kill(learner, signal.SIGKILL)
            for process in frozen:  # the kernel has killed the ranks; a template of the tests ends when it runs again
                with suppress(psutil.NoSuchProcess):
                    process.resume()
            now = before
            while now["released"] or now["tokens_generated"] == before["tokens_generated"]:
                now = (await live(bus, "engine")).load
            await new_steps(bus, 8)
            aborted = (await live(bus, "engine")).load["requests_aborted_by_pushes"]
            accounting, _ = await audit(bus)
        verdict = await drained_and_judged(run)
    assert accounting.balance() and not (accounting.lost or accounting.trained_twice or accounting.problems), accounting
    assert accounting.max_lag_trained <= 2 and not aborted, (accounting, aborted)
    assert verdict.steps_done > 8 and verdict.steps_without_digest == 0, verdict
    assert [one.step for one in listed(run.directory / "checkpoints")] == [verdict.steps_done], (
        "the drain has checkpointed the last step"
    )
    engine = (run.directory / "logs" / "engine-0.log").read_text()
    assert engine.count("engine loaded") == 1, "the engine lives on"
    assert_never_both(run, 1, verdict.steps_done)


@pytest.mark.slow
async def test_an_engine_started_in_the_learners_turn_waits_for_its_end(tmp_path: Path) -> None:
    with up(tmp_path, *COLOCATED, "learner.steps=40", "learner.checkpoint_every=4") as run:
        async with run.bus() as bus:
            learner = await frozen_in_its_turn(bus)
            first = (await live(bus, "engine")).pid
            os.kill(first, signal.SIGKILL)
            view = LiveView(bus)

            async def waiting_engine() -> LiveRow | None:
                return next((row for row in await view.alive("engine") if row.pid != first and row.waits_for), None)

            row: LiveRow = await until(waiting_engine)
            assert row.waits_for == MEMORY and not row.address, row
            for rank in psutil.Process(learner).children(recursive=True):
                rank.resume()
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert run.summary["steps"] == 40


@pytest.mark.slow
async def test_the_bus_killed_between_turns_ends_nothing(tmp_path: Path) -> None:
    """Turns are taken, and staged versions are pushed, when it is back."""
    with up(tmp_path, *COLOCATED, "learner.steps=120", "learner.checkpoint_every=40") as run:
        async with run.bus() as bus:
            for step in (10, 40, 70):
                await until_step(bus, step)
                kill((await live(bus, "bus")).pid)
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert run.summary["steps"] == 120
    assert_never_both(run, 1, 120)


async def frozen_in_its_turn(bus: Bus) -> int:
    """Stop the learner's children in the middle of a step. Returns the process id of the learner, which keeps sending
    heartbeats.
    """
    rows = bus.rows("weights")
    while True:
        turn, head = await rows.get("turn"), await rows.get("head")
        if turn is None or turn[0]["whose"] != "learner" or head is None or head[0].get("version", -1) < 5:
            await asyncio.sleep(0.001)
            continue
        learner = (await live(bus, "learner")).pid
        children = psutil.Process(learner).children(recursive=True)
        for child in children:
            child.suspend()
        turn, engine = await rows.get("turn"), await _settled_row(bus)
        if turn is not None and turn[0]["whose"] == "learner" and engine["released"] == 2:
            return learner
        for child in children:
            child.resume()


async def _settled_row(bus: Bus) -> dict[str, float]:
    """Return the engine's load after two further heartbeats from now."""
    rows, revisions = bus.rows("live"), set[int]()

    async def third_row() -> dict[str, Any] | None:
        row, revision = await rows.get("engine.engine-0") or (None, 0)
        revisions.update(() if row is None else (revision,))
        return row if len(revisions) > 2 else None

    load: dict[str, float] = (await until(third_row))["load"]
    return load
