"""Several runs on one bus: the list of them, and a run that fills its stream while another goes on."""

import asyncio
import json
from dataclasses import asdict

import pytest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import make_sample, make_task
from tests.waits import until
from tidemill.bus.errors import NoRoom
from tidemill.bus.liveness.heartbeats import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Done
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.deploy.registry import read_runs

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
        with pytest.raises(NoRoom, match=f"TM_{OTHER}_SAMPLES"):
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
        await first.rows("run").put("config", {"directory": "runs/first", "learner": {"steps": 9}})
        await second.samples.publish(make_sample(OTHER, task=1, prompt="x" * 15_000))
        async with HeartbeatPublisher(first, _row("learner")), HeartbeatPublisher(first, _row("actor")):
            runs = {run.name: run for run in await read_runs(nats_server.url, wait_s=60)}
        assert list(runs) == [OTHER, "shadow", FLOODED]
        listed = runs[FLOODED]
        assert (listed.state, listed.step, listed.steps, listed.owner) == ("running", 2, 9, "here:runs/first")
        assert json.loads(json.dumps(asdict(listed)))["processes"] == {"learner": 1, "actor": 1}
        assert listed.reserved_bytes == 41_000
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
