"""The feeder on a real nats-server, with scripted actors and ranks that train nothing."""

import asyncio
import dataclasses
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import data_kit
from tests.actor_kit import row_until
from tests.bus_fixtures import BusOpener
from tests.bus_kit import make_partial, make_turns
from tests.data_kit import sample
from tests.feeder_kit import KEYS, World, task_settings
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.client.layout import record_bounds
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import Fenced, StreamReplaced
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect, raise_epoch
from tidemill.bus.streams.readers import Cursors, Reader
from tidemill.bus.wire.messages import Dead, DeadLetterDecision, Done, Plan, Requeue, Sample, Settle, Task
from tidemill.bus.wire.subjects import BUCKETS, bucket_stream, stream
from tidemill.launch.run.audit import audit
from tidemill.launch.run.checkpoint_cursor import read_cursor
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.failures import SLOW_S
from tidemill.learner.buffer.ledger import cursor_of, read_state
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.checkpoints import disk
from tidemill.learner.errors import (
    CheckpointCorrupt,
    ConfigRefused,
    FeederFailed,
    NoCheckpoint,
    NoProgress,
    NothingTrained,
    RankFailed,
    RanksLeft,
    ReplayMismatch,
    RunLost,
    TasksFail,
)
from tidemill.learner.feed import feed_server
from tidemill.learner.feed.data_metrics import SHARE
from tidemill.learner.feed.feed_client import FeedClient
from tidemill.learner.feed.feed_messages import FeedStart
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.history import read_history
from tidemill.learner.feed.outcomes import MAX_DEAD_BYTES, Outcomes
from tidemill.learner.feed.restart import CHECKPOINT_KEY, resume
from tidemill.learner.prompts.prompt_file import PlannedRows, PromptFile
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig
from tidemill.learner.settings.optimizer import OptimizerConfig
from tidemill.weightstore.store.registry import HEAD, VersionRegistry

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
def nats_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """The usual server, with messages of at most 4 KB for the test that needs them small."""
    small = request.node.name == "test_a_step_whose_plan_is_larger_than_a_message_runs_with_fewer_groups"
    with EmbeddedServer(
        tmp_path / "nats", BusConfig(max_payload_bytes=4096) if small else BusConfig(port=-1)
    ) as server:
        yield server


@pytest.fixture
def open_world(nats_server: EmbeddedServer, run_id: str, tmp_path: Path) -> OpenWorld:
    @asynccontextmanager
    async def opened(**changes: Any) -> AsyncIterator[World]:
        staleness = {key: changes.pop(key) for key in list(changes) if key in StalenessConfig.__dataclass_fields__}
        settings = {key: changes.pop(key) for key in list(changes) if key in BusConfig.__dataclass_fields__}
        values: dict[str, Any] = {"steps": 5, "groups_per_step": 2, "group_size": 2, "checkpoint_every": 2}
        learner = LearnerConfig(**(values | {"max_tokens_per_micro_batch": 16} | changes))
        config = BusConfig(**({"lease_s": 5.0} | settings))
        (tmp_path / "checkpoints").mkdir()
        async with connect(nats_server.url, run_id, config, name="test", wait_s=60) as bus:
            await bus.create_layout()
            yield World(
                url=nats_server.url,
                run=run_id,
                bus=bus,
                root=tmp_path / "checkpoints",
                learner=learner,
                staleness=StalenessConfig(**({"max_lag": 1} | staleness)),
                config=config,
            )

    return opened


async def finish(world: World) -> None:
    """Run a feeder and ranks to the end of the run."""
    async with world.feeder() as (url, feeding):
        await asyncio.gather(*(world.train(url, rank=rank) for rank in range(world.learner.data_parallel)))
        await feeding


async def check_history(world: World, *, steps: int = 0) -> list[Plan]:
    """Assert that every step is planned once and done, no sample is in two plans, and a batch is the same each time it
    is served.

    ``steps``: those of a run that has ended early.
    """
    records = await world.records()
    plans = [record for record in records if isinstance(record, Plan)]
    assert [plan.step for plan in plans] == list(range(1, (steps or world.learner.steps) + 1))
    assert {record.step for record in records if isinstance(record, Done)} == {plan.step for plan in plans}
    seqs = [int(seq) for record in records if isinstance(record, Plan | Settle) for seq in record.seqs]
    assert len(seqs) == len(set(seqs))
    assert all(len(found) == 1 for found in world.digests.values()), world.digests
    return plans


async def test_tasks_are_issued_no_faster_than_the_quota_of_the_run(open_world: OpenWorld) -> None:
    """All that a run sends follows from its tasks. A slow machine only makes it slower."""
    rate = 10.0
    async with open_world(tasks_per_s=rate) as world:
        began_s = time.time()
        async with world.actors():
            await finish(world)
        stored_s = [(await world.bus.jet.message(stream(world.run, "TASKS"), task)).stored_s for task in world.taken]
        assert len(stored_s) >= 10
        # One may be delayed by an evaluation, and passes at once behind it.
        assert max(stored_s) - began_s >= (len(stored_s) - 2) / rate
        accounting, _ = await audit(world.bus, read_cursor(world.root))
        assert accounting.balance() and not accounting.lost and not accounting.trained_twice


@pytest.mark.parametrize(("max_lag", "data_parallel"), [(0, 1), (1, 2), (3, 1)])
async def test_five_steps(open_world: OpenWorld, max_lag: int, data_parallel: int) -> None:
    async with open_world(max_lag=max_lag, data_parallel=data_parallel) as world:
        async with world.actors():
            await finish(world)
        plans = await check_history(world)
        lags = [int(part.lag_T.max(initial=-1)) for batch in world.batches for part in batch.micro_batches]
        assert max(lags) <= max_lag
        row = await world.bus.rows("run").get(CHECKPOINT_KEY)
        assert row is not None
        assert (row[0]["step"], row[0]["chain"]) == (5, plans[-1].chain)
        tally = read_state(disk.read_state(Path(row[0]["directory"])))["tally"]
        assert (tally["trained"], tally["published"]) == (20, 20)
        tasks = [task async for task in world.bus.tasks.scan()]
        assert len(tasks) == 10  # no more than the run needs
        assert [one.step for one in disk.listed(world.root)] == [5, 4]


