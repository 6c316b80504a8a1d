"""Recorded responses through a real bus: the feeder answers its own tasks, and is killed in between."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.actor_kit import row_until
from tests.feeder_kit import World
from tests.waits import LIMIT_S
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Plan, Sample, Settle, Task
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.buffer.ledger import read_state
from tidemill.learner.checkpoints import disk
from tidemill.learner.data import Source
from tidemill.learner.feed.restart import CHECKPOINT_KEY
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.prompts.responses import Recordings
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig

ROWS = [{"prompt": f"p{number}", "answers": ["a" * (1 + number % 3)] * (1 + number % 2)} for number in range(12)]
"""Rows of one or two responses each."""


def letters(prompt: Any, tools: Any = (), *, whole: bool = False) -> list[int]:
    return [ord(letter) for letter in prompt]


@dataclass
class RecordedWorld(World):
    """A run with recorded responses in its rows; with ``mixed``, half of the rows are answered by actors."""

    mixed: bool = False
    recorded: frozenset[str] = frozenset({"answers"})
    seen: list[Task] = field(default_factory=list)

    def prompts(self) -> PromptFile:
        path = self.root.parent / "rows.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        keys = ("prompt", "", "")
        sources = [Source(path=path, keys=keys, rollout="answers", responses_key="answers")]
        sources += [Source(path=path, keys=keys)] if self.mixed else []
        recordings = Recordings(letters, rollouts=self.recorded, end_ids=(9,), max_tokens=64)
        return PromptFile(sources, tokenize=letters, max_tokens=16, recordings=recordings)


OpenWorld = Callable[..., AbstractAsyncContextManager[RecordedWorld]]


@pytest.fixture
def open_world(nats_server: EmbeddedServer, run_id: str, tmp_path: Path) -> OpenWorld:
    @asynccontextmanager
    async def opened(
        *, mixed: bool = False, algorithm: AlgorithmConfig, **changes: Any
    ) -> AsyncIterator[RecordedWorld]:
        values: dict[str, Any] = {"steps": 6, "groups_per_step": 2, "group_size": 2, "checkpoint_every": 2} | changes
        config = BusConfig(lease_s=2.0, rollouts=("answers",))
        (tmp_path / "checkpoints").mkdir()
        async with connect(nats_server.url, run_id, config, name="test", wait_s=60) as bus:
            await bus.create_layout()
            yield RecordedWorld(
                url=nats_server.url,
                run=run_id,
                bus=bus,
                root=tmp_path / "checkpoints",
                learner=LearnerConfig(max_tokens_per_micro_batch=64, algorithm=algorithm, **values),
                staleness=StalenessConfig(max_lag=1),
                config=config,
                mixed=mixed,
            )

    return opened


async def finish(world: RecordedWorld, **stop: Any) -> None:
    async with world.feeder(recorded=world.recorded) as (url, feeding):
        await world.train(url, **stop)
        if not stop:
            await feeding


async def trained_rows(world: RecordedWorld) -> Counter[str]:
    """Return how often each prompt is in a plan."""
    tasks = {task.id: task async for task in world.bus.tasks.scan()}
    return Counter(str(tasks[int(task)].prompt) for plan in await world.plans() for task in plan.tasks)


@pytest.mark.parametrize(("what", "step"), [("batch", 1), ("checkpoint", 2), ("publish", 4)])
async def test_every_row_is_trained_once_without_actors_though_the_feeder_is_killed(
    open_world: OpenWorld, what: str, step: int
) -> None:
    async with open_world(algorithm=AlgorithmConfig(correction="sft"), num_epochs=1, steps=20) as world:
        await finish(world, stop=lambda did, at: (did, at) == (what, step))
        await finish(world)
        assert await trained_rows(world) == Counter({str(row["prompt"]): 1 for row in ROWS})
        records = await world.records()
        seqs = [int(seq) for record in records if isinstance(record, Plan | Settle) for seq in record.seqs]
        assert len(seqs) == len(set(seqs)) == sum(len(row["answers"]) for row in ROWS)
        assert all(len(found) == 1 for found in world.digests.values())
        row = await world.bus.rows("run").get(CHECKPOINT_KEY)
        assert row is not None
        tally = read_state(disk.read_state(Path(row[0]["directory"])))["tally"]
        assert tally["trained"] == len(seqs)
        # A task that is answered again after the kill has duplicates, which count as such.
        assert tally["published"] == tally["trained"] + tally["duplicate"]


async def test_answered_tasks_are_acked(open_world: OpenWorld) -> None:
    async with open_world(algorithm=AlgorithmConfig(correction="sft"), steps=2, groups_per_step=1) as world:
        acked, enough = set[int](), asyncio.Event()

        def on_ack(task: int) -> None:
            acked.add(task)
            if len(acked) == 2:
                enough.set()

        async with world.bus.tasks.acks(on_ack), world.feeder(recorded=world.recorded) as (url, _):
            training = asyncio.create_task(world.train(url))
            async with asyncio.timeout(LIMIT_S):
                await enough.wait()
            await training
        assert {int(task) for plan in await world.plans() for task in plan.tasks} == acked


async def test_the_ranks_get_the_rows_own_tokens_and_masks(open_world: OpenWorld) -> None:
    async with open_world(algorithm=AlgorithmConfig(correction="sft"), steps=1) as world:
        await finish(world)
        (batch,) = world.batches
        assert batch.demonstration_N.all()
        (plan,) = await world.plans()
        samples: list[Sample] = [await world.bus.samples.fetch(int(seq)) for seq in plan.seqs]
        by_prompt = {str(row["prompt"]): row["answers"] for row in ROWS}
        for sample in samples:
            answer = by_prompt[str(sample.prompt)][sample.index]
            assert sample.tokens.tolist() == [*map(ord, str(sample.prompt)), *map(ord, answer), 9]
            assert (sample.response, sample.group_size) == (answer, len(by_prompt[str(sample.prompt)]))
            assert (sample.actor, sample.engine, sample.rollout) == ("dataset", "", "answers")
        assert batch.num_tokens == sum(len(sample.response) + 1 for sample in samples)


async def test_a_mixed_run_has_groups_of_actors_and_of_rows_in_its_steps(open_world: OpenWorld) -> None:
    async with open_world(
        mixed=True, algorithm=AlgorithmConfig(sft_coef=0.5), num_epochs=1, steps=20, groups_per_step=4
    ) as world:
        async with world.actors():
            await finish(world)
        assert await trained_rows(world) == Counter({str(row["prompt"]): 2 for row in ROWS}), "once by each"
        kinds = [(int(batch.demonstration_N.sum()), int((~batch.demonstration_N).sum())) for batch in world.batches]
        assert sum(recorded for recorded, _ in kinds) == sum(len(row["answers"]) for row in ROWS)
        assert sum(sampled for _, sampled in kinds) == 2 * len(ROWS)
        for batch in world.batches:
            groups = {
                task: set(batch.demonstration_N[batch.groups_N == task].tolist()) for task in np.unique(batch.groups_N)
            }
            assert all(len(found) == 1 for found in groups.values())


async def test_another_actor_cannot_bring_demonstrations_into_a_run_that_cannot_train_them(
    open_world: OpenWorld,
) -> None:
    async with open_world(algorithm=AlgorithmConfig(), steps=1) as world:
        async with world.feeder(recorded=world.recorded) as (url, _):
            training = asyncio.create_task(world.train(url))
            await row_until(
                world.bus.rows("live"), "feeder.feeder", lambda row: row["load"].get("invalid/demonstration", 0) > 0
            )
            assert await world.plans() == []
            training.cancel()
