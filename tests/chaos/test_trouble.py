"""No space, no disk, no network: a process waits and logs the reason, or ends with it; no sample is lost or trained
twice.
"""

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.auditor import Verdict, judge
from tests.chaos.parts import PATIENCE_S, Part, Parts, parts
from tests.chaos.wire import Wire
from tests.small_disk import SmallDisk, small_disk
from tests.unhurried import UNHURRIED
from tests.waits import until
from tests.whole.running import row_of
from tidemill.bus.errors import BusUnavailable
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.readers import History
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done
from tidemill.learner.feed.restart import CHECKPOINT_KEY

SETTINGS = (
    "learner.steps=1000000",
    "learner.checkpoint_every=5",
    "learner.weights_digest=true",
    "bus.lease_s=3",
    UNHURRIED,
)


def test_a_full_stream_holds_publishers_back_visibly(tmp_path: Path) -> None:
    with parts(tmp_path, *SETTINGS) as run:
        verdict = asyncio.run(_full(run))
        assert verdict.steps_done > 0, verdict


async def _full(run: Parts) -> Verdict:
    await run.begin("engine", "actor", "learner")
    async with _witnessed(run) as (bus, seen):
        await _new_steps(bus, 5)
        await _limit(bus, (await bus.samples.info()).bytes)
        actor = await _row(bus, "actor", lambda row: row.waits_for.startswith("room in SAMPLES"))
        assert actor.phase in ("working", "waiting") and "samples wait" in actor.waits_for, actor
        await _row(
            bus,
            "feeder",
            lambda row: row.phase == "waiting" and "more groups" in row.waits_for and row.load["step"] > 0,
        )
        await _limit(bus, bus.config.samples_max_bytes)
        await _new_steps(bus, 5)
        return await _rest_and_judge(run, bus, seen)


@pytest.mark.slow
def test_the_disk_of_the_bus_is_full_for_a_while(tmp_path: Path) -> None:
    """No message can be stored: all processes wait, those that start meanwhile, too, and log the reason; all go on when
    there is room.
    """
    small = small_disk(tmp_path / "run" / "bus", size_bytes=200_000_000)
    with small as disk, parts(tmp_path, *SETTINGS, "bus.samples_max_bytes=120000000") as run:
        asyncio.run(_no_disk(run, disk))


async def _no_disk(run: Parts, disk: SmallDisk) -> None:
    await run.begin("engine", "actor", "learner")
    (killed,) = _running(run, "learner")
    async with _witnessed(run) as (bus, seen):
        await _new_steps(bus, 5)
        disk.fill(leaving=0)
        await _logged("no room: ", killed, *_running(run, "actor"))
        killed.kill()
        again, late = run.start("learner", name="again"), run.start("actor", name="late")
        # Beyond the checks of a start. The actor may have no task, since the other one holds all: it has no sample to
        # store, and only its heartbeat fails.
        await _logged("the bus stores nothing: no room: ", again)
        await _logged("heartbeat unsent key=actor.late error=no room: ", late)
        assert [part.name for part in _running(run, "learner") + _running(run, "actor")] == ["again", "actor", "late"]
        disk.clear()
        await _row(bus, "actor", lambda row: row.id == "late")
        await _new_steps(bus, 5)
        await _rest_and_judge(run, bus, seen)


async def _logged(text: str, *parts: Part) -> None:
    """Wait until the text is in the log of every part."""
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: all(text in part.log for part in parts), every_s=0.1)


def test_no_room_for_a_checkpoint_ends_the_learner_with_the_reason(tmp_path: Path) -> None:
    """The previous checkpoint stays the one that a start uses; the half-written one is removed."""
    with parts(tmp_path, *SETTINGS) as run:
        asyncio.run(_no_room_for_a_checkpoint(run))


