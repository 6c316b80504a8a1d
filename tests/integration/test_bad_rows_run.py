"""Bad rows and changed prompt files through a real bus: a feeder skips rows, is killed, and goes on with a file that
was mended.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.actor_kit import row_until
from tests.feeder_kit import World
from tests.integration.test_evaluation import evaluated, respond
from tests.integration.test_feeder import OpenWorld, check_history, finish, open_world
from tests.refusals import refusal
from tidemill.bus.section import ShortNamed
from tidemill.bus.wire.messages import Done, Kind, Sampling, Task
from tidemill.learner.errors import ConfigRefused, PromptError
from tidemill.learner.evaluation.config import EvalConfig, EvalSet
from tidemill.learner.evaluation.evaluations import EvalPlan, EvalPrompts
from tidemill.learner.prompts.prompt_file import PromptFile

__all__ = ["open_world"]
BAD: dict[int, Any] = {
    1: {"prompt": [{"role": "user", "content": "5"}], "label": 1},
    2: {"prompt": "longer than 8", "label": 2},
    4: "{",
    5: {"prompt": "p5"},
}
"""Bad rows by their place in the order of the first pass."""


def write(world: World, changes: dict[int, Any], *, rows: int = 40) -> tuple[Path, list[int]]:
    """Write prompts with ``changes`` by place in the order of the first pass. Returns the file, and that order."""
    path = world.root.parent / "prompts.jsonl"
    lines: list[Any] = [{"prompt": f"p{number}", "label": number} for number in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    order = PromptFile(path, tokenize=lambda _: [1], max_tokens=8).order(0).tolist()
    for place, line in changes.items():
        lines[order[place]] = line
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path, order


async def offsets(world: World) -> list[int]:
    """Return the positions of all tasks, which the tests keep within the first pass."""
    tasks: list[Task] = [task async for task in world.bus.tasks.scan() if task.kind is Kind.TRAIN]
    assert not any(task.prompt_epoch for task in tasks)
    return [task.offset for task in tasks]


async def begin(world: World, *, stop: tuple[str, int]) -> None:
    async with world.actors(), world.feeder() as (url, _):
        await world.train(url, stop=lambda did, at: (did, at) == stop)


async def test_bad_rows_of_any_cause_are_skipped_and_shown(open_world: OpenWorld) -> None:
    async with open_world() as world:
        write(world, BAD)
        async with world.feeder() as (url, feeding):
            training = asyncio.create_task(world.train(url))
            # Without actors the first tasks stay open: they are those of the places behind the bad ones.
            shown = await row_until(
                world.bus.rows("live"), "feeder.feeder", lambda row: row["load"].get("bad_rows") == len(BAD)
            )
            assert "4 of 40 rows left out so far (data.bad_rows), the first: " in shown["trouble"]
            async with world.actors():
                await training
                await feeding
        await check_history(world)
        assert not BAD.keys() & set(await offsets(world))
        assert [record.metrics["data/bad_rows"] for record in await world.records() if isinstance(record, Done)] == [
            4.0
        ] * 5


@pytest.mark.parametrize("stop", [("batch", 1), ("publish", 3)], ids=["no checkpoint", "a checkpoint"])
async def test_a_mended_file_goes_on_where_the_planned_rows_are_equal(
    open_world: OpenWorld, stop: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """The mended rows were skipped, or are still to come; no position changes."""
    async with open_world() as world:
        write(world, BAD | {30: "to come"})
        await begin(world, stop=stop)
        before = await offsets(world)
        write(world, {})
        async with world.actors():
            await finish(world)
        await check_history(world)
        after = await offsets(world)
        assert after[: len(before)] == before and sorted(after[len(before) :]) == list(
            range(max(before) + 1, max(after) + 1)
        )
        if stop[0] == "publish":
            assert "5 of 40 rows differ" in caplog.text and "no planned row differs" in caplog.text


@pytest.mark.parametrize("stop", [("batch", 1), ("publish", 3)], ids=["no checkpoint", "a checkpoint"])
async def test_a_planned_row_that_has_changed_is_named(open_world: OpenWorld, stop: tuple[str, int]) -> None:
    async with open_world() as world:
        write(world, {})
        await begin(world, stop=stop)
        last = max(await offsets(world))
        for place in (0, last):  # behind the checkpoint, too
            path, order = write(world, {place: {"prompt": "other", "label": 0}})
            async with world.feeder() as (_, feeding):
                with pytest.raises(ConfigRefused) as refused:
                    await feeding
            assert f"data.path: want the row {path}:{order[place] + 1} as it was when the run planned it" in str(
                refused.value
            )
        write(world, {last + 1: {"prompt": "other", "label": 0}})
        async with world.actors():
            await finish(world)


async def test_a_row_larger_than_a_message_is_a_bad_row(open_world: OpenWorld, tmp_path: Path) -> None:
    async with open_world() as world:
        large = {"prompt": "large", "label": "x" * world.bus.plans.max_record_bytes}
        write(world, {1: large})
        held = tmp_path / "held.jsonl"
        held.write_text(json.dumps({"prompt": "h", "label": 1}) + "\n" + json.dumps(large) + "\n")
        prompts = PromptFile(held, tokenize=lambda prompt: [1] * len(prompt), max_tokens=8, shuffle=False)
        tested = EvalPrompts(
            name="held", prompts=prompts, sampling=Sampling(max_new_tokens=8), samples=1, passes_at=1.0
        )
        sets = ShortNamed({"held": EvalSet(path=str(held))})
        config = EvalConfig(sets=sets, every=100, at_end=False)
        evaluation = EvalPlan(config=config, sets=[tested], last_step=5)
        async with (
            world.actors(),
            world.actors(respond, kind=Kind.EVAL),
            world.feeder(evaluation=evaluation) as (url, feeding),
        ):
            await world.train(url)
            await feeding
        await check_history(world)
        tasks = [task async for task in world.bus.tasks.scan() if task.kind is Kind.TRAIN]
        assert tasks and not any(task.prompt == "large" for task in tasks)
        (record,) = await evaluated(world)
        assert (record.version, record.metrics["prompts"]) == (0, 1.0)


async def test_no_row_that_can_be_used_ends_a_run_with_the_reason(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path, _ = write(world, dict.fromkeys(range(40), BAD[1]))
        async with world.feeder() as (url, feeding):
            training = asyncio.create_task(world.train(url))
            with refusal(
                PromptError, where=re.compile(rf"^{path}:\d+$"), got=re.compile(r"TypeError.*\b40\b")
            ) as ended:
                await feeding
            await asyncio.gather(training, return_exceptions=True)
        assert ended.value.exit_code == 78
