"""The steps that docs/wire.md requires of an actor, for the JavaScript one: real nats-server, real engine, a scripted
learner.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.actor_kit import (
    LABEL,
    all_samples,
    at_work,
    complete,
    engine,
    engine_row,
    issue,
    paused,
    prompt_tokens,
    row_until,
    samples_until,
    settled,
    take_over,
)
from tests.bus_fixtures import BusOpener
from tests.js_kit import installed, js_actor
from tests.waits import until
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.readers import History
from tidemill.bus.wire.codec import encode_task
from tidemill.bus.wire.messages import Dead, Sample, Sampling, Status, Task
from tidemill.rewards.builtin.text import exact
from tidemill.rewards.port import RewardRequest

CONFIG = {
    "bus": {"lease_s": 2.0, "max_attempts": 3},
    "actor": {"reward": "exact", "max_samples_in_flight": 16, "generate_timeout_s": 60.0, "retries": 3},
}


@pytest.fixture(scope="module")
def js(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompt_tokens()  # makes the model, which takes seconds, outside of any event loop
    return installed(tmp_path_factory.mktemp("js"))


def url_of(bus: Bus) -> str:
    assert bus.nc.connected_url is not None
    return bus.nc.connected_url.geturl()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address without a listener; no other process gets this port, and might listen there and never answer."""
    with KeptPort() as port:
        yield f"http://127.0.0.1:{port.number}"


async def dead_until(bus: Bus, count: int) -> list[Dead]:
    found: list[Dead] = []
    async for _, dead in bus.dead.follow():
        assert isinstance(dead, Dead)
        found.append(dead)
        if len(found) == count:
            break
    return found


async def test_tasks_that_cannot_be_done_are_dead_and_the_others_are_done(open_bus: BusOpener, js: Path) -> None:
    """A prompt that the engine refuses gets three failure reports, an invalid task none; neither keeps the actor from
    the next one.
    """
    async with open_bus(lease_s=60.0) as bus, engine(bus), js_actor(js, url_of(bus), bus.run, "js-dead") as actor:
        epoch = await take_over(bus)
        await bus.rows("run").put("config", CONFIG)
        junk = await bus.js.publish(f"tm.{bus.run}.task.train", b"\x80", headers={"Tm-Epoch": str(epoch)})
        too_long = await bus.js.publish(
            f"tm.{bus.run}.task.train", too_long_task(bus, epoch), headers={"Tm-Epoch": str(epoch)}
        )
        good = await _issue_behind(bus, epoch)
        by_task: dict[int, Dead] = {}

        async def all_ended() -> None:
            by_task.update({dead.task: dead for dead in await dead_until(bus, 2)})
            await samples_until(bus, complete([good]))
            await settled(bus)

        await actor.meanwhile(all_ended())
        assert set(by_task) == {junk.seq, too_long.seq}
        assert (by_task[junk.seq].attempts, by_task[junk.seq].prompt) == (1, "")
        assert (by_task[too_long.seq].attempts, by_task[too_long.seq].prompt) == (3, "too long")
        assert "HTTP 400" in by_task[too_long.seq].reason and by_task[too_long.seq].actor == "js-dead"
        reports = await bus.jet.subjects(f"TM_{bus.run}_DEAD", f"tm.{bus.run}.dead.report.*")
        assert reports == {f"tm.{bus.run}.dead.report.{too_long.seq}": 3}
        assert {sample.task for sample in await all_samples(bus)} == {good}


async def test_of_a_run_with_rollouts_it_takes_the_single_turns_alone(open_bus: BusOpener, js: Path) -> None:
    """Tasks of rollouts wait for an actor that has them, and none is dead; one that is on the wrong subject is refused
    by its schema.
    """
    async with (
        open_bus(lease_s=60.0, rollouts=("calc", "game")) as bus,
        engine(bus),
        js_actor(js, url_of(bus), bus.run, "js-plain") as actor,
    ):
        epoch = await take_over(bus)
        await bus.rows("run").put("config", CONFIG)
        [calc], [game] = [await issue(bus, epoch, rollout=name) for name in ("calc", "game")]
        headers = {"Tm-Epoch": str(epoch)}
        misled = (
            await bus.js.publish(f"tm.{bus.run}.task.train", task_of(bus, epoch, rollout="calc"), headers=headers)
        ).seq
        plain = [await _issue_behind(bus, epoch) for _ in range(3)]
        await actor.meanwhile(samples_until(bus, complete(plain)))
        [dead] = await dead_until(bus, 1)
        assert (dead.task, dead.attempts) == (misled, 1) and "want schema 1 and type task, got 2" in dead.reason
        assert {sample.task for sample in await all_samples(bus)} == set(plain)
        for id, name in ((calc, "calc"), (game, "game")):
            lease = await bus.tasks.lease(30, rollout=name)
            assert lease is not None and (lease.task.id, lease.deliveries) == (id, 1), (
                "it was delivered to no other actor"
            )
            await lease.ack()