async def _no_room_for_a_checkpoint(run: Parts) -> None:
    await run.begin("engine", "actor")
    learner = run.start("learner")
    async with _witnessed(run) as (bus, seen):
        await until(lambda: bus.rows("run").get(CHECKPOINT_KEY))
        await _new_steps(bus, 2)
        (rank,) = [process for process in learner.family() if "rank" in process.cmdline()]
        rank.rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))  # limit of every file it writes
        assert await learner.code() == 1
        told = "-epoch-1.tmp: cannot be written: rank 0: [Errno 27] File too large"
        assert told in learner.log.splitlines()[-1], learner.log[-3000:]
        row = await bus.rows("run").get(CHECKPOINT_KEY)
        (torn,) = (run.root / "checkpoints").glob("*.tmp")
        run.start("learner", name="again")
        await _new_steps(bus, 12)
        verdict = await _rest_and_judge(run, bus, seen)
    assert row is not None and f"step={row[0]['step']} recorded=" in run.started[-1].log, (
        "it resumes from the last that was written"
    )
    assert not torn.exists() and verdict.steps_taken_again > 0, verdict


def test_the_network_is_cut(tmp_path: Path) -> None:
    """Actor, engine and learner are cut off in turn, for longer than leases and live rows last; another actor is never
    cut off.
    """
    with parts(tmp_path, *SETTINGS) as run:
        asyncio.run(_cut(run))


async def _cut(run: Parts) -> None:
    await run.begin()
    async with Wire(run.url) as first, Wire(run.url) as second, Wire(run.url) as third:
        engine, actor = run.start("engine", url=first.url), run.start("actor", url=second.url, name="cut")
        run.start("actor", name="whole")
        learner = run.start("learner", url=third.url)
        async with _witnessed(run) as (bus, seen):
            await _new_steps(bus, 5)
            second.hold()
            await _cut_off(bus, actor)
            await _new_steps(bus, 5)
            second.release()
            await _row(bus, "actor", lambda row: row.id == "cut")
            for wire, part in ((first, engine), (third, learner)):
                wire.hold()
                await _cut_off(bus, part)
                wire.release()
                await _new_steps(bus, 5)
            verdict = await _rest_and_judge(run, bus, seen)
    assert verdict.steps_taken_again == 0, f"a cut network is no reason to start again: {verdict}"


@contextlib.asynccontextmanager
async def _witnessed(run: Parts) -> AsyncIterator[tuple[Bus, dict[int, str]]]:
    """Yield the bus, and message ids by sequence as they are stored in SAMPLES."""
    seen: dict[int, str] = {}

    async def watch(bus: Bus) -> None:
        async for glimpse in History(bus.jet).glimpses(1):
            seen[glimpse.seq] = glimpse.headers["Nats-Msg-Id"]

    async with run.bus() as bus:
        watching = asyncio.create_task(watch(bus))
        try:
            async with asyncio.timeout(4 * PATIENCE_S):
                yield bus, seen
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _rest_and_judge(run: Parts, bus: Bus, seen: dict[int, str]) -> Verdict:
    """Drain every process, each of which must exit with 0; then audit the run."""
    for role in ("actor", "learner", "engine"):
        for part in _running(run, role):
            part.process.send_signal(signal.SIGTERM)
            assert await part.code() == 0, part.log[-3000:]
    verdict = await judge(run.url, bus.run, run.root / "checkpoints", seen)
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    return verdict


def _running(run: Parts, role: str) -> list[Part]:
    return [part for part in run.started if part.role == role and part.process.returncode is None]


async def _new_steps(bus: Bus, count: int) -> None:
    """Wait until ``count`` further steps are done."""
    newest = max([record.step async for _, record in bus.plans.scan() if isinstance(record, Done)], default=0)
    async with asyncio.timeout(PATIENCE_S):
        async for _, record in bus.plans.follow():
            if isinstance(record, Done) and record.step >= newest + count:
                return


async def _limit(bus: Bus, max_bytes: int) -> None:
    """Change the bound of SAMPLES, as an operator can."""
    stream = subjects.stream(bus.run, subjects.SAMPLES)
    config: dict[str, Any] = (await bus.jet.call(f"STREAM.INFO.{stream}"))["config"]
    await bus.jet.call(f"STREAM.UPDATE.{stream}", {**config, "max_bytes": max_bytes})


_row = functools.partial(row_of, timeout_s=PATIENCE_S)


async def _cut_off(bus: Bus, part: Part) -> None:
    """Wait until nothing of it reaches the bus, and it has given its connection up and tries to make another."""
    view = LiveView(bus)

    async def cut_off() -> bool:
        with contextlib.suppress(BusUnavailable):
            return part.name not in {row.id for row in await view.alive(part.role)} and "bus: disconnected" in part.log
        return False

    await until(cut_off, timeout_s=PATIENCE_S)
