"""The actor against the real bus and the real built-in engine: its samples, and its behaviour on failures."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tests.actor_kit import (
    LABEL,
    PROMPT,
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
from tests.waits import turn
from tidemill.actors.actor import loop
from tidemill.actors.actor.process import run_actor
from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Kind, Sampling, Status


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    """Make the model here, where it blocks no event loop."""
    model_dir()
    prompt_tokens()


@asynccontextmanager
async def acting(bus: Bus, server: EmbeddedServer, id: str = "a1", **settings: Any) -> AsyncIterator[asyncio.Event]:
    """Run an actor in this process; it is drained at the end and must end by that."""
    draining = asyncio.Event()
    config = ActorConfig(**{"reward": "digits", "generate_timeout_s": 60.0, **settings})
    work = asyncio.create_task(run_actor(server.url, bus.run, config, bus.config, draining, id))
    try:
        yield draining
    except BaseException:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise
    draining.set()
    await work


@pytest.mark.parametrize("join", [False, True])
async def test_tasks_become_samples_with_everything_in_them(
    open_bus: BusOpener, nats_server: EmbeddedServer, join: bool
) -> None:
    async with open_bus() as bus, engine(bus, version=3):
        epoch = await take_over(bus)
        tasks = await issue(bus, epoch, 3, metadata={"topic": "digits"})
        (evaluation,) = await issue(bus, epoch, kind=Kind.EVAL)
        async with acting(bus, nats_server, join_requests=join):
            found = await samples_until(bus, complete([*tasks, evaluation]))
            await settled(bus)
        assert Counter((s.task, s.index) for s in found) == {
            (task, index): 1 for task in [*tasks, evaluation] for index in range(4)
        }
        for sample in found:
            assert sample.kind == (Kind.EVAL if sample.task == evaluation else Kind.TRAIN)
            assert tuple(sample.tokens[: -sample.response_length]) == prompt_tokens()
            assert (sample.prompt, sample.label) == (PROMPT, LABEL)
            assert sample.metadata == ({} if sample.task == evaluation else {"topic": "digits"})
            assert [span.version for span in sample.spans] == [3]
            assert (sample.actor, sample.engine) == ("a1", "e1")
            assert 0 < sample.response_length <= 8
            assert (sample.status is Status.TRUNCATED) == (sample.finish_reason == "length")
            assert 0 <= sample.score <= 1
            assert sample.timings.generating_s > 0
            assert np.all(sample.rollout_log_probs < 0)
        by_index = {s.index: s.tokens.tolist() for s in found if s.task == tasks[0]}
        assert len({tuple(tokens) for tokens in by_index.values()}) > 1, "every sample of a group has its own seed"
        for sample in found:
            assert sample.tokens.tolist() == by_index[sample.index], "seed + index decides"


async def test_the_live_row_has_the_counters_and_is_removed_at_the_end(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus, engine(bus):
        rows = bus.rows("live")
        async with acting(bus, nats_server):
            idle = await row_until(rows, "actor.a1", lambda row: "a task" in row["waits_for"])
            assert idle["phase"] == "waiting"
            assert idle["load"]["waiting_share"] == 1.0
            await issue(bus, await take_over(bus), 2)
            row = await row_until(rows, "actor.a1", lambda row: row["load"].get("tasks_done") == 2)
        load = row["load"]
        assert load["samples_published"] == 8
        assert load["tokens_generated"] == sum(s.response_length for s in await all_samples(bus))
        assert (load["failures"], load["requests_aborted"], load["in_flight"]) == (0, 0, 0)
        assert 0 < load["waiting_share"] < 1
        assert await rows.get("actor.a1") is None


async def test_a_new_task_is_worked_on_at_once(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus, engine(bus), acting(bus, nats_server):
        await row_until(bus.rows("live"), "actor.a1", lambda row: "a task" in row["waits_for"])
        writer = await take_over(bus)
        tasks: list[int] = []
        taken_s: list[float] = []
        while len(taken_s) < 30 and (
            not taken_s or min(taken_s) >= 0.9
        ):  # a busy machine may delay all but one of them
            begin = time.monotonic()
            tasks += await issue(bus, writer)
            await samples_until(bus, complete(tasks))
            taken_s.append(time.monotonic() - begin)
        assert min(taken_s) < 0.9, taken_s


async def test_no_more_is_leased_than_can_be_in_flight(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus, engine(bus, phase="joining") as waiting:
        tasks = await issue(bus, await take_over(bus), 6)
        async with acting(bus, nats_server, max_samples_in_flight=8, engines=(waiting.url,)):
            await row_until(bus.rows("live"), "actor.a1", lambda row: row["load"].get("in_flight") == 8)
            others = [await bus.tasks.lease(60) for _ in range(4)]
            assert {lease.task.id for lease in others if lease is not None} == set(tasks[2:])
            for lease in others:
                assert lease is not None and await lease.nak()
            waiting.phase = "serving"
            await samples_until(bus, complete(tasks))
            await settled(bus)


async def test_an_engine_that_does_not_serve_is_waited_for_and_named(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus, acting(bus, nats_server):
        tasks = await issue(bus, await take_over(bus))
        rows = bus.rows("live")
        row = await row_until(rows, "actor.a1", lambda row: "none known" in row["waits_for"])
        assert row["phase"] == "waiting"
        async with engine() as built:
            async with HeartbeatPublisher(bus, engine_row(built.url, phase="catching up"), every_s=0.2) as heartbeat:
                await row_until(rows, "actor.a1", lambda row: "e1: catching up" in row["waits_for"])
                heartbeat.update(phase="serving")
                await samples_until(bus, complete(tasks))
                await settled(bus)
        assert {s.status for s in await all_samples(bus)} <= {Status.COMPLETED, Status.TRUNCATED}


async def test_an_engine_that_answers_503_is_quarantined_and_tried_again(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """The engine's row has the phase serving, but its answer is 503: as between an eviction and the next heartbeat."""
    async with open_bus() as bus, engine(bus) as built:
        built.phase = "stale"
        async with acting(bus, nats_server):
            tasks = await issue(bus, await take_over(bus))
            await row_until(bus.rows("live"), "actor.a1", lambda row: "e1: quarantined" in row["waits_for"])
            built.phase = "serving"
            await samples_until(bus, complete(tasks))
            await settled(bus)
        assert len(await all_samples(bus)) == 4