async def test_settled_and_void_tasks_are_passed_over(open_bus: BusOpener, js: Path) -> None:
    async with open_bus(lease_s=60.0) as bus, engine(bus) as built:
        old = await take_over(bus)
        (below,) = await issue(bus, old)
        await bus.tasks.raise_floor(below)
        (before,) = await issue(bus, old)  # stands before the next fence: valid
        epoch = await take_over(bus)
        void = await bus.js.publish(f"tm.{bus.run}.task.train", task_of(bus, old), headers={"Tm-Epoch": str(old)})
        behind = await _issue_behind(bus, epoch)
        await bus.rows("run").put("config", CONFIG)
        async with js_actor(js, url_of(bus), bus.run, "js-floor") as actor:
            await actor.meanwhile(samples_until(bus, complete([before, behind])))
            await actor.meanwhile(settled(bus))
        assert below < before < void.seq < behind
        samples = await all_samples(bus)
        assert {sample.task for sample in samples} == {before, behind}
        await assert_as_the_engine_tells(built.url, samples)


async def test_a_task_that_finds_no_engine_is_returned_on_drain(open_bus: BusOpener, js: Path) -> None:
    async with open_bus(lease_s=60.0) as bus, engine(bus, version=3):
        epoch = await take_over(bus)
        await bus.rows("run").put("config", CONFIG)
        (done, waits) = await issue(bus, epoch, min_version=3) + await issue(bus, epoch, min_version=4)
        async with js_actor(js, url_of(bus), bus.run, "js-back") as actor:
            load = {"tasks_done": 1, "in_flight": 4}
            await actor.meanwhile(
                row_until(bus.rows("live"), "actor.js-back", lambda row: load.items() <= row["load"].items())
            )
            assert await actor.drain() == 0
        assert {(sample.task, sample.spans[0].version) for sample in await all_samples(bus)} == {(done, 3)}
        lease = await bus.tasks.lease(30)
        assert lease is not None and lease.task.id == waits
        await lease.ack()


async def assert_as_the_engine_tells(url: str, samples: list[Sample]) -> None:
    """Assert that each sample agrees with the engine's answer: the same seeds and the same weights make the same
    response.
    """
    client = HttpEngine(url)
    for sample in samples:
        told = await client.generate(prompt_tokens(), Sampling(max_new_tokens=8, seed=100 + sample.index))
        assert sample.tokens.tolist() == [*prompt_tokens(), *told.tokens.tolist()]
        np.testing.assert_allclose(sample.rollout_log_probs, told.log_probs, atol=1e-5)
        assert (sample.response, sample.spans, sample.finish_reason) == (told.text, told.spans, told.finish)
        assert sample.status is (Status.COMPLETED if told.finish == "stop" else Status.TRUNCATED)
        assert sample.reward == exact(RewardRequest(prompt="", response=told.text, label=LABEL, status=sample.status))
    await client.close()


async def test_a_lease_is_renewed_while_it_is_worked_on(open_bus: BusOpener, js: Path) -> None:
    """The actor's config has a lease of 2 s, so it renews every 0.67 s; the queue grants 7 s, and the task is kept for
    12 renewals.
    """
    async with (
        open_bus(lease_s=7.0) as bus,
        engine(bus) as built,
        js_actor(js, url_of(bus), bus.run, "js-renews") as actor,
    ):
        epoch = await take_over(bus)
        await bus.rows("run").put("config", CONFIG)
        words = await bus.nc.subscribe(f"$JS.ACK.TM_{bus.run}_TASKS.rollout.>")
        async with paused(built) as client:
            tasks = await issue(bus, epoch)
            for _ in range(12):
                assert (await words.next_msg(timeout=60)).data == b"+WPI"
            info = await bus.jet.call(f"CONSUMER.INFO.TM_{bus.run}_TASKS.rollout")
            assert (info["num_ack_pending"], info["num_redelivered"]) == (1, 0)
            await client.resume()
        await actor.meanwhile(samples_until(bus, complete(tasks)))
        await actor.meanwhile(settled(bus))
        assert len(await all_samples(bus)) == 4


async def test_tasks_not_done_in_time_are_returned(open_bus: BusOpener, js: Path) -> None:
    async with open_bus(lease_s=600.0) as bus, engine(bus) as built, paused(built):
        epoch = await take_over(bus)
        await bus.rows("run").put("config", CONFIG)
        async with js_actor(js, url_of(bus), bus.run, "js-late", "--drain-s", "0.5") as actor:
            (task,) = await issue(bus, epoch)
            await actor.meanwhile(at_work(built, 4))
            assert await actor.drain() == 75
        lease = await bus.tasks.lease(60)
        assert lease is not None and (lease.task.id, lease.deliveries) == (task, 2)


