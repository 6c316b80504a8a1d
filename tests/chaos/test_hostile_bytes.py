"""Hostile bytes on every stream, bucket and subject of a run at work: nothing ends, all is counted, and the valid
messages behind them are processed.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.actor_kit import complete, engine, issue, model_dir, prompt_tokens, row_until, samples_until, take_over
from tests.bus_fixtures import BusOpener
from tests.feeder_kit import World
from tests.garbage import freeze_again
from tests.hostile import Hostile
from tests.launched import run_tidemill
from tests.refusals import refusal
from tidemill.actors.actor.process import run_actor
from tidemill.actors.config import ActorConfig, EngineConfig, RouterConfig
from tidemill.actors.router.server import run_router
from tidemill.actors.scoring import run_scorer
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.engine_process import EngineLimits, EnginePlaces, run_engine
from tidemill.bus import exit_codes
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import UnreadableRow
from tidemill.bus.keys import Keys, admin_keys, api_keys, keep_keys, make_keys
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.readers import Cursors, History
from tidemill.bus.system.coroutines import cancellable
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.run import desired
from tidemill.launch.run.audit import audit
from tidemill.launch.run.watch import RunWatch
from tidemill.launch.settings.prepare import Prepared
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig
from tidemill.weightstore.store.registry import VersionRegistry

KEY = "k" * 32
CONFIG = {
    "actor": {"reward": "digits", "generate_timeout_s": 60.0, "engines": [], "scorers": {"enabled": True}},
    "bus": {"lease_s": 5.0},
    "learner": {"steps": 3},
}
ROOT = Path(__file__).resolve().parents[2]
LOOKING = (
    "status",
    "tail",
    "tail --json",
    "tail --reward >=0",
    "dead",
    "dead --json",
    "weights",
)
READ_ALL = """
import sys
from tidemill.launch.cli.main import main
for line in sys.argv[2:]:
    code = main([*line.split(), *sys.argv[1].split()])
    # 2 = it says why the sample cannot be shown
    assert code == 0 or (line.startswith("show") and code == 2), (line, code)
    print("DONE", line)
"""


@asynccontextmanager
async def world(server: EmbeddedServer, run: str, root: Path) -> AsyncIterator[World]:
    learner = LearnerConfig(steps=8, groups_per_step=2, group_size=2, checkpoint_every=2, max_tokens_per_micro_batch=16)
    config = BusConfig(lease_s=5.0)
    async with connect(server.url, run, config, name="test", wait_s=60) as bus:
        await bus.create_layout()
        yield World(
            url=server.url,
            run=run,
            bus=bus,
            root=root,
            learner=learner,
            staleness=StalenessConfig(max_lag=1),
            config=config,
        )


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_run_goes_on_among_hostile_bytes(
    nats_server: EmbeddedServer, run_id: str, tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}")
    hostile = Hostile(nats_server.url, run_id, seed)
    async with world(nats_server, run_id, tmp_path / "checkpoints") as run, AsyncExitStack() as stack:
        await hostile.write(500, hostile.everything)  # stored before the feeder starts
        await hostile.write(
            100, lambda: [row for row in hostile.rows_of_the_learner() if "checkpoint" not in row[0]], unreadable=True
        )
        await stack.enter_async_context(kept_rows(run.bus))
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
            await hostile.write(20, hostile.rows_of_the_learner, unreadable=True)
            await hostile.write(5, lambda: [row for row in hostile.rows_of_others() if "host.here" not in row[0]])
            assert not feeding.done() or feeding.exception() is None, feeding
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
        # Decisions on tasks that were never issued go at a checkpoint, so there may be none at the end.
        assert all(dead.task > 0 for dead in [dead async for _, dead in run.bus.dead.scan()])
        assert {
            "DEAD",
            "PLAN",
            "TASKS",
            "live",
            "run",
            "wanted",
            "keys",
            "weights",
        } <= run.bus.refusals.counts.keys(), run.bus.refusals
        registry = VersionRegistry(run.bus)
        head = await run.bus.retry(partial(registry.repaired_head, 1))
        if head is None:  # it was deleted when the feeder had ended; the next learner restores it
            await run.bus.retry(partial(registry.restore, run.versions, 1))
            head = await registry.head()
        assert head is not None and head.step == 8, head
        await row_until(run.bus.rows("keys"), "admin", lambda row: row == {"key": KEY})
        await row_until(run.bus.rows("run"), "api_key", lambda row: row == {"key": Keys.of(KEY).api})
        await row_until(run.bus.rows("run"), "config", lambda row: row == CONFIG)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await read_everything(run)


@asynccontextmanager
async def kept_rows(bus: Bus) -> AsyncIterator[None]:
    """Make the keys and keep the rows of the learner's parent, as it does."""
    keys = await make_keys(bus, last=KEY)
    assert keys.admin == KEY
    await bus.rows("run").put("config", CONFIG)
    keeping = [asyncio.create_task(work) for work in (keep_keys(bus, keys), bus.rows("run").keep("config", CONFIG))]
    try:
        yield
        assert not any(one.done() for one in keeping), keeping
    finally:
        for one in keeping:
            one.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


