"""An actor is drained in the middle of long responses: the next one continues from there, and no token is made
twice.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from tests.actor_kit import (
    actor_process,
    all_samples,
    at_work,
    complete,
    engine,
    engine_row,
    issue,
    model_dir,
    prompt_tokens,
    row_until,
    samples_until,
    settled,
    take_over,
)
from tests.bus_fixtures import BusOpener
from tidemill.actors.actor.process import run_actor
from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.engines.port import Generation
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Sample, Sampling

pytestmark = pytest.mark.usefixtures("fork_server")

SEED, LONG, GROUP = 40, 200, 4
LEASE_S = 5.0
"""Lease time of tests in which an actor is killed and its lease must run out."""


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    """Make the model here, where it blocks no event loop."""
    model_dir()
    prompt_tokens()


async def undisturbed(built: BuiltinEngine, sampling: Sampling) -> list[Generation]:
    """Return the generation of each index without interruptions."""
    client = HttpEngine(built.url)
    try:
        seeds = [SEED + index for index in range(GROUP)]
        return [await client.generate(prompt_tokens(), replace(sampling, seed=seed)) for seed in seeds]
    finally:
        await client.close()


async def one_ends_early(built: BuiltinEngine) -> Sampling:
    """Sampling under which exactly one response of the group stops within 20 tokens, and the others go on for 60 or
    more.
    """
    whole = await undisturbed(built, Sampling(max_new_tokens=LONG))
    for first in whole:
        others = [other.tokens[:60].tolist() for other in whole if other is not first]
        for token in first.tokens[:20].tolist():
            if all(token not in other and len(other) == 60 for other in others):
                return Sampling(max_new_tokens=LONG, seed=SEED, stop_token_ids=(token,))
    raise AssertionError("no such token: take another SEED")


async def pause(built: BuiltinEngine) -> None:
    await asyncio.wrap_future(built.scheduler.pause("in_place"))


@asynccontextmanager
async def half_done(built: BuiltinEngine, requests: int = GROUP, each: int = 20) -> AsyncIterator[None]:
    """Enter when that many requests are at the engine and have about ``each`` tokens; until the exit they get no more.

    The engine is paused since before the actor asked: it might have answered by now.
    """
    scheduler = built.scheduler
    assert scheduler.paused
    enough = scheduler.counters.tokens_generated + each * requests
    await at_work(built, requests)
    while scheduler.counters.tokens_generated < enough:
        await asyncio.wrap_future(scheduler.call(scheduler._step))
    yield
    if scheduler.alive:
        await asyncio.wrap_future(scheduler.resume())


def assert_undisturbed(found: Sequence[Sample], whole: Sequence[Generation]) -> None:
    for sample in found:
        check_sample(sample)
        want = whole[sample.index]
        assert sample.tokens.tolist() == [*prompt_tokens(), *want.tokens.tolist()]
        np.testing.assert_allclose(sample.rollout_log_probs, want.log_probs, atol=1e-4)
        assert (sample.spans, sample.response, sample.finish_reason) == (want.spans, want.text, want.finish)


@pytest.mark.parametrize("join", [False, True])
async def test_the_next_actor_continues_and_no_token_is_generated_twice(
    open_bus: BusOpener, nats_server: EmbeddedServer, join: bool
) -> None:
    """The next actor waits for a task already: it must find everything when the task is returned to the queue."""
    async with open_bus() as bus, engine(bus) as built:
        sampling = await one_ends_early(built)
        whole = await undisturbed(built, sampling)
        tasks = await issue(bus, await take_over(bus), group_size=GROUP, sampling=sampling)
        before = built.scheduler.counters.tokens_generated
        draining, second_draining = asyncio.Event(), asyncio.Event()
        config = ActorConfig(reward="digits", drain_finish_s=0.0, join_requests=join)
        await pause(built)
        first = asyncio.create_task(run_actor(nats_server.url, bus.run, config, bus.config, draining, "first"))
        async with half_done(built):
            second = asyncio.create_task(
                run_actor(nats_server.url, bus.run, config, bus.config, second_draining, "second")
            )
            await row_until(bus.rows("live"), "actor.second", lambda row: "a task" in row["waits_for"])
            draining.set()
            await first
            left = await bus.partials.of(tasks[0])
        assert sorted(left) == list(range(GROUP))
        done = [partial for partial in left.values() if partial.sample_seq]
        assert [len(whole[partial.index].tokens) <= 20 for partial in done] == [True]
        assert (await bus.samples.fetch(done[0].sample_seq)).index == done[0].index
        for partial in left.values():
            assert partial.tokens.tolist() == whole[partial.index].tokens[: len(partial.tokens)].tolist()
            assert (partial.actor, partial.attempt) == ("first", left[0].attempt)
        await samples_until(bus, complete(tasks, GROUP))
        await settled(bus)
        row = await row_until(bus.rows("live"), "actor.second", lambda row: row["load"].get("tasks_done") == 1)
        second_draining.set()
        await second
        found = await all_samples(bus)
        assert Counter(sample.index for sample in found) == dict.fromkeys(range(GROUP), 1)
        assert {s.actor: s.index for s in found}["first"] == done[0].index
        assert_undisturbed(found, whole)
        assert built.scheduler.counters.tokens_generated - before == sum(len(each.tokens) for each in whole)
        assert (row["load"]["samples_found"], row["load"]["partials_continued"], row["load"]["samples_published"]) == (
            1,
            3,
            3,
        )


async def test_a_response_may_be_continued_by_several_actors(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    """Real processes are drained by SIGTERM; each exits with 0."""
    async with open_bus() as bus, engine(bus) as built:
        sampling = Sampling(max_new_tokens=LONG, seed=SEED, stop=("never said",))
        whole = await undisturbed(built, sampling)
        before = built.scheduler.counters.tokens_generated
        tasks = await issue(bus, await take_over(bus), group_size=GROUP, sampling=sampling)
        unfinished, had = GROUP, 0
        for turn in range(3):
            config = ActorConfig(reward="digits", drain_finish_s=0.0)
            await pause(built)
            async with actor_process(nats_server.url, bus.run, config, id=f"a{turn}") as actor:
                async with half_done(built, unfinished, each=10):
                    actor.terminate()
                    assert await actor.exit_code() == 0
            lengths = [
                len(partial.tokens) for partial in (await bus.partials.of(tasks[0])).values() if not partial.sample_seq
            ]
            assert min(lengths) > had, "everyone went on"
            unfinished, had = len(lengths), max(lengths)
        async with actor_process(nats_server.url, bus.run, ActorConfig(reward="digits"), id="last"):
            await samples_until(bus, complete(tasks, GROUP))
            await settled(bus)
        assert_undisturbed(await all_samples(bus), whole)
        assert built.scheduler.counters.tokens_generated - before == sum(len(each.tokens) for each in whole)


async def test_an_actor_killed_while_it_continues_loses_nothing(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """kill -9 leaves no partials of the second actor; those of the first are still there, and the third continues from
    them.
    """
    async with open_bus(lease_s=LEASE_S) as bus, engine(bus) as built:
        sampling = await one_ends_early(built)
        whole = await undisturbed(built, sampling)
        tasks = await issue(bus, await take_over(bus), group_size=GROUP, sampling=sampling)
        config = ActorConfig(reward="digits", drain_finish_s=0.0)
        await pause(built)
        async with (
            actor_process(nats_server.url, bus.run, config, id="drained", lease_s=LEASE_S) as drained,
            half_done(built),
        ):
            drained.terminate()
            assert await drained.exit_code() == 0
        left = await bus.partials.of(tasks[0])
        await pause(built)
        async with actor_process(nats_server.url, bus.run, config, id="killed", lease_s=LEASE_S) as killed:
            async with half_done(built, GROUP - 1, each=10):
                killed.kill()
                await killed.exit_code()
        await at_work(built, 0)
        assert {index: each.attempt for index, each in (await bus.partials.of(tasks[0])).items()} == dict.fromkeys(
            left, left[0].attempt
        )
        before = built.scheduler.counters.tokens_generated
        async with actor_process(nats_server.url, bus.run, config, id="last", lease_s=LEASE_S):
            await samples_until(bus, complete(tasks, GROUP))
            await settled(bus)
        found = await all_samples(bus)
        assert Counter(sample.actor for sample in found) == {"drained": 1, "last": GROUP - 1}
        assert_undisturbed(found, whole)
        missing = sum(
            len(each.tokens) - len(left[index].tokens) for index, each in enumerate(whole) if not left[index].sample_seq
        )
        assert built.scheduler.counters.tokens_generated - before == missing


async def test_a_response_broken_off_is_continued_at_another_engine(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus, engine(bus, id="second", phase="joining") as second:
        sampling = Sampling(max_new_tokens=LONG, seed=SEED)
        second.phase = "serving"
        whole = await undisturbed(second, sampling)
        before = second.scheduler.counters.tokens_generated
        draining = asyncio.Event()
        async with engine() as first, HeartbeatPublisher(bus, engine_row(first.url, id="first"), every_s=0.2):
            tasks = await issue(bus, await take_over(bus), group_size=GROUP, sampling=sampling)
            config = ActorConfig(reward="digits", engines=(first.url, second.url))
            second.phase = "stale"
            await pause(first)
            work = asyncio.create_task(run_actor(nats_server.url, bus.run, config, bus.config, draining, "a1"))
            async with half_done(first):
                await first.close()
            made = first.scheduler.counters.tokens_generated
            second.phase = "serving"
        await samples_until(bus, complete(tasks, GROUP))
        await settled(bus)
        draining.set()
        await work
        assert_undisturbed(await all_samples(bus), whole)
        assert made + second.scheduler.counters.tokens_generated - before == sum(len(each.tokens) for each in whole)


async def test_an_actor_without_partials_finishes_every_response(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus, engine(bus) as built:
        tasks = await issue(
            bus, await take_over(bus), group_size=GROUP, sampling=Sampling(max_new_tokens=LONG, seed=SEED)
        )
        config, draining = ActorConfig(reward="digits", partials=False, drain_finish_s=0.0), asyncio.Event()
        await pause(built)
        work = asyncio.create_task(run_actor(nats_server.url, bus.run, config, bus.config, draining, "a1"))
        async with half_done(built):
            draining.set()
            await row_until(bus.rows("live"), "actor.a1", lambda row: row["phase"] == "draining")
        await work
        assert complete(tasks, GROUP)(await all_samples(bus))
        assert await bus.partials.of(tasks[0]) == {}