async def test_a_step_whose_plan_is_larger_than_a_message_runs_with_fewer_groups(
    open_world: OpenWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(max_lag=0, steps=2, groups_per_step=60, max_tokens_per_micro_batch=1000) as world:
        assert world.bus.plans.max_record_bytes == 3072
        async with world.actors():
            await finish(world)
        plans = await check_history(world)
        assert [len(plan.tasks) for plan in plans] == [46, 46], "12 bytes a group, 16 a sample"
        assert "groups left out, because a plan must fit in a message count=14 bytes=3072" in caplog.text


async def test_episodes_that_take_longer_than_their_tokens_may_be_old_are_an_alarm(
    open_world: OpenWorld, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(task: Task, index: int) -> Sample:
        """Return a sample of one turn that took a thousand hours."""
        turns = make_turns(
            at=np.array([0], np.int32),
            tokens=np.array([3], np.int32),
            begin_s=np.array([3.6e6 - 1], np.float32),
            seconds=np.array([1], np.float32),
            tools_s=np.array([0], np.float32),
            id=("t-0",),
            finish=("stop",),
            agent=("",),
            rewards=(),
        )
        return sample(task, index, ((task.min_version, 3),), turns=turns)

    async with open_world(steps=2) as world, world.actors(slow):
        await finish(world)
        first, second = [record.metrics for record in await world.records() if isinstance(record, Done)]
    assert (first["data/episodes"], first["data/episode_seconds_p95"], first["data/masked_share_first_turn"]) == (
        4,
        3.6e6,
        0,
    )
    assert SHARE not in first and second[SHARE] > 1000
    assert "alarm long_episodes" in caplog.text


async def test_a_step_has_the_use_of_the_disks_after_the_step_before(open_world: OpenWorld) -> None:
    async with open_world(steps=3) as world, world.actors():
        await finish(world)
        first, second, third = [record.metrics for record in await world.records() if isinstance(record, Done)]
        samples, (stored, _) = await world.bus.samples.info(), await world.bus.jet.store_use()
    assert not any(name.startswith("disk/") for name in first)
    assert 0 < second["disk/samples_bytes"] <= third["disk/samples_bytes"] <= samples.bytes
    assert second["disk/samples_bytes"] < second["disk/bus_bytes"] <= third["disk/bus_bytes"] <= stored
    assert third["disk/checkpoints_free_bytes"] > 0, "the checkpoint of step 2"


async def test_samples_reach_the_ranks_as_they_were_published(open_world: OpenWorld) -> None:
    async with open_world(steps=1) as world:
        async with world.actors():
            await finish(world)
        (plan,) = await world.plans()
        (batch,) = world.batches
        rows = [await world.bus.samples.fetch(int(seq)) for seq in plan.seqs]
        assert batch.rewards_N.tolist() == [row.score for row in rows]
        assert batch.num_tokens == sum(row.response_length for row in rows)
        tokens = {int(row): [] for row in range(len(rows))}
        for part in batch.micro_batches:
            for token, row in zip(part.tokens_T, part.sample_T, strict=True):
                if row >= 0:
                    tokens[int(row)].append(int(token))
        assert tokens == {number: row.tokens.tolist() for number, row in enumerate(rows)}


@pytest.mark.parametrize("what", ["batch", "done", "checkpoint", "publish"])
@pytest.mark.parametrize("step", [1, 3, 4])
async def test_killed_feeder_serves_the_same_again(open_world: OpenWorld, what: str, step: int) -> None:
    """It is killed after it served a batch (plan recorded, no done), after the done, after the checkpoint, after the
    push.
    """
    async with open_world() as world:
        async with world.actors():
            async with world.feeder() as (url, _):
                await world.train(url, stop=lambda did, at: (did, at) == (what, step))
            before = await world.plans()
            await finish(world)
        assert [plan.chain for plan in await check_history(world)][: len(before)] == [plan.chain for plan in before]
        assert len(before) >= step


async def test_a_killed_feeder_of_several_shards_serves_the_same_again(open_world: OpenWorld) -> None:
    """A reader process reads each shard; cursor, versions and trimming have a position for each. Trimming of a shard
    waits for its registered reader.
    """
    async with open_world(sample_shards=2, history_samples=0, steps=6) as world:
        await (await Reader.open(world.bus, "archive", shard=1)).advance(3)
        async with world.actors():
            async with world.feeder() as (url, _):
                await world.train(url, stop=lambda did, at: (did, at) == ("batch", 4))
            before = await world.plans()
            await finish(world)
        plans = await check_history(world)
        assert [plan.chain for plan in plans][: len(before)] == [plan.chain for plan in before]
        assert {int(seq) % 2 for plan in plans for seq in plan.seqs} == {0, 1}
        cursor = cursor_of(read_state(disk.read_state(disk.listed(world.root)[-1].path)))
        firsts = [state.first_seq * 2 + shard for shard, state in enumerate(await world.bus.samples.states())]
        assert firsts == [cursor.floors[0] + 2, 5]
        accounting, _ = await audit(world.bus, read_cursor(world.root))
        assert (accounting.lost, accounting.trained_twice, accounting.problems) == (0, 0, [])
        assert accounting.balance()
        assert accounting.trained == sum(len(plan.seqs) for plan in plans)


async def test_metadata_reaches_the_ranks_that_ask_for_it_and_is_the_same_again(open_world: OpenWorld) -> None:
    """Only with an estimator by import path; the feeder is killed in between, and ranks that do not ask get none."""

    def respond(task: Task, index: int) -> Sample:
        return sample(task, index, ((task.min_version, 2),), metadata={"task": task.id, "index": index})

    async with (
        open_world(steps=2, algorithm=AlgorithmConfig(advantage="mine:estimator")) as world,
        world.actors(respond),
    ):
        for asks in (False, True):
            world.metadata = asks
            async with world.feeder() as (url, _):
                await world.train(url, stop=lambda did, at: (did, at) == ("batch", 1))
        world.metadata = True
        await finish(world)
        without, first, again, _ = world.batches
        assert without.metadata == ()
        assert first.metadata == again.metadata
        for batch in world.batches[1:]:
            assert [one["task"] for one in batch.metadata] == batch.groups_N.tolist()
            assert [one["index"] for one in batch.metadata] == batch.rewards_N.tolist()
        await check_history(world)


async def test_recorded_batches_are_marked_and_none_is_pushed_twice(open_world: OpenWorld) -> None:
    async with open_world(checkpoint_every=0) as world:
        async with world.actors():
            async with world.feeder() as (url, _):
                await world.train(url, stop=lambda did, at: (did, at) == ("publish", 3))
            served = len(world.batches)
            recorded_until = len(await world.plans())
            async with world.feeder() as (url, feeding):
                start = await world.train(url)
                await feeding
        assert (start.step, start.checkpoint, start.epoch, start.recorded_until) == (0, None, 2, recorded_until)
        assert [batch.recorded for batch in world.batches[served:]] == [step <= recorded_until for step in range(1, 6)]
        await check_history(world)


async def record_step(world: World, *, reward: float) -> None:
    """Write an earlier start's records: two groups, one sample of which has this reward, and the plan of step 1 that
    names them all.
    """
    epoch = await raise_epoch(world.bus)
    await world.bus.tasks.fence(epoch)
    await world.bus.plans.fence(epoch)
    await world.publish(0, epoch, initial=True)
    source = DataSource(data_kit.rules(run=world.run), epoch=epoch)
    source.version(0, 0)
    for number in range(2):
        task = data_kit.task(0, run=world.run, epoch=epoch, offset=number)
        task = replace(task, id=await world.bus.tasks.issue(task))
        source.issued(task, 0.0)
        for index in range(2):
            sample = data_kit.sample(task, index, reward=reward if number == index == 0 else 1.0)
            source.add(index_of(await world.bus.samples.publish(sample), sample), 0.0)
    plan = source.plan(0.0)
    assert isinstance(plan, Plan)
    await world.bus.plans.append(plan)


async def test_a_recorded_sample_is_held_against_no_later_invariant(open_world: OpenWorld) -> None:
    """A reward beyond float32 was recorded before it was refused: the plan is served again, as infinity, and readers
    get numbers.
    """
    async with open_world(steps=2) as world:
        await record_step(world, reward=1e39)
        async with world.actors():
            await finish(world)
        await check_history(world)
        first = world.batches[0]
        assert (first.step, first.recorded, first.rewards_N.tolist()) == (1, True, [math.inf, 1, 1, 1])
        (done,) = [record for record in await world.records() if isinstance(record, Done) and record.step == 1]
        assert "data/reward_mean" not in done.metrics
        assert done.metrics["data/samples"] == 4
        assert all(map(math.isfinite, done.metrics.values()))


@pytest.mark.parametrize(("max_lag", "prefetch", "planned"), [(3, True, 2), (3, False, 1), (0, True, 1)])
async def test_at_most_one_step_is_planned_ahead(
    open_world: OpenWorld, max_lag: int, prefetch: bool, planned: int
) -> None:
    async with open_world(max_lag=max_lag, prefetch=prefetch) as world, world.actors():
        async with world.feeder() as (url, _):
            await world.train(url, stop=lambda did, at: (did, at) == ("batch", 1))
            async for row in world.bus.rows("live").watch("feeder.feeder"):
                if row is not None and row[0]["waits_for"] == "rank 0 to take step 1":
                    break
            assert [plan.step for plan in await world.plans()] == list(range(1, planned + 1))


async def test_a_second_feeder_fences_the_first(open_world: OpenWorld) -> None:
    async with open_world() as world, world.actors():
        async with world.feeder() as (url, first):
            ranks = asyncio.create_task(world.train(url, stop=lambda did, at: (did, at) == ("batch", 1)))
            await ranks
            await finish(world)
            with pytest.raises(Fenced):
                await first
        await check_history(world)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "rank-0.bin": lambda path: (path / "rank-0.bin").write_bytes(b"weights of step 9"),
    "state.msgpack": lambda path: (path / "state.msgpack").unlink(),
    "manifest.json": lambda path: [file.unlink() for file in path.iterdir()],
}
"""Damage by file name: a changed byte, a deleted file, an empty directory."""


@pytest.mark.parametrize("file", DAMAGES)
async def test_a_corrupt_checkpoint_is_passed_over_and_logged(
    open_world: OpenWorld, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    async with open_world(steps=6) as world, world.actors():
        async with world.feeder() as (url, _):
            await world.train(url, stop=lambda did, at: (did, at) == ("done", 5))
            await until_checkpointed(world, 4)
        newest, before = disk.listed(world.root)
        DAMAGES[file](newest.path)
        with caplog.at_level(logging.ERROR):
            async with world.feeder() as (url, feeding):
                start = await world.train(url)
                await feeding
        assert start.checkpoint == str(before.path)
        assert (start.step, before.step) == (2, 2)
        assert "CORRUPT" in caplog.text
        assert f"{newest.path}/{file}" in caplog.text
        assert newest.path.with_suffix(".corrupt").is_dir()
        await check_history(world)


async def test_no_sound_checkpoint_ends_the_start_and_names_them_all(open_world: OpenWorld) -> None:
    async with open_world(steps=6) as world, world.actors():
        async with world.feeder() as (url, _):
            await world.train(url, stop=lambda did, at: (did, at) == ("done", 5))
            await until_checkpointed(world, 4)
        there = disk.listed(world.root)
        for one, damage in zip(there, DAMAGES.values(), strict=False):
            damage(one.path)
        with pytest.raises(NoCheckpoint) as caught:
            async with world.feeder() as (_, feeding):
                await feeding
        assert len(there) == 2 and all(str(one.path) in str(caught.value) for one in there), caught.value
        assert disk.listed(world.root) == there, "what cannot be used is left as it is"


async def test_a_dead_task_gives_its_place_back(open_world: OpenWorld) -> None:
    async with open_world(max_lag=0, max_attempts=1) as world:
        async with world.feeder() as (url, feeding):
            training = asyncio.create_task(world.train(url))
            async with connect(world.url, world.run, world.config, name="clumsy") as bus:
                lease = await bus.tasks.lease(60)
                assert lease is not None
                assert await lease.fail("it always fails", actor="clumsy")
            async with world.actors():
                await training
                await feeding
        await check_history(world)
        (settle,) = [record for record in await world.records() if isinstance(record, Settle)]
        assert (settle.reason, settle.tasks.tolist()) == ("dead", [lease.task.id])


async def test_a_task_that_dies_while_no_feeder_runs_is_trained_with_the_samples_it_has(open_world: OpenWorld) -> None:
    async with open_world(max_lag=0, steps=2, group_size=3, min_group_size=2) as world:
        async with connect(world.url, world.run, world.config, name="clumsy") as bus:
            async with world.feeder() as (url, _):
                training = asyncio.create_task(world.train(url))
                lease = await bus.tasks.lease(60)
                assert lease is not None
            with pytest.raises(FeederFailed):
                await training
            for index in range(2):
                await bus.samples.publish(sample(lease.task, index, ((lease.task.min_version, 3),)))
            await bus.dead.store(Dead(task=lease.task.id, reason="r", attempts=3, actor="a", prompt=""))
            assert await lease.ack()
        async with world.actors():
            await finish(world)
        plans = await check_history(world)
        sizes = {
            int(task): int(size) for plan in plans for task, size in zip(plan.tasks, plan.group_sizes, strict=True)
        }
        assert sizes[lease.task.id] == 2


async def test_a_dead_task_is_requeued_once_though_the_feeder_is_killed_around_it(open_world: OpenWorld) -> None:
    """The decision is stored while no feeder runs, and read by every later one; the requeue is a record, so it happens
    once.
    """
    async with open_world(max_lag=0, max_attempts=1, steps=6) as world:
        async with world.feeder() as (url, _):
            training = asyncio.create_task(world.train(url, stop=lambda did, at: (did, at) == ("done", 1)))
            async with connect(world.url, world.run, world.config, name="clumsy") as bus:
                lease = await bus.tasks.lease(60)
                assert lease is not None
                assert await lease.fail("it fails today", actor="clumsy")
            async with world.actors():
                await training
        assert await world.bus.dead.decide(DeadLetterDecision(task=lease.task.id, word="requeue", by="me"))
        assert not await world.bus.dead.decide(DeadLetterDecision(task=lease.task.id, word="drop")), (
            "the first decision counts"
        )
        for stop in (2, 3, 4):
            async with world.feeder() as (url, _), world.actors():
                await world.train(url, stop=lambda did, at, stop=stop: (did, at) == ("done", stop))  # type: ignore[misc]
        async with world.feeder() as (url, feeding), world.actors():
            await world.train(url)
            await feeding
        await check_history(world)
        (requeue,) = [record for record in await world.records() if isinstance(record, Requeue)]
        (again,) = [task async for task in world.bus.tasks.scan() if task.reissues]
        assert (again.reissue_of, again.reissues, again.offset) == (requeue.task, 1, lease.task.offset)
        assert again.id in {int(id) for plan in await world.plans() for id in plan.tasks}, "and it is trained"


async def test_a_dead_letter_with_a_place_that_has_no_prompt_is_not_requeued(open_world: OpenWorld) -> None:
    """Any actor may write a dead letter; a requeue is recorded, and one that cannot be carried out would end every
    later feeder, too.
    """
    async with open_world(steps=2) as world:
        async with world.feeder() as (url, feeding):
            training = asyncio.create_task(world.train(url))
            async with connect(world.url, world.run, world.config, name="liar") as bus:
                lease = await bus.tasks.lease(60)
                assert lease is not None
                await bus.dead.store(
                    Dead(task=lease.task.id, reason="r", attempts=1, actor="liar", prompt="p", root=1, offset=10**6)
                )
                await lease.ack()
            assert await world.bus.dead.decide(DeadLetterDecision(task=lease.task.id, word="requeue"))
            async with asyncio.timeout(LIMIT_S):
                refused = await row_until(
                    world.bus.rows("live"), "feeder.feeder", lambda row: "DEAD" in row["unreadable"]
                )
            assert f"requeue of task {lease.task.id}" in refused["unreadable"]
            async with world.actors():
                await training
                await feeding
        await check_history(world)
        assert not [record for record in await world.records() if isinstance(record, Requeue)]


LONG_LEASE_S = 600.0
"""Lease time of tests in which nothing may wait for the end of a lease."""


async def test_a_task_that_is_over_without_samples_is_issued_again_at_once(open_world: OpenWorld) -> None:
    """This holds also while another actor keeps an earlier task for long, which holds back the queue's ack floor."""
    async with open_world(max_lag=0, steps=1, lease_s=LONG_LEASE_S) as world:
        async with world.feeder() as (url, feeding):
            training = asyncio.create_task(world.train(url))
            async with connect(world.url, world.run, world.config, name="liar") as bus:
                slow, over = await bus.tasks.lease(60), await bus.tasks.lease(60)
                assert slow is not None and over is not None and slow.task.id < over.task.id
                await over.ack()  # without a sample
                again = await bus.tasks.lease(60)
                assert again is not None
                assert (again.task.reissue_of, again.task.offset) == (over.task.id, over.task.offset)
                await slow.nak()
                await again.nak()
            async with world.actors():
                await training
                await feeding
        await check_history(world)


async def test_acks_sent_while_no_feeder_was_there_are_found(open_world: OpenWorld) -> None:
    async with open_world(max_lag=0, steps=1, lease_s=LONG_LEASE_S) as world:
        async with world.feeder() as (url, _):
            training = asyncio.create_task(world.train(url))
            leases = [await world.bus.tasks.lease(60) for _ in range(2)]
        await asyncio.gather(training, return_exceptions=True)
        for lease in leases:
            assert lease is not None
            await lease.ack()
        async with world.actors():
            await finish(world)
        await check_history(world)
        assert len([task async for task in world.bus.tasks.scan() if task.reissues]) == 2


async def spoil(world: World, num_tasks: int) -> None:
    """Act as an actor with samples that break an invariant, and acknowledge its tasks as docs/wire.md specifies."""
    for _ in range(num_tasks):
        lease = await world.bus.tasks.lease(60)
        assert lease is not None
        for index in range(lease.task.group_size):
            spans = ((lease.task.min_version, 3),)
            await world.bus.samples.publish(
                sample(lease.task, index, spans, rollout_log_probs=np.ones(3, np.float32), actor="broken")
            )
        await lease.ack()


async def test_invalid_samples_free_their_place_at_once_and_are_counted(open_world: OpenWorld) -> None:
    async with open_world(max_lag=0, lease_s=LONG_LEASE_S) as world:
        async with world.feeder() as (url, feeding):
            training = asyncio.create_task(world.train(url))
            await spoil(world, 6)  # three times as many as may be unsettled
            row = await seen_row(world, lambda load: load.get("invalid", 0) == 12)
            assert row["invalid/rollout_log_probs"] == row["invalid_of/broken"] == row["invalid"]
            async with world.actors():
                await training
                await feeding
        await check_history(world)


async def test_an_actor_that_sends_only_invalid_samples_is_refused_until_it_sends_others(
    open_world: OpenWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tidemill.learner.buffer.failures.INVALID_IN_A_ROW", 8)
    async with open_world(max_lag=0, lease_s=LONG_LEASE_S) as world:
        async with world.feeder() as (url, feeding):
            training = asyncio.create_task(world.train(url))
            await spoil(world, 4)
            async for row in world.bus.rows("run").watch("refused.broken"):
                if row is not None:
                    break
            assert row is not None
            assert (row[0]["actor"], row[0]["invalid"]) == ("broken", 8)
            assert "rollout_log_probs[0]: want -700 to 0, got 1.0" in row[0]["reason"]
            assert "refused/broken" in await seen_row(world, lambda load: "refused/broken" in load)
            assert "actor refused: it sends only invalid samples actor=broken in_a_row=8" in caplog.text
            async with world.actors(lambda of, index: sample(of, index, ((of.min_version, 3),), actor="broken")):
                await training
                async for row in world.bus.rows("run").watch("refused.broken"):
                    if row is None:
                        break
                await feeding
        await check_history(world)


async def test_tasks_are_issued_one_by_one_while_no_usable_sample_arrives(
    open_world: OpenWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.learner.buffer.failures.INVALID_IN_A_ROW", 8)
    async with open_world(max_lag=0, steps=1) as world, world.feeder() as (url, feeding):
        lost = data_kit.task(10**6, run=world.run, group_size=8)  # no task that the feeder has issued
        for index in range(8):
            await world.bus.samples.publish(sample(lost, index, ((0, 3),), actor="broken"))
        await seen_row(world, lambda load: "refused/broken" in load)
        training = asyncio.create_task(world.train(url))
        leases = [await world.bus.tasks.lease(60) for _ in range(2)]
        name = stream(world.run, "TASKS")
        first, second = [await world.bus.jet.message(name, lease.task.id) for lease in leases if lease is not None]
        assert second.stored_s - first.stored_s > SLOW_S / 2
        for lease in leases:
            assert lease is not None and await lease.nak()
        async with world.actors():
            await training
            await feeding


async def test_samples_that_name_versions_to_come_are_never_trained(open_world: OpenWorld) -> None:
    """They are not trained when the version exists later on, nor when a restart reads them again then."""
    async with open_world(max_lag=3, checkpoint_every=0) as world:
        lies: set[int] = set()

        def lie(of: Task, index: int) -> Sample:
            return sample(of, index, ((of.min_version, 2), (of.min_version + 1 + of.id % 3, 2)), actor="liar")

        async with world.feeder() as (url, _):
            ranks = asyncio.create_task(world.train(url, stop=lambda did, at: (did, at) == ("publish", 3)))
            for index in (0, 1):
                lease = await world.bus.tasks.lease(60)
                assert lease is not None
                lies.add(await world.bus.samples.publish(lie(lease.task, index)))
                await lease.nak()
            assert (await seen_row(world, lambda load: load.get("invalid", 0) >= 2))["invalid/version"] == 2
            async with world.actors():
                await ranks
        async with world.actors():
            await finish(world)
        plans = await check_history(world)
        assert not lies & {int(seq) for plan in plans for seq in plan.seqs}


async def seen_row(world: World, wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Wait until the counters of the feeder's live row satisfy ``wanted``. Returns them."""
    async for row in world.bus.rows("live").watch("feeder.feeder"):
        if row is not None and wanted(row[0]["load"]):
            return row[0]["load"]
    raise AssertionError("a watch has ended")


async def test_the_bus_may_be_killed(open_world: OpenWorld, nats_server: EmbeddedServer) -> None:
    async with open_world() as world, world.actors():
        async with world.feeder() as (url, feeding):

            def kill(did: str, at: int) -> bool:
                if (did, at) == ("done", 2):
                    nats_server.kill()
                    nats_server.start()
                return False

            await world.train(url, stop=kill)
            await feeding
        await check_history(world)


async def test_streams_are_trimmed_behind_the_oldest_kept_checkpoint(open_world: OpenWorld) -> None:
    async with open_world(history_samples=0, steps=6) as world, world.actors():
        for task in (1, 10**6):
            await world.bus.partials.store(make_partial(world.bus.run, task))
        await finish(world)
        oldest = disk.listed(world.root)[-1]
        floor = read_state(disk.read_state(oldest.path))["samples"]["floor"]
        assert (await world.bus.samples.info()).first_seq == floor + 1 > 1
        row = await world.bus.rows("run").get("task_floor")
        assert row is not None
        assert row[0]["floor"] > 0
        held = [len(await world.bus.partials.of(task)) for task in (1, 10**6)]
        assert held == [0, 0], "of a settled task, and of one that was never issued"


async def test_a_step_without_data_ends_with_what_it_waits_for(open_world: OpenWorld) -> None:
    async with open_world(batch_timeout_s=3.0) as world:
        async with world.feeder() as (url, feeding):
            with refusal(FeederFailed, reason=re.compile(r"^NoProgress: .*\b2 more groups for step 1\b")):
                await world.train(url)
            with refusal(NoProgress, where="feeder", waits_for=re.compile(r"; [1-4] in flight\b")):
                await feeding


@asynccontextmanager
async def failing_actor(world: World, *, good_every: int) -> AsyncIterator[None]:
    """Run an actor whose tasks fail, but one in ``good_every``; 0 = all."""

    async def act() -> None:
        number = 0
        while True:
            lease = await world.bus.tasks.lease(5)
            number += lease is not None
            if lease is None:
                continue
            if good_every and number % good_every == 0:
                for index in range(lease.task.group_size):
                    await world.bus.samples.publish(sample(lease.task, index, ((lease.task.min_version, 2),)))
                await lease.ack()
            else:
                await lease.fail("no judge", actor="a")

    acting = asyncio.create_task(act())
    try:
        yield
    finally:
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)


async def test_a_run_in_which_every_task_fails_ends_with_the_reason(open_world: OpenWorld) -> None:
    async with open_world(max_attempts=1, failing_tasks=5, failing_s=0.0) as world, failing_actor(world, good_every=0):
        for _ in range(2):  # the tasks of the first start do not count in the second
            async with world.feeder() as (url, feeding):
                with refusal(
                    FeederFailed, reason=re.compile(r"\(learner\.failing_tasks, learner\.failing_s\).*\bno judge\b")
                ) as failed:
                    await world.train(url)
                assert failed.value.exit_code == 78
                with pytest.raises(TasksFail) as raised:
                    await feeding
                assert raised.value.count >= 5
        assert not await world.plans()


async def test_passes_in_which_every_task_fails_end_with_the_reason(open_world: OpenWorld) -> None:
    async with (
        open_world(max_attempts=1, num_epochs=1, failing_tasks=0) as world,
        failing_actor(world, good_every=0),
        world.feeder() as fed,
    ):
        with refusal(FeederFailed, place="learner.num_epochs", got="none (tasks: 7 dead") as failed:
            await world.train(fed[0])
        assert failed.value.exit_code == 78
        with pytest.raises(NothingTrained):
            await fed[1]


async def test_tasks_that_fail_between_groups_end_no_run(open_world: OpenWorld) -> None:
    async with (
        open_world(max_attempts=1, failing_tasks=12, failing_s=0.0, steps=25) as world,
        failing_actor(world, good_every=4),
    ):
        await finish(world)
        assert len([letter async for _, letter in world.bus.dead.scan()]) > 100


async def test_a_failed_rank_ends_the_feeder_and_the_other_ranks(open_world: OpenWorld) -> None:
    async with open_world(data_parallel=2) as world, world.feeder() as (url, feeding):
        with (
            FeedClient(url, keys=KEYS, rank=0, dp_rank=0, dp_size=2) as fails,
            FeedClient(url, keys=KEYS, rank=1, dp_rank=1, dp_size=2) as other,
        ):
            for client in (
                other,
                fails,
            ):  # an answer means registered; a rank that registers after the failure gets no message
                await asyncio.to_thread(client.hello)
            waiting = asyncio.create_task(asyncio.to_thread(other.next, 1))
            fails.failed("out of memory", 78)
            with refusal(RankFailed, rank=0, reason="out of memory") as failed:
                await feeding
            assert failed.value.exit_code == 78
            with refusal(FeederFailed, reason="rank 0: out of memory", exit_code=78) as told:
                await waiting
            assert told.value.exit_code == 78, "whichever of them ends first: the learner ends with this code"


async def test_a_rank_of_another_layout_is_refused(open_world: OpenWorld) -> None:
    async with open_world(data_parallel=2) as world, world.feeder() as (url, _):
        with FeedClient(url, keys=KEYS, rank=0, dp_rank=0, dp_size=1) as client:
            with refusal(FeederFailed, place="hello of rank 0", got="(0, 1)"):
                await asyncio.to_thread(client.hello)


async def test_another_layout_cannot_repeat_recorded_plans(open_world: OpenWorld) -> None:
    async with open_world(checkpoint_every=0) as world, world.actors():
        async with world.feeder() as (url, _):
            await world.train(url, stop=lambda did, at: (did, at) == ("batch", 2))
        other = LearnerConfig(steps=5, groups_per_step=2, group_size=2, data_parallel=2)
        async with world.feeder(learner=other) as (_, feeding):
            with refusal(ConfigRefused, field="learner.data_parallel"):
                await feeding


async def test_fewer_steps_than_the_checkpoint_has_are_refused(open_world: OpenWorld) -> None:
    async with open_world() as world:
        async with world.actors():
            await finish(world)
        async with world.feeder(learner=replace(world.learner, steps=4)) as (_, feeding):
            with refusal(ConfigRefused, field="learner.steps", got=4):
                await feeding


async def test_settings_that_no_rank_changes_between_two_steps_are_refused_behind_an_executed_one(
    open_world: OpenWorld,
) -> None:
    """Of a step that was planned alone they are not: nothing has been trained with the former ones."""
    other = LearnerConfig(steps=5, groups_per_step=2, group_size=2, optimizer=OptimizerConfig(name="sgd"))
    async with open_world() as world, world.actors():
        async with world.feeder() as (url, _):
            await world.train(url, stop=lambda did, at: (did, at) == ("batch", 1))
        async with world.feeder(learner=other) as (url, _):
            start = await world.train(url, stop=lambda did, at: (did, at) == ("done", 1))
            assert all(record == {} for _, record in start.settings) and start.recorded_until >= 1
            async for _, record in world.bus.plans.follow():
                if isinstance(record, Done):
                    break
        async with world.feeder() as (_, feeding):
            with refusal(ConfigRefused, field="learner.optimizer.name"):
                await feeding
        async with world.feeder(learner=replace(other, optimizer=OptimizerConfig(name="sgd", lr=0.5))) as (
            url,
            feeding,
        ):
            start = await world.train(url)
            assert (
                start.settings[0][0] == 1 and start.settings[0][1]["learner"]["optimizer"]["lr"] == OptimizerConfig().lr
            )
            await feeding


async def test_draining_ends_when_the_ranks_have_left(open_world: OpenWorld) -> None:
    async with open_world() as world, world.actors():
        draining = asyncio.Event()
        async with world.feeder(draining=draining) as (url, feeding):
            await world.train(url, stop=lambda did, at: (did, at) == ("checkpoint", 2))
            draining.set()
            await feeding
        row = await world.bus.rows("run").get(CHECKPOINT_KEY)
        assert row is not None
        assert row[0]["step"] == 2


async def test_ranks_that_leave_while_they_are_needed_end_the_feeder(
    open_world: OpenWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has sent a rank SIGTERM: it ends with code 0, and the feeder would wait for the next one without
    end.
    """
    monkeypatch.setattr(feed_server, "LEAVE_S", 0.01)
    async with open_world() as world, world.actors(), world.feeder() as (url, feeding):
        await world.train(url, stop=lambda did, at: (did, at) == ("done", 2))
        with refusal(RanksLeft, step=2):
            await feeding


async def test_trimming_waits_for_a_registered_reader(open_world: OpenWorld) -> None:
    async with open_world(history_samples=0, steps=6) as world, world.actors():
        reader = await Reader.open(world.bus, "archive")
        await reader.advance(3)
        await finish(world)
        assert (await world.bus.samples.info()).first_seq == 4
        async for received in reader.read(check=False):
            assert received.seq == 4
            break


@pytest.mark.parametrize("full", ["SAMPLES", "PLAN", "weights"])
async def test_a_stream_too_full_waits_for_no_reader_and_logs_it(
    open_bus: BusOpener, tmp_path: Path, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    """Records of PLAN and versions are removed behind their samples, which a reader holds."""
    async with open_bus(samples_max_bytes=20_000_000, trained_max_bytes=1_000_000, quota_bytes=121_000_000) as bus:
        await (await Reader.open(bus, "slow")).advance(2)
        await (await Reader.open(bus, "quick")).advance(8)
        created = (await bus.samples.info()).created
        server = FeedServer("tcp://127.0.0.1:*", keys=KEYS, world_size=1, data_parallel=1)
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "p", "label": 1}\n')
        planned = PlannedRows(PromptFile(tmp_path / "prompts.jsonl", tokenize=lambda _: [1], max_tokens=8))
        begun = await resume(bus, rules=data_kit.rules(run=bus.run), epoch=1, root=tmp_path, planned=planned)
        outcomes = Outcomes(
            bus,
            server,
            begun,
            task_settings(),
            epoch=1,
            on_published=lambda version, step: None,
        )
        await bus.plans.fence(1)
        await outcomes.note_use_of_bus()
        assert 0 < outcomes.records_fullness < 0.01, "of what the quota leaves for records"
        assert await outcomes.trim_limit(7, created) == 3
        outcomes.fullness = 0.86 if full == "SAMPLES" else 0.0
        outcomes.used_shares = {"TASKS": 0.99, "PLAN": 0.0, full: 0.86}
        with caplog.at_level(logging.ERROR):
            assert await outcomes.trim_limit(7, created) == 7
        assert f"{full} is 86 % full: readers slow are left behind at 3" in caplog.text
        places = await Cursors(bus).all()
        assert {name: place.given_up for name, place in places.items()} == {"slow": True, "quick": False}
        for dead_share, fullness in ((0.84, 0.1), (0.86, 0.86)):  # letters are trimmed from 0.85 on, not before
            outcomes.used_shares = {"TASKS": 0.1, "DEAD": dead_share}
            assert outcomes.records_fullness == fullness
        await server.close()


async def test_dead_letters_beyond_the_quota_are_removed_oldest_first_and_counted(open_world: OpenWorld) -> None:
    async with open_world(
        steps=3, samples_max_bytes=20_000_000, trained_max_bytes=1_000_000, quota_bytes=121_000_000
    ) as world:
        dead, share = world.bus.dead, record_bounds(world.config)["DEAD"]
        await dead.report(1, reason="r", actor="a", attempt="n")
        await dead.store(Dead(task=1, reason="r", attempts=3, actor="a", prompt="x" * (share * 9 // 10)))
        await dead.decide(DeadLetterDecision(task=1, word="drop", by="me"))
        async with world.actors():
            await finish(world)
        assert (await world.bus.jet.state(stream(world.run, "DEAD"))).messages == 0
        history = await read_history(world.bus)
        assert (history.letters, history.letters_to) == (1, 1)
        accounting, _ = await audit(world.bus, read_cursor(world.root))
        assert accounting.balance() and not accounting.problems


async def test_forged_reports_are_removed_and_cost_no_letter(open_world: OpenWorld) -> None:
    """They are removed without a quota, too, at the next checkpoint."""
    async with open_world(steps=3) as world:
        dead, size_bytes = world.bus.dead, 7_500_000
        for number in range(12):  # reports of a task that is not issued
            await dead.report(1000, reason="x" * size_bytes, actor="a", attempt=str(number))
        await dead.store(Dead(task=1, reason="r", attempts=3, actor="a", prompt="x"))
        async with world.actors():
            await finish(world)
        assert await dead.letters() == [1]
        assert (await world.bus.jet.state(stream(world.run, "DEAD"))).messages == 1
        history = await read_history(world.bus)
        assert (history.letters, history.letters_to) == (0, 0)
        assert MAX_DEAD_BYTES > 12 * size_bytes > 0.85 * MAX_DEAD_BYTES
        accounting, _ = await audit(world.bus, read_cursor(world.root))
        assert accounting.balance() and not accounting.problems


async def wipe_weights(world: World) -> None:
    """Empty the weights bucket, as by a rollup or a purge by hand."""
    await world.bus.jet.call(f"STREAM.PURGE.{bucket_stream(world.run, 'weights')}")
    assert await VersionRegistry(world.bus).head() is None


async def versions_of(world: World) -> dict[int, str]:
    rows = await world.bus.rows("weights").all("v")
    return {int(value["version"]): value["state"] for value, _ in rows.values()}


async def test_versions_lost_while_no_learner_runs_are_written_again_and_none_is_used_twice(
    open_world: OpenWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(steps=6) as world, world.actors():
        async with world.feeder() as (url, _):
            await world.train(url, stop=lambda did, at: (did, at) == ("publish", 3))
        planned = len(await world.plans())
        used = await versions_of(world)
        head = await VersionRegistry(world.bus).head()
        assert head is not None and head.version == max(used) == 3
        await wipe_weights(world)
        await finish(world)
        plans = await check_history(world)
        after = await versions_of(world)
        named = {version for plan in plans for version in plan.version_steps}
        assert named <= after.keys(), "a plan names a version without a row"
        new = {version for version, state in after.items() if state == "published"} - used.keys()
        assert len(new) == 7 - planned and min(new) > max(used), "from the last step that was planned on"
        assert planned in (3, 4), "the fourth step may be planned while the third version is published"
        assert "registry of versions has lost rows" in caplog.text


async def test_versions_lost_while_the_run_goes_on_are_written_again(open_world: OpenWorld) -> None:
    """The feeder writes them from memory: engines and actors that start meanwhile find the head."""
    async with open_world(steps=6) as world, world.actors():
        loop, heads = asyncio.get_running_loop(), []

        async def wipe() -> None:
            before = await VersionRegistry(world.bus).head()
            await wipe_weights(world)
            async with asyncio.timeout(LIMIT_S):
                async for row in world.bus.rows("weights").watch(HEAD):
                    if row is not None:
                        heads.append((before, row[0]))
                        return

        def stop(did: str, at: int) -> bool:
            if (did, at) == ("publish", 3):
                asyncio.run_coroutine_threadsafe(wipe(), loop).result(LIMIT_S)
            return False

        async with world.feeder() as (url, feeding):
            await world.train(url, stop=stop)
            await feeding
        [(before, restored)] = heads
        assert before is not None
        assert (restored["version"], restored["step"], restored["fence"]) == (before.version, before.step, before.epoch)
        assert {0, 1, 2, 3} <= (await versions_of(world)).keys()
        await check_history(world)


async def remade(world: World, *names: str) -> None:
    """Delete these streams of the run and create them again empty, as after the loss of the server's store."""
    for name in names:
        await world.bus.jet.call(f"STREAM.DELETE.{name}")
    await world.bus.create_layout()


async def until_checkpointed(world: World, step: int) -> None:
    """Wait until the feeder has written the row of this checkpoint, which it does beside the ranks' next steps."""
    await row_until(world.bus.rows("run"), CHECKPOINT_KEY, lambda row: bool(row["step"] >= step))


async def checkpointed(world: World, **changes: Any) -> FeedStart:
    """Run until the first checkpoint, of step 2. Returns the start message."""
    async with world.actors(), world.feeder(**changes) as (url, _):
        start = await world.train(url, stop=lambda did, at: (did, at) == ("checkpoint", 2))
        await until_checkpointed(world, 2)
    return start


async def test_a_bus_that_has_lost_its_store_begins_no_run_beside_checkpoints(open_world: OpenWorld) -> None:
    async with open_world() as world:
        await checkpointed(world)
        run = world.run
        buckets = [bucket_stream(run, bucket) for bucket in BUCKETS]
        await remade(world, *(stream(run, name) for name in ("TASKS", "SAMPLES", "PLAN", "PARTIALS", "DEAD")), *buckets)
        async with world.feeder() as (_, feeding):
            with pytest.raises(RunLost) as caught:
                await feeding
        text = str(caught.value)
        newest = disk.listed(world.root)[0].path
        assert caught.value.exit_code == 78
        for part in (
            f"{newest}",
            f"run {run}",
            "no row run/checkpoint and no plan",
            f"--from-checkpoint {newest}",
            "--fresh",
        ):
            assert part in text, part
        assert not await world.records()


@pytest.mark.parametrize(("lost", "error"), [("PLAN", "log PLAN at"), ("TASKS", "stream TASKS")])
async def test_a_recreated_stream_is_refused_with_a_cure(open_world: OpenWorld, lost: str, error: str) -> None:
    async with open_world() as world:
        await checkpointed(world)
        await remade(world, stream(world.run, lost))
        async with world.feeder() as (_, feeding):
            with pytest.raises(ReplayMismatch, match=error) as caught:
                await feeding
        assert caught.value.exit_code == 78
        assert "--from-checkpoint" in str(caught.value)


async def test_a_recreated_stream_of_samples_is_refused_with_a_cure(open_world: OpenWorld) -> None:
    async with open_world() as world:
        await checkpointed(world)
        await remade(world, stream(world.run, "SAMPLES"))
        async with world.feeder() as (_, feeding):
            with pytest.raises(StreamReplaced, match="--from-checkpoint"):
                await feeding


async def test_missing_checkpoints_are_named_with_a_cure(open_world: OpenWorld) -> None:
    async with open_world() as world:
        await checkpointed(world)
        for one in disk.listed(world.root):
            one.path.rename(world.root.parent / one.path.name)
        async with world.feeder() as (_, feeding):
            with refusal(NoCheckpoint, got="no such file"):
                await feeding


async def test_plans_without_a_checkpoint_row_are_no_loss(open_world: OpenWorld) -> None:
    """A learner killed between the rename of its first checkpoint and the row begins at step 0 and trains the recorded
    steps again.
    """
    async with open_world() as world, world.actors():
        await checkpointed(world)
        await world.bus.rows("run").delete(CHECKPOINT_KEY)
        await finish(world)
        await check_history(world)


async def test_a_run_from_a_checkpoint_begins_anew_with_its_weights(open_world: OpenWorld, tmp_path: Path) -> None:
    """The ranks get the directory until the run has a checkpoint of its own; a damaged one is refused."""
    first = disk.staging(tmp_path / "other", step=9, epoch=1)
    (first / "weights.bin").write_bytes(b"9")
    path = disk.commit(first, b"")
    async with open_world() as world:
        learner = dataclasses.replace(world.learner, from_checkpoint=str(path))
        (path / "weights.bin").write_bytes(b"8")
        async with world.feeder(learner=learner) as (_, feeding):
            with refusal(CheckpointCorrupt, file="weights.bin"):
                await feeding
        (path / "weights.bin").write_bytes(b"9")
        start = await checkpointed(world, learner=learner)
        assert (start.initial, start.checkpoint, start.step) == (str(path), None, 0)
        async with world.actors(), world.feeder(learner=learner) as (url, _):
            start = await world.train(url, stop=lambda did, at: (did, at) == ("batch", 3))
        assert start.initial is None
        assert start.step == 2