async def test_a_minimum_version_is_waited_for(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus, engine(version=1) as old, engine(version=2) as new, acting(bus, nats_server):
        async with HeartbeatPublisher(bus, engine_row(old.url, id="old", version=1), every_s=0.2):
            tasks = await issue(bus, await take_over(bus), min_version=2)
            await row_until(
                bus.rows("live"), "actor.a1", lambda row: "version 2 or newer (old: version 1)" in row["waits_for"]
            )
            async with HeartbeatPublisher(bus, engine_row(new.url, id="new", version=2), every_s=0.2):
                found = await samples_until(bus, complete(tasks))
                await settled(bus)
        assert {(s.engine, s.min_version) for s in found} == {("new", 2)}


async def test_an_engine_that_dies_in_the_middle_loses_nothing(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus, engine(bus, id="second") as second, AsyncExitStack() as first_life:
        first = await first_life.enter_async_context(engine())
        await first_life.enter_async_context(HeartbeatPublisher(bus, engine_row(first.url, id="first"), every_s=0.2))
        clients = [HttpEngine(built.url) for built in (first, second)]
        for client, row in zip(clients, ("engine.first", "engine.second"), strict=True):
            await client.pause()
            await row_until(bus.rows("live"), row, lambda row: True)
        async with acting(bus, nats_server):
            tasks = await issue(bus, await take_over(bus), sampling=Sampling(max_new_tokens=200, seed=1))
            await at_work(first, 2)
            await clients[0].close()
            await first_life.aclose()
            await clients[1].resume()
            found = await samples_until(bus, complete(tasks))
            await settled(bus)
            await clients[1].close()
            row = await row_until(bus.rows("live"), "actor.a1", lambda row: row["load"].get("tasks_done") == 1)
        assert {s.engine for s in found} == {"second"}
        assert row["load"]["requests_aborted"] == 2
        assert row["load"]["failures"] == 0


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("hangs", "no result within 0.1 s"),
        ("raises", "the judge answered 500"),
        ("overflows", "within +-1e+06, got 1e+39"),
        ("nan", "within +-1e+06, got nan"),
    ],
)
async def test_a_task_without_a_usable_reward_becomes_dead_and_the_run_goes_on(
    open_bus: BusOpener, nats_server: EmbeddedServer, reward: str, reason: str
) -> None:
    async with open_bus(max_attempts=2) as bus, engine(bus):
        tasks = await issue(bus, await take_over(bus), group_size=2)
        async with acting(
            bus,
            nats_server,
            reward=f"tests.child_rewards:{reward}",
            reward_timeout_s=0.1 if reward == "hangs" else 60.0,
        ):
            row = await row_until(bus.rows("live"), "actor.a1", lambda row: row["load"].get("failures") == 4)
            await settled(bus)
        said = row["trouble"].removeprefix(f"4 of 4 samples failed, the last: reward 'tests.child_rewards:{reward}': ")
        assert reason in said
        dead = [letter async for _, letter in bus.dead.scan()]
        assert [(letter.task, letter.attempts, letter.actor) for letter in dead] == [(tasks[0], 2, "a1")]
        assert reason in dead[0].reason
        found = await all_samples(bus)
        assert len(found) == 4
        for sample in found:
            assert sample.status is Status.FAILED
            assert reason in sample.metadata["error"]
            assert sample.response_length > 0, "what was generated stays"


