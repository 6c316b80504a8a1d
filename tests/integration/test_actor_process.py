"""An actor as a process: killed in the middle of a group, drained, and stopped at the deadline."""

from collections import Counter

import pytest

from tests.actor_kit import (
    actor_process,
    all_samples,
    at_work,
    complete,
    engine,
    issue,
    model_dir,
    paused,
    prompt_tokens,
    row_until,
    samples_until,
    settled,
    take_over,
)
from tests.bus_fixtures import BusOpener
from tidemill.actors.config import ActorConfig
from tidemill.bus import exit_codes
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.wire.messages import Sampling, Status

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    """Make the model here, where it blocks no event loop."""
    model_dir()
    prompt_tokens()


async def test_an_actor_killed_within_a_group_loses_nothing(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    """Two of four samples are stored when it dies; after the lease another actor makes all four, and the stored two
    count once.
    """
    half = ActorConfig(reward="tests.actor_child:answers_twice", reward_timeout_s=60)
    async with open_bus(lease_s=6.5) as bus, engine(bus):  # the actors renew their leases much earlier
        tasks = await issue(bus, await take_over(bus))
        async with actor_process(nats_server.url, bus.run, half, id="first", lease_s=1.5) as first:
            await samples_until(bus, lambda found: len(found) == 2)
            first.kill()
            await first.exit_code()
        assert await bus.tasks.backlog() == (0, 1), "still leased by the dead"
        async with actor_process(nats_server.url, bus.run, ActorConfig(reward="digits"), id="second", lease_s=4.0):
            found = await samples_until(bus, complete(tasks))
            await settled(bus)
        found = await all_samples(bus)
        by_actor = {name: {s.index: s for s in found if s.actor == name} for name in ("first", "second")}
        assert (len(by_actor["first"]), sorted(by_actor["second"])) == (2, [0, 1, 2, 3])
        assert len({s.message_id for s in found}) == len(found) == 6
        assert len({s.attempt for s in found}) == 2, "one attempt a lease"
        for index, sample in by_actor["first"].items():
            assert sample.tokens.tolist() == by_actor["second"][index].tokens.tolist(), (
                "the same seed: the same response"
            )
        assert [letter async for letter in bus.dead.scan()] == []


async def test_a_drained_actor_finishes_its_tasks_takes_no_more_and_exits_0(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus, engine(bus) as built, paused(built) as client:
        tasks = await issue(bus, await take_over(bus), 5, sampling=Sampling(max_new_tokens=100, seed=7))
        config = ActorConfig(reward="digits", max_samples_in_flight=8, drain_finish_s=60.0)
        async with actor_process(nats_server.url, bus.run, config, id="a1", drain_s=120.0) as actor:
            await at_work(built, 8)
            actor.terminate()
            row = await row_until(bus.rows("live"), "actor.a1", lambda row: row["phase"] == "draining")
            assert row["waits_for"] == "8 samples"
            await client.resume()
            assert await actor.exit_code() == 0
        found = await all_samples(bus)
        assert Counter((s.task, s.index) for s in found) == {
            (task, index): 1 for task in tasks[:2] for index in range(4)
        }
        assert {s.status for s in found} <= {Status.COMPLETED, Status.TRUNCATED}
        others = [await bus.tasks.lease(60) for _ in range(3)]
        assert {lease.task.id for lease in others if lease is not None} == set(tasks[2:])
        assert await bus.rows("live").get("actor.a1") is None


async def test_an_actor_not_drained_in_time_returns_its_tasks_and_exits_75(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus, engine(bus) as built, paused(built):
        (task,) = await issue(bus, await take_over(bus))
        async with actor_process(nats_server.url, bus.run, ActorConfig(reward="digits"), id="a1", drain_s=0.2) as actor:
            await at_work(built, 4)
            actor.terminate()
            assert await actor.exit_code() == 75
        lease = await bus.tasks.lease(60)
        assert lease is not None
        assert lease.task.id == task, "at once, not after the lease"
        assert lease.deliveries >= 2
        await at_work(built, 0)


async def test_a_wrong_reward_ends_the_actor_for_good(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus:
        async with actor_process(nats_server.url, bus.run, ActorConfig(reward="digit"), id="a1") as actor:
            assert await actor.exit_code() == exit_codes.CONFIG


async def test_an_actor_refused_by_the_learner_ends_with_the_reason(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """A refusal from before its start was for another process of the same name."""
    async with open_bus() as bus, engine(bus):
        refused = bus.rows("run")
        await refused.put("refused.a1", {"actor": "a1", "invalid": 64, "reason": "spans: of yesterday"})
        async with actor_process(nats_server.url, bus.run, ActorConfig(reward="digits"), id="a1") as actor:
            await row_until(
                bus.rows("live"), "actor.a1", lambda row: row["phase"] == "waiting" and "a task" in row["waits_for"]
            )
            (task,) = await issue(bus, await take_over(bus))
            await samples_until(bus, complete([task]))
            await settled(bus)
            await refused.put("refused.a1", {"actor": "a1", "invalid": 128, "reason": "spans: of today"})
            assert await actor.exit_code() == 1
            assert (
                "actor a1: refused by the learner: 128 invalid samples in a row, the last one: spans: of today"
                in actor.log
            )
