"""Several runs on one bus: the list of them, and a run that fills its stream while another goes on."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import pytest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import make_sample, make_task
from tests.refusals import refusal
from tests.small_disk import small_disk
from tests.waits import until
from tidemill.bus.client.outbox import STREAM_FULL
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import ConfigMismatch, NoRoom, Refused
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli.runs import read_runs

FLOODED, OTHER = "with_TASKS_in-it", "other"


async def test_a_run_that_fills_its_stream_waits_and_no_other_run_does(open_bus: BusOpener) -> None:
    async with open_bus(run=FLOODED, samples_max_bytes=40_000) as flooded, open_bus(run=OTHER) as other:
        big = {"prompt": "x" * 15_000}
        flood = [flooded.samples.publish(make_sample(FLOODED, task=task, **big)) for task in range(1, 40)]
        waiting = asyncio.gather(*flood)
        await until(lambda: flooded.samples.stats.waiting_full > 30)
        await other.tasks.fence(1)
        for offset in range(10):
            await other.tasks.issue(make_task(OTHER, epoch=1, offset=offset))
            lease = await other.tasks.lease(60)
            assert lease is not None
            await other.samples.publish(make_sample(OTHER, task=lease.task.id, **big))
            assert await lease.ack()
        assert flooded.samples.stats.waiting_full > 30, "it is still full"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_run_whose_bounds_the_server_has_no_room_for_is_refused(open_bus: BusOpener) -> None:
    async with open_bus(run=OTHER, layout=False, samples_max_bytes=1 << 60) as bus:
        with refusal(NoRoom, stream=f"TM_{OTHER}_SAMPLES"):
            await bus.create_layout()


async def test_the_runs_of_a_bus_are_listed_with_state_step_sizes_and_processes(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with (
        open_bus(run=FLOODED, samples_max_bytes=40_000, trained_max_bytes=1000) as first,
        open_bus(run=OTHER) as second,
        open_bus(run="shadow", layout=False) as shadow,
    ):
        await shadow.create_layout(shadow=True)
        await first.plans.fence(1)
        for step in (1, 2):
            await first.plans.append(Done(epoch=1, step=step, metrics={}))
        settings = {"directory": "runs/first", "learner": {"steps": 9}, "bus": {"tasks_per_s": 2.5}}
        await first.rows("run").put("config", settings)
        await second.samples.publish(make_sample(OTHER, task=1, prompt="x" * 15_000))
        async with HeartbeatPublisher(first, _row("learner")), HeartbeatPublisher(first, _row("actor")):
            runs = {run.name: run for run in await read_runs(nats_server.url, wait_s=60)}
        assert list(runs) == [OTHER, "shadow", FLOODED]
        listed = runs[FLOODED]
        assert (listed.state, listed.step, listed.steps, listed.owner) == ("running", 2, 9, "here:runs/first")
        assert json.loads(json.dumps(asdict(listed)))["processes"] == {"learner": 1, "actor": 1}
        assert (listed.reserved_bytes, listed.has_quota, listed.tasks_per_s) == (41_000, False, 2.5)
        assert (runs[OTHER].state, runs[OTHER].has_tasks, runs["shadow"].has_tasks) == ("no learner yet", True, False)
        assert runs[OTHER].bytes > 15_000 > runs["shadow"].bytes
        await _end(first)
        (ended,) = [run for run in await read_runs(nats_server.url, wait_s=60) if run.name == FLOODED]
        assert (ended.state, ended.processes) == ("done", {})


def _row(role: str) -> LiveRow:
    return LiveRow(role=role, id=role, host="here", pid=1, phase="working")


async def _end(bus: Bus) -> None:
    await bus.rows("run").put(
        "end", {"outcome": "done", "code": 0, "reason": "learner.steps", "step": 2, "time_s": 1.0}
    )


MB = 1_000_000
QUOTA = 121 * MB
OF_QUOTA = {"samples_max_bytes": 20 * MB, "trained_max_bytes": MB, "quota_bytes": QUOTA}


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[str]:
    """Start a server with room for two quotas, not for three, and yield its URL."""
    with small_disk(tmp_path / "disk", size_bytes=440 * MB) as disk, EmbeddedServer(disk.root, BusConfig()) as server:
        yield server.url


async def test_quotas_beyond_the_room_of_the_server_are_refused_and_leave_it_to_the_others(small_server: str) -> None:
    config = BusConfig(**OF_QUOTA)
    async with AsyncExitStack() as stack:
        buses = [await stack.enter_async_context(connect(small_server, f"r{n}", config, name="t")) for n in range(3)]
        for bus in buses[:2]:
            await bus.create_layout()
        with refusal(NoRoom, setting=re.compile(r"^bus\."), reserved_gb=re.compile(r"^0\.2")):
            await buses[2].create_layout()
        runs = await read_runs(small_server, wait_s=60)
        assert [run.name for run in runs if run.has_quota] == ["r0", "r1"] == [run.name for run in runs]
        assert all(0.96 * QUOTA < run.reserved_bytes <= QUOTA for run in runs)


async def test_a_larger_quota_without_room_leaves_the_run_as_it_was(small_server: str) -> None:
    """Some streams are raised before the server refuses one; with these the earlier quota would not fit any more."""
    config = BusConfig(**OF_QUOTA)
    async with connect(small_server, "r", config, name="t") as bus:
        await bus.create_layout()
        async with connect(small_server, "r", replace(config, quota_bytes=4 * QUOTA), name="t") as larger:
            with refusal(NoRoom, setting="bus.quota_bytes"):
                await larger.create_layout()
        await bus.create_layout()


async def test_a_run_that_fills_its_quota_takes_no_room_from_another(small_server: str) -> None:
    """Without quotas, plans, partials and reports of one run take the room that is reserved for another's samples."""
    config = BusConfig(**OF_QUOTA)
    async with (
        connect(small_server, "full", config, name="t") as full,
        connect(small_server, "b", config, name="t") as b,
    ):
        await full.create_layout()
        await b.create_layout()
        await _fill(full, subjects.partial("full", 1, 0))
        await _fill(full, subjects.dead("full", "report"))
        await full.plans.fence(1)
        appending = asyncio.create_task(
            _append(full, [Done(epoch=1, step=n, metrics={"x" * MB: 1.0}) for n in range(35)])
        )
        quarter = config.records_bytes // 4
        await until(lambda: _holds(full, subjects.PLAN, quarter - 2 * MB))
        stored = [await b.samples.publish(make_sample("b", task=task, prompt="x" * MB)) for task in range(1, 16)]
        assert stored == [*range(1, 16)] and not appending.done()
        (used,) = [run.bytes for run in await read_runs(small_server, wait_s=60) if run.name == "full"]
        assert used < QUOTA
        larger = replace(config, quota_bytes=QUOTA + 64 * MB)
        async with connect(small_server, "full", larger, name="operator") as operator:
            await operator.create_layout()
        await appending