async def test_an_actor_whose_tasks_all_fail_pauses_and_drains_at_once(
    open_bus: BusOpener, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(loop, "MAX_PAUSE_S", 1000.0)
    async with open_bus(max_attempts=1) as bus, engine(bus):
        await issue(bus, await take_over(bus), 40, group_size=1)
        async with acting(bus, nats_server, reward="tests.child_rewards:raises", max_samples_in_flight=2):
            row = await row_until(bus.rows("live"), "actor.a1", lambda row: "tasks failed" in row["waits_for"])
        assert row["waits_for"].startswith("the end of a pause: the last ")
        dead = [letter async for _, letter in bus.dead.scan()]
        assert loop.FAILURES_IN_A_ROW <= len(dead) <= loop.FAILURES_IN_A_ROW + 3


async def test_failures_of_one_queue_and_of_few_prompts_do_not_stop_the_others(
    open_bus: BusOpener, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(loop, "MAX_PAUSE_S", 1000.0)
    async with open_bus(max_attempts=4) as bus, engine(bus):
        epoch = await take_over(bus)
        away, there = {"metadata": {"reward": "away"}}, {"metadata": {"reward": "there"}}
        await issue(bus, epoch, 12, group_size=1, kind=Kind.EVAL, **away)
        parts = {
            "away": {"reward": "tests.child_rewards:raises", "when": away["metadata"]},
            "there": {"reward": "tests.child_rewards:of_label", "when": there["metadata"]},
        }
        async with acting(bus, nats_server, reward="", reward_parts=parts, max_samples_in_flight=2):
            await row_until(bus.rows("live"), "actor.a1", lambda row: "tasks failed" in row["waits_for"])
            few = await issue(
                bus, epoch, loop.FAILURES_IN_A_ROW - 1, group_size=1, **away
            )  # each of them is tried four times
            good = await issue(bus, epoch, 2, group_size=1, label=1.0, **there)
            found = await samples_until(
                bus, lambda found: {s.task for s in found if s.status is not Status.FAILED} >= set(good)
            )
        assert {s.task for s in found if s.status is Status.FAILED} >= set(few)


async def test_rows_that_a_reward_fails_on_do_not_slow_the_others(
    open_bus: BusOpener, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(loop, "MAX_PAUSE_S", 1000.0)
    async with open_bus(max_attempts=1) as bus, engine(bus):
        epoch = await take_over(bus)
        failing = await issue(bus, epoch, 3 * loop.FAILURES_IN_A_ROW, group_size=1, label="no number")
        good = await issue(bus, epoch, 3, group_size=1, label=1.0)
        async with acting(bus, nats_server, reward="tests.child_rewards:of_label", max_samples_in_flight=2):
            # In any order: with two in flight one of them may take as long as all the others.
            await samples_until(
                bus,
                lambda found: (
                    complete(good, 1)(found) and {s.task for s in found if s.status is Status.FAILED} == set(failing)
                ),
            )


async def test_a_request_no_engine_can_serve_is_dead_at_once(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus(max_attempts=2) as bus, engine(bus):
        epoch = await take_over(bus)
        bad, *_ = await issue(bus, epoch, sampling=Sampling(max_new_tokens=8, top_p=7.0))
        good = await issue(bus, epoch)
        async with acting(bus, nats_server):
            found = await samples_until(bus, complete(good))
            await settled(bus)
        dead = [letter async for _, letter in bus.dead.scan()]
        assert [letter.task for letter in dead] == [bad]
        assert "top_p" in dead[0].reason
        assert {s.status for s in await all_samples(bus) if s.task == bad} == {Status.FAILED}
        assert complete(good)(found)


async def test_a_restart_of_the_bus_is_bridged(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus(lease_s=60.0) as bus, engine(bus) as built, acting(bus, nats_server):
        epoch = await take_over(bus)
        client = HttpEngine(built.url)
        await client.pause()
        before = await issue(bus, epoch, 2)
        await at_work(built, 8)
        await asyncio.to_thread(nats_server.kill)
        await client.resume()
        await client.close()
        await at_work(built, 0)
        await asyncio.to_thread(nats_server.start)
        after = await issue(bus, epoch, 2)
        found = await samples_until(bus, complete([*before, *after]))
        assert len({s.message_id for s in found}) == len(found)


async def test_a_drain_returns_tasks_that_wait_for_an_engine(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus:
        tasks = await issue(bus, await take_over(bus))
        async with acting(bus, nats_server):
            await row_until(bus.rows("live"), "actor.a1", lambda row: "an engine" in row["waits_for"])
        lease = await bus.tasks.lease(60)
        assert lease is not None
        assert lease.task.id == tasks[0]
        assert lease.deliveries >= 2, "a lease that was being waited for may have met it once more on its way"


async def test_leased_tasks_are_returned_at_the_deadline(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus, engine(bus) as built:
        client = HttpEngine(built.url)
        await client.pause()
        await issue(bus, await take_over(bus))
        work = asyncio.create_task(
            run_actor(nats_server.url, bus.run, ActorConfig(reward="digits"), bus.config, asyncio.Event(), "a1")
        )
        await at_work(built, 4)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        lease = await bus.tasks.lease(60)
        assert lease is not None
        assert lease.deliveries >= 2
        await at_work(built, 0)  # the requests were aborted at the engine, too
        await client.close()


async def test_an_actor_needs_only_the_url_of_the_bus(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus, engine(bus):
        draining = asyncio.Event()
        work = asyncio.create_task(run_actor(nats_server.url, bus.run, None, None, draining))
        told = {
            "actor": {"reward": "exact", "engines": []},
            "bus": {"lease_s": bus.config.lease_s},
            "learner": {"steps": 3},
        }
        await bus.rows("run").put("config", told)
        tasks = await issue(bus, await take_over(bus))
        found = await samples_until(bus, complete(tasks))
        await settled(bus)
        assert {s.score for s in found} == {0.0}
        draining.set()
        await work


async def test_an_actor_that_waits_for_the_bus_can_be_drained(tmp_path: Any) -> None:
    draining = asyncio.Event()
    work = asyncio.create_task(
        run_actor("nats://127.0.0.1:9", "r", ActorConfig(reward="digits"), BusConfig(), draining, "a1")
    )
    await turn()
    draining.set()
    await work
