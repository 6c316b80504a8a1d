"""Rewards in processes of their own: scorers that join, drain, freeze and are killed while actors wait for their
answers.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests import actor_child
from tests.actor_kit import (
    ActorProcess,
    actor_process,
    all_samples,
    complete,
    engine,
    issue,
    model_dir,
    prompt_tokens,
    row_until,
    samples_until,
    settled,
    take_over,
)
from tests.bus_fixtures import BusOpener
from tidemill.actors.config import ActorConfig, ScorersConfig
from tidemill.bus.liveness import LiveView
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Sample, Status
from tidemill.launch.run import desired

pytestmark = pytest.mark.usefixtures("fork_server")

ON = ScorersConfig(enabled=True)


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    """Make the model here, where it blocks no event loop."""
    model_dir()
    prompt_tokens()


class Scene:
    """A run with an engine, an actor, and scorers that tests start."""

    def __init__(self, bus: Bus, url: str, config: ActorConfig, actor: ActorProcess) -> None:
        self.bus, self.actor, self._url, self._config = bus, actor, url, config

    def scorer(self, id: str) -> AbstractAsyncContextManager[ActorProcess]:
        """Start a scorer, which has five minutes to drain."""
        return actor_process(self._url, self.bus.run, self._config, id=id, drain_s=300.0, program=actor_child.scorer)

    async def at_work(self, id: str, requests: int) -> None:
        """Return when a scorer has this many requests."""
        await row_until(self.bus.rows("live"), f"scorer.{id}", lambda row: row["load"].get("in_flight") == requests)

    async def scored(self, tasks: list[int]) -> list[Sample]:
        """Return all samples once every task is acknowledged."""
        await samples_until(self.bus, complete(tasks))
        await settled(self.bus)
        found = await all_samples(self.bus)
        assert Counter((s.task, s.index) for s in found) == {(task, index): 1 for task in tasks for index in range(4)}
        assert {s.status for s in found} <= {Status.COMPLETED, Status.TRUNCATED}
        return found


def open_gate(config: ActorConfig) -> None:
    Path(str(config.reward_options["gate"])).touch()


@asynccontextmanager
async def scene(open_bus: BusOpener, url: str, config: ActorConfig) -> AsyncIterator[Scene]:
    async with open_bus() as bus, engine(bus), actor_process(url, bus.run, config, id="a1") as actor:
        yield Scene(bus, url, config, actor)


@pytest.fixture
def gated(tmp_path: Path) -> ActorConfig:
    """A reward that waits for the file ``gate``."""
    options = {"gate": str(tmp_path / "gate")}
    return ActorConfig(reward="tests.actor_child:opened", reward_options=options, reward_timeout_s=300, scorers=ON)


async def test_scorers_give_the_rewards_of_the_actor_itself(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with (
        scene(open_bus, nats_server.url, ActorConfig(reward="digits", scorers=ON)) as run,
        run.scorer("s1"),
        run.scorer("s2"),
    ):
        there = await run.scored(await issue(run.bus, await take_over(run.bus), 3))
    async with (
        open_bus() as bus,
        engine(bus),
        actor_process(nats_server.url, bus.run, ActorConfig(reward="digits"), id="a1"),
    ):
        tasks = await issue(bus, await take_over(bus), 3)
        here = await samples_until(bus, complete(tasks))
    rewards = [{(s.task % 3, s.index): s.reward for s in samples} for samples in (there, here)]
    assert rewards[0] == rewards[1]
    assert len({s.reward for s in here}) > 1, "rewards that differ"


async def test_an_actor_waits_for_a_scorer_and_says_so(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with scene(open_bus, nats_server.url, ActorConfig(reward="digits", reward_timeout_s=4.0, scorers=ON)) as run:
        tasks = await issue(run.bus, await take_over(run.bus))
        longer = re.compile(r", for ([5-9]|\d\d+) s \(4 samples wait\)")
        row = await row_until(run.bus.rows("live"), "actor.a1", lambda row: longer.search(row["waits_for"]) is not None)
        assert row["waits_for"].startswith("a scorer (tidemill scorer, or up.scorers) that serves (none known), for ")
        assert await all_samples(run.bus) == [], "a reward that has not begun is not out of time"
        async with run.scorer("s1"):
            await run.scored(tasks)


@pytest.mark.parametrize("group_reward", ["", "tests.actor_child:ranked"])
async def test_an_actor_that_drains_without_a_scorer_returns_its_tasks(
    open_bus: BusOpener, nats_server: EmbeddedServer, group_reward: str
) -> None:
    """Nothing failed: the next actor makes the samples, and waits for the scorer that comes."""
    config = ActorConfig(reward="digits", group_reward=group_reward, scorers=ON, drain_finish_s=0.1)
    async with scene(open_bus, nats_server.url, config) as run:
        tasks = await issue(run.bus, await take_over(run.bus))
        await row_until(run.bus.rows("live"), "actor.a1", lambda row: "(4 samples wait)" in row["waits_for"])
        run.actor.terminate()
        assert await run.actor.exit_code() == 0
        assert (await all_samples(run.bus), [letter async for letter in run.bus.dead.scan()]) == ([], [])
        async with actor_process(nats_server.url, run.bus.run, config, id="a2"), run.scorer("s1"):
            await run.scored(tasks)


@pytest.mark.parametrize("end", ["killed", "frozen"])
async def test_a_scorer_that_is_lost_is_replaced_and_costs_no_sample(
    open_bus: BusOpener, nats_server: EmbeddedServer, gated: ActorConfig, end: str
) -> None:
    async with scene(open_bus, nats_server.url, gated) as run, run.scorer("s1") as first:
        tasks = await issue(run.bus, await take_over(run.bus))
        await run.at_work("s1", 4)
        async with run.scorer("s2"):
            if end == "killed":
                first.kill()
            else:
                first.freeze()
            await run.at_work("s2", 4)
            open_gate(gated)
            found = await run.scored(tasks)
        assert {sample.reward for sample in found} == {0.5}


async def test_a_drained_scorer_answers_what_it_has_and_is_asked_no_more(
    open_bus: BusOpener, nats_server: EmbeddedServer, gated: ActorConfig
) -> None:
    async with scene(open_bus, nats_server.url, gated) as run, run.scorer("s1") as first:
        epoch = await take_over(run.bus)
        tasks = await issue(run.bus, epoch)
        await run.at_work("s1", 4)
        async with run.scorer("s2"):
            await row_until(run.bus.rows("live"), "scorer.s2", lambda row: row["phase"] == "serving")
            first.terminate()
            row = await row_until(run.bus.rows("live"), "scorer.s1", lambda row: row["phase"] == "draining")
            assert row["waits_for"] == "4 requests"
            later = await issue(run.bus, epoch)
            await run.at_work("s2", 4)
            open_gate(gated)
            assert await first.exit_code() == 0
            await run.scored([*tasks, *later])
        assert await run.bus.rows("live").get("scorer.s1") is None
        rows = {row.id: row for row in await LiveView(run.bus).alive("scorer")}
        assert "s1" not in rows


async def test_a_reward_of_groups_is_asked_of_scorers_too(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    config = ActorConfig(
        reward="digits", group_reward="tests.actor_child:ranked", group_reward_options={"step": 0.25}, scorers=ON
    )
    async with scene(open_bus, nats_server.url, config) as run, run.scorer("s1"):
        found = await run.scored(await issue(run.bus, await take_over(run.bus), 2))
    assert {sample.reward for sample in found if sample.index == 3} == {0.75}
    assert {(sample.index, sample.reward) for sample in found} == {(index, index * 0.25) for index in range(4)}


async def test_a_reward_that_hangs_there_fails_the_sample(
    open_bus: BusOpener, nats_server: EmbeddedServer, gated: ActorConfig
) -> None:
    async with scene(open_bus, nats_server.url, replace(gated, reward_timeout_s=0.2)) as run, run.scorer("s1"):
        await issue(run.bus, await take_over(run.bus))
        async with asyncio.timeout(300):
            found = [sample async for sample in first_failed(run.bus)]
    assert "no result in time" in str(found[0].metadata["error"])


async def first_failed(bus: Bus) -> AsyncIterator[Sample]:
    async for received in bus.samples.read(None):
        assert isinstance(received.sample, Sample)
        if received.sample.status is Status.FAILED:
            yield received.sample
            return


async def test_a_resumed_run_keeps_the_numbers_of_scale_and_gets_scorers_that_it_had_not(open_bus: BusOpener) -> None:
    counts = {"engine": 1, "scorer": 2, "actor": 1}
    async with open_bus() as bus:
        await bus.rows("wanted").put(desired.ALL, {"engine": 3, "actor": 4})
        assert await desired.begin(bus, counts, keep=True) == {"engine": 3, "scorer": 2, "actor": 4}
        await desired.change(bus, desired.ALL, {"scorer": 5})
        assert await desired.begin(bus, counts, keep=True) == {"engine": 3, "scorer": 5, "actor": 4}
        assert await desired.begin(bus, counts, keep=False) == counts


async def test_a_scorer_of_a_run_without_scorers_says_that_none_is_asked(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """It is no error that would end the run: `tidemill scale scorers=1` may start one."""
    async with (
        open_bus() as bus,
        actor_process(
            nats_server.url, bus.run, ActorConfig(reward="digits"), id="s1", program=actor_child.scorer
        ) as process,
    ):
        row = await row_until(bus.rows("live"), "scorer.s1", lambda row: row["phase"] == "waiting")
        assert row["waits_for"].startswith(
            "actor.scorers.enabled: true; the actors of this run compute their rewards themselves"
        )
        assert row["address"] == ""
        process.terminate()
        assert await process.exit_code() == 0