async def test_requests_broken_off_by_engines_are_repeated(open_bus: BusOpener, js: Path, nobody: str) -> None:
    """One engine does not exist, the other aborts all four requests once."""
    row = engine_row(nobody, id="e0")
    async with open_bus(lease_s=60.0) as bus, engine(bus) as built, HeartbeatPublisher(bus, row, every_s=0.2):
        epoch = await take_over(bus)
        await bus.rows("run").put("config", CONFIG)
        async with js_actor(js, url_of(bus), bus.run, "js-again") as actor:
            async with paused(built) as client:
                tasks = await issue(bus, epoch)
                await actor.meanwhile(at_work(built, 4))
                await client.abort()
                await actor.meanwhile(aborted(built, 4))
                await actor.meanwhile(at_work(built, 4))
                await client.resume()
            await actor.meanwhile(samples_until(bus, complete(tasks)))
            load = {"tasks_done": 1, "requests_aborted": 4, "failures": 0}
            await actor.meanwhile(
                row_until(bus.rows("live"), "actor.js-again", lambda row: load.items() <= row["load"].items())
            )
        assert {sample.engine for sample in await all_samples(bus)} == {"e1"}
        assert len(await all_samples(bus)) == 4


async def test_a_server_killed_meanwhile_costs_nothing(
    nats_server: EmbeddedServer, open_bus: BusOpener, js: Path
) -> None:
    async with open_bus(lease_s=2.0) as bus, engine(bus):
        epoch = await take_over(bus)
        await bus.rows("run").put("config", CONFIG)
        async with js_actor(js, url_of(bus), bus.run, "js-restart") as actor:
            first = await issue(bus, epoch, 8)
            await actor.meanwhile(samples_until(bus, complete(first[:1])))
            await asyncio.to_thread(nats_server.kill)
            await asyncio.to_thread(nats_server.start)
            tasks = first + await issue(bus, epoch, 8)
            await actor.meanwhile(samples_until(bus, complete(tasks)))
            await actor.meanwhile(settled(bus))
            assert await actor.drain() == 0
            assert await bus.rows("live").get("actor.js-restart") is None


async def test_a_sample_too_large_for_one_message_is_joined(tmp_path: Path, run_id: str, js: Path) -> None:
    config = BusConfig(port=-1, max_payload_bytes=4096, lease_s=60.0)
    with EmbeddedServer(tmp_path / "small", config) as server:
        async with connect(server.url, run_id, config, name="test", wait_s=60) as bus:
            await bus.create_layout()
            async with engine(bus), js_actor(js, server.url, run_id, "js-parts") as actor:
                epoch = await take_over(bus)
                await bus.rows("run").put("config", CONFIG)
                metadata = {"pad": "x" * 2500, "large": 2**60 + 1}
                tasks = await issue(bus, epoch, metadata=metadata, sampling=Sampling(max_new_tokens=64, seed=2**40))
                await actor.meanwhile(samples_until(bus, complete(tasks)))
            manifests = [glimpse async for glimpse in History(bus.jet).glimpses(1, 1 << 40)]
            assert [glimpse.headers.get("Tm-Parts") for glimpse in manifests] == ["2"] * 4
            assert all(
                sample.metadata == metadata and sample.sampling.seed == 2**40 for sample in await all_samples(bus)
            )


async def aborted(built: BuiltinEngine, requests: int) -> None:
    """Return when the engine has aborted this many requests."""
    await until(lambda: built.stats()["requests_aborted"] == requests, every_s=0.005)


async def _issue_behind(bus: Bus, epoch: int) -> int:
    """Publish a task behind messages that the writer of this epoch did not write."""
    return int(
        (await bus.js.publish(f"tm.{bus.run}.task.train", task_of(bus, epoch), headers={"Tm-Epoch": str(epoch)})).seq
    )


def task_of(bus: Bus, epoch: int, *, prompt: str = "482=", tokens: int = 0, rollout: str = "") -> bytes:
    ids = np.array(prompt_tokens(), np.int32) if not tokens else np.ones(tokens, np.int32)
    sampling = Sampling(max_new_tokens=8, seed=100)
    task = Task(
        run=bus.run,
        epoch=epoch,
        prompt=prompt,
        prompt_tokens=ids,
        prompt_epoch=0,
        offset=0,
        group_size=4,
        sampling=sampling,
        label=LABEL,
        rollout=rollout,
    )
    return encode_task(task)


def too_long_task(bus: Bus, epoch: int) -> bytes:
    """Return a task longer than the model's context."""
    return task_of(bus, epoch, prompt="too long", tokens=300)