async def _holds(bus: Bus, stream: str, size_bytes: int) -> bool:
    return (await bus.jet.state(subjects.stream(bus.run, stream))).bytes > size_bytes


async def _fill(bus: Bus, subject: str) -> None:
    """Store messages until the stream is full; it must be before it has taken the room of the server."""
    with refusal(Refused, code=STREAM_FULL):
        for number in range(300):
            await bus.jet.outbox.attempt(subject, bytes(MB), {subjects.MESSAGE_ID: f"{subject}.{number}"})


async def _append(bus: Bus, records: list[Done]) -> None:
    for record in records:
        await bus.plans.append(record)


async def test_a_quota_may_grow_and_not_shrink(open_bus: BusOpener) -> None:
    async with open_bus(run=OTHER, **OF_QUOTA) as bus:
        async with open_bus(run=OTHER, layout=False, **OF_QUOTA | {"quota_bytes": 2 * QUOTA}) as larger:
            await larger.create_layout()
            config = (await larger.jet.call(f"STREAM.INFO.{subjects.stream(OTHER, subjects.PLAN)}"))["config"]
            assert config["max_bytes"] == larger.config.records_bytes // 4 == 200 * MB // 4 + 21 * MB // 4
        with refusal(ConfigMismatch, field="max_bytes"):
            await bus.create_layout()


@pytest.mark.slow
async def test_a_run_that_floods_the_bus_slows_another_by_a_bounded_factor(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """Medians of the same run of the test, because the machine has two cores for both: 1.4 of alone there."""
    async with open_bus(run=OTHER) as other, open_bus(run=FLOODED, layout=False) as flooded:
        await other.tasks.fence(1)
        alone_s = await _cycles(other, 300)
        words = [sys.executable, "-m", "tests.flooding", nats_server.url, FLOODED]
        flooding = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        try:
            assert flooding.stdout is not None and await flooding.stdout.readline()
            before = (await flooded.samples.states())[0].last_seq
            beside_s = await _cycles(other, 300)
            stored = (await flooded.samples.states())[0].last_seq - before
        finally:
            flooding.kill()
            await flooding.wait()
        assert stored > 300, "it stores faster than the other run"
        assert median(beside_s) < 8 * median(alone_s)
        (state,) = await other.samples.states()
        assert (state.messages, state.last_seq) == (600, 600), "each sample is stored once"


async def _cycles(bus: Bus, count: int) -> list[float]:
    """Issue, lease, answer and settle so many tasks, one after the other. Returns the seconds of each."""
    seconds = []
    for offset in range(count):
        began_s = time.monotonic()
        await bus.tasks.issue(make_task(bus.run, epoch=1, offset=offset))
        lease = await bus.tasks.lease(60)
        assert lease is not None
        await bus.samples.publish(make_sample(bus.run, task=lease.task.id, prompt="x" * 32_000))
        assert await lease.ack()
        seconds.append(time.monotonic() - began_s)
    return seconds
