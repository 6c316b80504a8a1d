"""Feeders of the debugging modes on a real bus: recorded steps for any layout, and steps that no rank trains."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.debug_kit import rollout
from tests.feeder_kit import KEYS, World
from tests.forked import Forked
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Done
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.checkpoints import disk
from tidemill.learner.debug.config import DebugConfig
from tidemill.learner.debug.rollout_file import load_rollout, save_rollout
from tidemill.learner.errors import CheckpointCorrupt, DebugFileRefused, FeederFailed
from tidemill.learner.feed.feed_client import FeedClient
from tidemill.learner.feed.feed_messages import FeedEnd
from tidemill.learner.feed.feeder_settings import FeederPlaces, FeederSettings, ModelFacts, RankPlaces
from tidemill.learner.feed.recorded_steps import run_recorded_feeder
from tidemill.learner.feed.restart import CHECKPOINT_KEY
from tidemill.learner.ranks import rollout_only
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig

STEPS = 3


@pytest.fixture
def opened(nats_server: EmbeddedServer, run_id: str, tmp_path: Path) -> AbstractAsyncContextManager[World]:
    return world_of(nats_server.url, run_id, tmp_path)


@asynccontextmanager
async def world_of(url: str, run_id: str, tmp_path: Path) -> AsyncIterator[World]:
    async with connect(url, run_id, BusConfig(), name="test", wait_s=60) as bus:
        await bus.create_layout()
        (tmp_path / "checkpoints").mkdir()
        learner = LearnerConfig(steps=STEPS, groups_per_step=2, group_size=2, checkpoint_every=2, data_parallel=2)
        yield World(
            url=url,
            run=run_id,
            bus=bus,
            root=tmp_path / "checkpoints",
            learner=learner,
            staleness=StalenessConfig(max_lag=1),
            config=BusConfig(),
        )


@asynccontextmanager
async def recorded_feeder(
    world: World, files: str, draining: asyncio.Event | None = None
) -> AsyncIterator[tuple[str, "asyncio.Task[None]"]]:
    with KeptPort() as port:
        url = f"tcp://127.0.0.1:{port.number}"
        places = FeederPlaces(
            run=world.run, bus_url=world.url, bus=world.config, listen=url, keys=KEYS, checkpoints=world.root
        )
        settings = FeederSettings(
            places=places, model=ModelFacts(), learner=world.learner, debug=DebugConfig(load_rollout=files)
        )
        feeding = asyncio.create_task(run_recorded_feeder(settings, draining or asyncio.Event()))
        try:
            yield url, feeding
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


def taken(url: str, rank: int, last: int = STEPS, *, metadata: bool = False) -> list[StepBatch]:
    """Act as a rank that trains nothing, up to a step; return its batches. ``metadata``: ask for that of the
    samples.
    """
    found = []
    with FeedClient(url, keys=KEYS, rank=rank, dp_rank=rank, dp_size=2, metadata=metadata, silence_s=60) as client:
        start = client.hello()
        assert (start.step, start.steps, start.checkpoint, start.recorded_until) == (0, STEPS, None, 0)
        for step in range(1, last + 1):
            batch = client.next(step)
            assert isinstance(batch, StepBatch)
            found.append(batch)
            if rank == 0:
                client.done(step, {"train/loss": 0.5 * step})
        if last == STEPS:
            assert isinstance(client.next(STEPS + 1), FeedEnd)
    return found


async def test_recorded_steps_are_fed_to_every_rank(opened: AbstractAsyncContextManager[World], tmp_path: Path) -> None:
    async with opened as world:
        world.learner = replace(world.learner, algorithm=AlgorithmConfig(advantage="mine:estimator"))
        for step in range(1, STEPS + 1):
            recorded = rollout(step + 1)
            numbered = [replace(one, metadata={"number": number}) for number, one in enumerate(recorded.samples)]
            save_rollout(tmp_path / f"{step}.msgpack", replace(recorded, samples=numbered))
        async with recorded_feeder(world, f"{tmp_path}/{{step}}.msgpack") as (url, feeding):
            ranks = await asyncio.gather(*[asyncio.to_thread(taken, url, rank, metadata=rank == 1) for rank in (0, 1)])
            await feeding
        for step in range(1, STEPS + 1):
            mine = [batches[step - 1] for batches in ranks]
            want = load_rollout(tmp_path / f"{step}.msgpack").samples
            assert [len(batch.metadata) for batch in mine] == [0, len(want)]
            assert [one["number"] for one in mine[1].metadata] == [sample.metadata["number"] for sample in want]
            assert [batch.step for batch in mine] == [step, step] and not mine[0].recorded and not mine[0].state
            tokens = sum(int(part.loss_mask_T.sum()) for batch in mine for part in batch.micro_batches)
            assert tokens == sum(sample.response_length for sample in want) == mine[0].num_tokens
            assert all(part.loss_mask_T.any() for batch in mine for part in batch.micro_batches)
        done = [record for record in await world.records() if isinstance(record, Done)]
        assert [(one.step, one.metrics["train/loss"], one.metrics["data/samples"]) for one in done] == [
            (n, n / 2, 16.0) for n in (1, 2, 3)
        ]


async def test_recorded_steps_begin_with_the_weights_of_a_checkpoint(
    opened: AbstractAsyncContextManager[World], tmp_path: Path
) -> None:
    staged = disk.staging(tmp_path / "other", step=9, epoch=1)
    (staged / "weights.bin").write_bytes(b"9")
    path = disk.commit(staged, b"")
    save_rollout(tmp_path / "one.msgpack", rollout(2))

    def started(url: str) -> str | None:
        with FeedClient(url, keys=KEYS, rank=0, dp_rank=0, dp_size=2, silence_s=60) as client:
            return client.hello().initial

    async with opened as world:
        world.learner = replace(world.learner, from_checkpoint=str(path))
        async with recorded_feeder(world, f"{tmp_path}/one.msgpack") as (url, _):
            assert await asyncio.to_thread(started, url) == str(path)
        (path / "weights.bin").write_bytes(b"8")
        async with recorded_feeder(world, f"{tmp_path}/one.msgpack") as (url, feeding):
            with refusal(CheckpointCorrupt, file="weights.bin"):
                await asyncio.wait_for(feeding, LIMIT_S)


async def test_a_broken_file_ends_feeder_and_ranks_with_its_name(
    opened: AbstractAsyncContextManager[World], tmp_path: Path
) -> None:
    async with opened as world:
        save_rollout(tmp_path / "1.msgpack", rollout(2))
        (tmp_path / "2.msgpack").write_bytes((tmp_path / "1.msgpack").read_bytes()[:-9])
        async with recorded_feeder(world, f"{tmp_path}/{{step}}.msgpack") as (url, feeding):
            ended = await asyncio.gather(
                *[asyncio.to_thread(taken, url, rank) for rank in (0, 1)], return_exceptions=True
            )
            with refusal(DebugFileRefused, where=re.compile(r"2\.msgpack$")):
                await feeding
        assert any(isinstance(one, FeederFailed) and "2.msgpack" in str(one) for one in ended)


async def test_a_drained_feeder_of_recorded_steps_ends_with_its_ranks(
    opened: AbstractAsyncContextManager[World], tmp_path: Path
) -> None:
    async with opened as world:
        save_rollout(tmp_path / "one.msgpack", rollout(4))
        draining = asyncio.Event()
        async with recorded_feeder(world, f"{tmp_path}/one.msgpack", draining) as (url, feeding):
            ranks = await asyncio.gather(*[asyncio.to_thread(taken, url, rank, 2) for rank in (0, 1)])
            draining.set()
            await feeding
        assert [batch.rewards_N.tolist() for batch in ranks[0]] == [
            ranks[0][0].rewards_N.tolist()
        ] * 2  # one file for every step
        assert [record.step for record in await world.records() if isinstance(record, Done)] == [1, 2]


@asynccontextmanager
async def consumer(world: World, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Forked, "asyncio.Task[None]"]]:
    """Run actors, the feeder of a run that trains nothing, and its one rank in a process."""
    world.learner = LearnerConfig(steps=STEPS, groups_per_step=2, group_size=2, checkpoint_every=2)
    debug = DebugConfig(rollout_only=True, save_rollout=f"{tmp_path}/saved_{{step}}.msgpack")
    model = ModelFacts(vocab_size=256, directory=str(tmp_path))
    async with world.actors(), world.feeder(debug=debug, model=model, **settings) as (url, feeding):
        places = RankPlaces(
            run=world.run,
            bus_url=world.url,
            feeder_url=url,
            feeder_keys=KEYS,
            model_dir=tmp_path,
            checkpoints=world.root,
            snapshots=tmp_path / "snapshots",
            final_dir=tmp_path / "final",
        )
        child = await asyncio.to_thread(Forked, rollout_only.main, (places,), {}, tmp_path / "rank.log")
        try:
            yield child, feeding
        finally:
            child.kill()


async def until_done(world: World, step: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        async for _, record in world.bus.plans.follow():
            if isinstance(record, Done) and record.step >= step:
                return


async def test_steps_that_no_rank_trains_are_saved_and_resumed(
    opened: AbstractAsyncContextManager[World], tmp_path: Path
) -> None:
    """All samples are of version 0, and none is too old at max_lag 1; a second start goes on behind the checkpoint of
    step 2.
    """
    async with opened as world:
        async with consumer(world, tmp_path) as (child, feeding):
            await until_done(world, 2)
            async with asyncio.timeout(LIMIT_S):
                async for row in world.bus.rows("run").watch(CHECKPOINT_KEY):
                    if row is not None:
                        break
            child.send_signal(signal.SIGKILL)
            await child.ended()
            feeding.cancel()
        first = {step: load_rollout(tmp_path / f"saved_{step}.msgpack") for step in (1, 2)}
        async with consumer(world, tmp_path) as (child, feeding):
            assert await child.ended() == 0, child.output.read_text()
            await feeding
        assert "step=1 " not in child.output.read_text()
        for step in range(1, STEPS + 1):
            saved = load_rollout(tmp_path / f"saved_{step}.msgpack")
            assert saved.plan.step == step and saved.plan.version_steps == {0: 0} and len(saved.samples) == 4
            assert saved.plan.data_parallel == 1 and (saved.plan.oldest_step or 0) <= 0
            if step in first:
                assert saved.plan.seqs.tolist() == first[step].plan.seqs.tolist()
        newest = max(disk.listed(world.root))
        assert newest.step == STEPS and (newest.path / disk.NO_WEIGHTS).exists()
        done = {record.step: record.metrics for record in await world.records() if isinstance(record, Done)}
        assert {"train/reward_mean", "train/truncated_share", "data/logprob_mean", "data/reward_mean"} <= done[
            STEPS
        ].keys()


async def test_the_rank_that_trains_nothing_drains(opened: AbstractAsyncContextManager[World], tmp_path: Path) -> None:
    async with opened as world:
        draining = asyncio.Event()
        world.learner = LearnerConfig(steps=10_000, groups_per_step=2, group_size=2)
        async with consumer(world, tmp_path, draining=draining, learner=world.learner) as (child, feeding):
            await until_done(world, 1)
            draining.set()
            child.send_signal(signal.SIGTERM)
            assert await child.ended() == 0
            await feeding
