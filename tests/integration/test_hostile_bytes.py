"""Hostile bytes on every stream, bucket and subject of a run at work: nothing ends, all is counted, and the valid messages behind them are
processed."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from actors.config import ActorConfig
from actors.rollout.actor_process import run_actor
from bus.config import BusConfig
from bus.liveness.heartbeats import HeartbeatPublisher, LiveView
from bus.server.nats_server import EmbeddedServer
from bus.streams.bus import connect
from bus.streams.cursors import Cursors
from bus.streams.history import History
from bus.wire.messages import LiveRow
from launch.run import desired
from launch.run.audit import audit
from launch.run.watch import RunWatch
from learner.settings.config import LearnerConfig, StalenessConfig
from tests.actor_kit import complete, engine, issue, model_dir, prompt_tokens, row_until, take_over
from tests.bus_fixtures import BusOpener
from tests.feeder_kit import World
from tests.hostile import Hostile

ROOT = Path(__file__).resolve().parents[2]
LOOKING = (
    "status",
    "tail",
    "tail --json",
    "tail --reward >=0",
    "stats --window 999",
    "stats --window 5m --json",
    "dead",
    "dead --json",
    "weights",
)
READ_ALL = """
import sys
from launch.cli.main import main
for line in sys.argv[2:]:
    code = main([*line.split(), *sys.argv[1].split()])
    assert code == 0 or (line.startswith("show") and code == 2), (line, code)  # 2 = it says why the sample cannot be shown
    print("DONE", line)
"""


@asynccontextmanager
async def world(server: EmbeddedServer, run: str, root: Path) -> AsyncIterator[World]:
    learner = LearnerConfig(steps=8, groups_per_step=2, group_size=2, checkpoint_every=2, max_tokens_per_micro_batch=16)
    config = BusConfig(lease_s=5.0)
    async with connect(server.url, run, config, name="test", wait_s=60) as bus:
        await bus.create_layout()
        yield World(url=server.url, run=run, bus=bus, root=root, learner=learner, staleness=StalenessConfig(max_lag=1), config=config)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_run_goes_on_among_hostile_bytes(nats_server: EmbeddedServer, run_id: str, tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    hostile = Hostile(nats_server.url, run_id, seed)
    async with world(nats_server, run_id, tmp_path / "checkpoints") as run, AsyncExitStack() as stack:
        await hostile.write(500, hostile.everything)  # stored before the feeder starts
        row = LiveRow(role="host", id="here", host="h", pid=1, phase="working")
        await stack.enter_async_context(HeartbeatPublisher(run.bus, row, 0.2))
        watching = asyncio.create_task(RunWatch(run.bus, steps=8).run())
        stack.callback(watching.cancel)
        url, feeding = await stack.enter_async_context(run.feeder())
        await row_until(run.bus.rows("live"), "feeder.feeder", lambda row: "DEAD" in row["unreadable"])
        await stack.enter_async_context(run.actors())
        training = asyncio.create_task(run.train(url))
        while not training.done():
            await hostile.write(40, hostile.everything)
            assert not feeding.done() or training.done(), feeding
            assert not watching.done(), watching
            assert [one.id for one in await LiveView(run.bus).alive("host") if one.id != "z"] == ["here"]
            await desired.read(run.bus)
            await Cursors(run.bus).all()
        await training
        await feeding
        assert [plan.step for plan in await run.plans()] == list(range(1, 9))
        accounting, outcomes = await audit(run.bus)
        assert (accounting.trained, accounting.lost, accounting.trained_twice, len(outcomes)) == (32, 0, 0, 8)
        assert accounting.balance() and accounting.invalid > 20, accounting
        letters, words = [dead async for _, dead in run.bus.dead.scan()], await run.bus.dead.decisions()
        assert all(dead.task > 0 for dead in letters) and words
        assert {"DEAD", "PLAN", "TASKS", "live", "run", "wanted"} <= run.bus.refusals.counts.keys(), run.bus.refusals
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await read_everything(run)


async def read_everything(run: World) -> None:
    """Read the run with every command of an operator."""
    history = History(run.bus.jet)
    await history.at_version(3)
    assert [stored.seq async for stored in history.payloads(1, 300)]
    found = [received.seq async for received in run.bus.samples.tail(last=30, follow=False)]
    place = f"--bus {run.url} --run {run.run}"
    arguments = [place, *LOOKING, *(f"show {seq}" for seq in (*found[:3], *found[-3:]))]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", READ_ALL, *arguments), cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await child.communicate()
    assert child.returncode == 0, out.decode()[-3000:] + errors.decode()
    assert "passed over here: " in out.decode(), out.decode()


async def test_an_actor_works_on_among_hostile_bytes(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    await asyncio.to_thread(lambda: (model_dir(), prompt_tokens()))
    async with open_bus(lease_s=5.0) as bus, engine(bus) as _:
        hostile, draining = Hostile(nats_server.url, bus.run, 3), asyncio.Event()
        epoch = await take_over(bus)
        await hostile.write(200, hostile.everything)
        tasks = await issue(bus, epoch, 2)
        acting = asyncio.create_task(
            run_actor(nats_server.url, bus.run, ActorConfig(reward="digits", generate_timeout_s=60.0), bus.config, draining, "a1")
        )
        try:
            while True:
                await hostile.write(20, hostile.everything)
                assert not acting.done(), acting
                found = [one.sample async for one in bus.samples.tail(last=10_000, follow=False)]
                if complete(tasks)([sample for sample in found if not isinstance(sample, Exception)]):
                    break
                if len(tasks) < 4:
                    tasks += await issue(bus, epoch, 2)
            rows = await bus.rows("live").all("actor")
            assert "actor.a1" in rows
        finally:
            draining.set()
            await acting
        assert bus.refusals.counts