async def read_everything(run: World) -> None:
    """Read the run with every command of an operator."""
    history = History(run.bus.jet)
    await history.at_version(3)
    assert [stored.seq async for stored in history.payloads(1, 300)]
    found = [received.seq async for received in run.bus.samples.tail(last=30, follow=False)]
    place = f"--bus {run.url} --run {run.run}"
    arguments = [place, *LOOKING, *(f"show {seq}" for seq in (*found[:3], *found[-3:]))]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", READ_ALL, *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
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
            run_actor(
                nats_server.url,
                bus.run,
                ActorConfig(reward="digits", generate_timeout_s=60.0),
                bus.config,
                draining,
                "a1",
            )
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


async def test_engine_router_and_scorer_outlast_rows_that_cannot_be_read(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    model = await asyncio.to_thread(lambda: (prompt_tokens(), model_dir())[1])
    async with open_bus(lease_s=5.0) as bus, AsyncExitStack() as stack:
        hostile, draining = Hostile(nats_server.url, bus.run, 4), asyncio.Event()

        async def spoil(count: int) -> None:
            await hostile.write(count, hostile.rows_of_the_learner, unreadable=True)

        await spoil(200)
        await hostile.write(50, hostile.rows_of_others)
        places = EnginePlaces(run=bus.run, bus_url=nats_server.url, bus=bus.config, model_dir=model, id="e1")
        limits = EngineLimits(grace_s=0.1, catch_up_s=60.0)
        works = (
            run_engine(places, EngineConfig(max_running=32), draining, factory=BuiltinEngine, limits=limits),
            run_router(RouterConfig(), nats_server.url, bus.run, "door", draining, drain_s=5),
            run_scorer(nats_server.url, bus.run, None, None, draining, "s1"),
            run_actor(nats_server.url, bus.run, None, None, draining, "a1"),
        )
        running = [asyncio.create_task(cancellable(work)) for work in works]
        try:
            epoch = await take_over(bus)
            registry = VersionRegistry(bus)
            await stack.enter_async_context(kept_rows(bus))
            await registry.fence(epoch)
            await registry.publish_initial(str(model), epoch)
            tasks = await issue(bus, epoch, 2)
            following = asyncio.create_task(repair_head(bus, epoch, known := {0: 0}))
            stack.callback(following.cancel)
            for _ in range(20):
                await spoil(20)
                await row_until(bus.rows("weights"), "head", lambda row: "version" in row)
                assert not any(one.done() for one in (*running, following)), (running, following)
            while (await registry.row(0)) is None:  # only a spoilt head makes the learner look at the other rows
                await spoil(20)
                await row_until(bus.rows("weights"), "head", lambda row: "version" in row)
            await registry.set_snapshot(0, str(model))  # as a learner does that the engine has requested it from
            await samples_until(bus, complete(tasks))
            version = await registry.publish(await registry.reserve(1, epoch))
            known[version.version] = 1
            await registry.set_snapshot(version.version, str(model))
            await spoil(40)
            await hostile.write(50, hostile.rows_of_others)
            await registry.set_snapshot(version.version, str(model))
            live = bus.rows("live")
            for key in ("engine.e1", "router.door", "actor.a1"):  # a scorer reads hardly any row
                while not ((await live.read(key))[0] or {}).get("unreadable"):
                    await hostile.write(4, hostile.rows_of_others)
                    await asyncio.sleep(0.2)  # these rows are written again every second
            await row_until(live, "scorer.s1", lambda row: row["phase"] == "serving")
            await row_until(
                live, "engine.e1", lambda row: row["phase"] == "serving" and row["version"] == version.version
            )
        finally:
            draining.set()
            ended = await asyncio.gather(*running, return_exceptions=True)
            freeze_again()  # the engine runs in the tests' process here
        assert ended == [None] * len(works)


async def repair_head(bus: Bus, epoch: int, known: dict[int, int]) -> None:
    """Repair the registry as the feeder does, which knows the steps of the versions."""
    registry = VersionRegistry(bus)
    async for _ in bus.rows("weights").watch("head", unreadable=True):
        head = await registry.repaired_head(epoch)
        if head is None or head.version < max(known):
            await registry.restore(known, epoch)


@pytest.mark.parametrize(
    ("key", "want", "cure"),
    [
        ("epoch", "epoch: an integer >= 0", "end every learner of the run, then store"),
        ("checkpoint", "directory: text", "store {"),
    ],
)
@pytest.mark.usefixtures("fork_server")
async def test_a_learner_that_cannot_do_without_a_row_ends_with_one_message(
    nats_server: EmbeddedServer, open_bus: BusOpener, tmp_path: Path, key: str, want: str, cure: str
) -> None:
    """It also restores the key of its engines, from its own file, in the place of an unreadable one."""
    files, config = Prepared.in_((await asyncio.to_thread(model_dir)).parent), tmp_path / "run.yaml"
    (tmp_path / "auth").mkdir()
    (tmp_path / "auth/admin-key").write_text(f"{KEY}\n")
    async with open_bus() as bus:
        sections = {
            "model": {"path": str(files.model)},
            "data": {"path": str(files.prompts)},
            "sampling": {"max_new_tokens": 6},
        }
        config.write_text(
            json.dumps({"run": bus.run, "directory": str(tmp_path), "actor": {"reward": "digits"}, **sections})
        )
        for place in (f"run.{key}", "keys.admin", "run.api_key", "run.config", "weights.head"):
            await bus.js.publish(f"$KV.TM_{bus.run}_{place}", b"{}" if place != "weights.head" else b"junk")
        ended = await asyncio.to_thread(run_tidemill, "learner", "--config", str(config), "--bus", nats_server.url)
        assert ended.returncode == exit_codes.CONFIG, ended.output[-3000:]
        last = ended.errors.splitlines()[-1]
        assert (
            last.startswith(f"error: row run.{key}, revision ") and f"want {want}, got 'nothing'; cure: {cure}" in last
        ), last
        assert "Traceback" not in ended.output, ended.output[-3000:]
        assert sum(line.startswith(exit_codes.LINE) for line in ended.errors.splitlines()) == 1, ended.errors
        assert await admin_keys(bus).known() == Keys.of(KEY)
        assert await api_keys(bus).known() == Keys(api=Keys.of(KEY).api)
        assert (await bus.rows("run").read("config"))[0]


async def test_keys_that_cannot_be_read_are_made_anew_and_known_ones_stay(open_bus: BusOpener) -> None:
    async with open_bus() as bus:

        async def spoil(*places: str) -> None:
            for place in places:
                await bus.js.publish(f"$KV.TM_{bus.run}_{place}", b'{"key": "two\\nlines"}')

        await spoil("keys.admin", "run.api_key")
        late, engine_keys = admin_keys(bus), admin_keys(bus)
        with refusal(UnreadableRow, field=re.compile(r"\bkeys\.admin$"), got="another value"):
            await late.known()  # the engine answers that the keys are not known
        made = await make_keys(bus)
        assert await engine_keys.known() == made == await make_keys(bus, last="another")
        await spoil("keys.admin", "run.api_key")
        assert await engine_keys.known() == made
        assert await engine_keys.headers() == made.headers
        assert await make_keys(bus, last=made.admin) == made
        assert bus.refusals.counts == {"keys": 2, "run": 2}, "once each"
        assert "lines" not in bus.refusals.newest
        await bus.js.publish(f"$KV.TM_{bus.run}_keys.admin", b"", headers={"KV-Operation": "DEL"})
        assert await make_keys(bus, last=made.admin) == made
