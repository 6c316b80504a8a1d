"""Rewards of groups: their arguments, the effect of their failures, and evaluation without them."""

import asyncio
import re
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from tests.actor_kit import all_samples, complete, engine, issue, model_dir, samples_until, settled, take_over
from tests.bus_fixtures import BusOpener
from tests.integration.test_actor_loop import _model, acting  # noqa: F401 - a fixture
from tests.refusals import refusal
from tests.unit.test_rewards_http import answering
from tidemill.actors.actor.process import run_actor
from tidemill.actors.config import ActorConfig
from tidemill.actors.rollout_settings import RolloutConfig, RolloutPrograms
from tidemill.actors.scoring import RewardServer, serving
from tidemill.bus.section import Sections, read
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Kind, Sample, Status
from tidemill.bus.wire.task_settings import Budget
from tidemill.rewards.errors import BadRewardOption, RewardFailed
from tidemill.rewards.group import GROUP, GroupRequest, relative_length
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import bind
from tidemill.rewards.scorers import opened, opened_group

HERE = "tests.child_group_rewards"


async def test_all_samples_of_a_task_are_scored_together(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus, engine(bus):
        tasks = await issue(bus, await take_over(bus), 3)
        async with acting(
            bus, nats_server, reward="", group_reward=f"{HERE}:ranks", group_reward_options={"offset": 1.0}
        ):
            found = await samples_until(bus, complete(tasks))
            await settled(bus)
        for task in tasks:
            texts = sorted(sample.response for sample in found if sample.task == task)
            assert {sample.index: sample.reward for sample in found if sample.task == task} == {
                sample.index: texts.index(sample.response) + 1.0 for sample in found if sample.task == task
            }


async def test_episodes_of_several_sequences_are_scored_together(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """It sees of each the last answer, the turns, and the number of tokens that were sampled in all of its
    sequences.
    """
    async with open_bus(rollouts=("tries",)) as bus, engine(bus):
        (task,) = await issue(bus, await take_over(bus), rollout="tries", budget=Budget(turns=8))
        draining, config = asyncio.Event(), ActorConfig(group_reward=f"{HERE}:of_episodes")
        rollouts = RolloutPrograms(
            rollouts=read(
                Sections[RolloutConfig], {"tries": {"use": "agent:tests.rollout_programs:Tries"}}, "rollouts"
            ),
            model=str(model_dir()),
        )
        work = asyncio.create_task(
            run_actor(nats_server.url, bus.run, config, bus.config, draining, "a", rollouts=rollouts)
        )
        found = await samples_until(bus, complete([task]))
        await settled(bus)
        draining.set()
        await work
        for sample in found:
            assert isinstance(sample.reward, dict) and len(sample.sizes) == 2 and sample.turns is not None, sample
            assert sample.reward == {
                "score": sample.index,
                "sampled": int(sample.loss_mask.sum()),
                "turns": 2,
                "messages": 2,
            }


async def test_it_sees_the_reward_of_each_and_evaluation_goes_without_it(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus, engine(bus):
        epoch = await take_over(bus)
        (training,) = await issue(bus, epoch)
        (evaluation,) = await issue(bus, epoch, kind=Kind.EVAL)
        async with acting(bus, nats_server, reward="digits", group_reward=f"{HERE}:with_own"):
            found = await samples_until(bus, complete([training, evaluation]))
            await settled(bus)
        for sample in found:
            if sample.task == evaluation:
                assert isinstance(sample.reward, float)
            else:
                assert isinstance(sample.reward, dict)
                assert sample.reward["score"] == 10.0 + sample.reward["own"]


async def test_rows_without_the_metadata_are_scored_one_by_one(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """With ``group_reward_when`` the samples of other rows keep their reward, and no failure of the reward of groups
    fails them.
    """
    async with open_bus(max_attempts=1) as bus, engine(bus):
        epoch = await take_over(bus)
        (together,) = await issue(bus, epoch, metadata={"source": "chat", "turn": 1})
        others = await issue(bus, epoch, metadata={"source": "maths"}) + await issue(bus, epoch)
        reward = {"reward": "digits", "group_reward": f"{HERE}:with_own", "group_reward_when": {"source": "chat"}}
        async with acting(bus, nats_server, **reward):
            found = await samples_until(bus, complete([together, *others]))
            await settled(bus)
        for sample in found:
            assert isinstance(sample.reward, dict if sample.task == together else float), sample
        tasks = await issue(bus, epoch, metadata={"source": "chat"}) + await issue(
            bus, epoch, metadata={"source": "maths"}
        )
        async with acting(bus, nats_server, **{**reward, "group_reward": f"{HERE}:raises"}):
            await samples_until(bus, lambda all_of_them: sum(one.task in tasks for one in all_of_them) == 8)
            await settled(bus)
        failed = {one.task for one in await all_samples(bus) if one.status is Status.FAILED}
        assert failed == {tasks[0]}


async def test_a_server_scores_groups(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with opened_group("relative_length", {"weight": 2.0}, ProcessLimits()) as score, opened("digits") as digits:
        server = RewardServer("relative_length", None, score, token="s")
        async with serving(server, "127.0.0.1", 0) as url, open_bus() as bus, engine(bus):
            tasks = await issue(bus, await take_over(bus), 2)
            options = {"url": f"{url}/score_group", "token_env": "GROUP_TOKEN"}
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("GROUP_TOKEN", "s")
                async with acting(
                    bus, nats_server, reward="digits", group_reward="remote", group_reward_options=options
                ):
                    found = await samples_until(bus, complete(tasks))
                    await settled(bus)
        assert server.counts["scored"] == len(tasks)
        for task in tasks:
            samples = sorted((one for one in found if one.task == task), key=lambda one: one.index)
            asked = [of(sample) for sample in samples]
            wanted = relative_length(
                GroupRequest(samples=tuple(asked), rewards=tuple([await digits(one) for one in asked])), weight=2.0
            )
            assert [one.reward for one in samples] == wanted


def of(sample: Sample) -> RewardRequest:
    """Return the request of a sample, with the fields that ``relative_length`` and ``digits`` read."""
    lengths = {"response_length": sample.response_length, "sampled_length": sample.response_length}
    return RewardRequest(prompt="", response=sample.response, label=sample.label, status=sample.status, **lengths)


ONE, TWO = [0.5, {"score": 1.0}], {"rewards": [1, 2]}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (ONE, ONE),
        (TWO, [1.0, 2.0]),
        ({"failed": "no"}, "failed there: no"),
        ([1.0], "want 2 rewards, one for each sample, got 1"),
        ([1.0, "x"], "want a list of rewards"),
        ([1.0, True], "want a list of rewards"),
        ({"rewards": {"0": 1}}, "want a list of rewards"),
        (3, "want a list of rewards"),
        (None, "want a list of rewards"),
    ],
)
async def test_answers_of_a_server_for_groups(answer: Any, found: Any) -> None:
    async with answering(lambda number, asked: web.json_response(answer)) as (url, asked):
        async with opened_group("remote", {"url": url, "retries": 0}, ProcessLimits()) as score:
            if isinstance(found, list):
                assert await score(GroupRequest(samples=requests(1, 2), rewards=(0.0, {"score": 1.0}))) == found
            else:
                with pytest.raises(RewardFailed, match=found):
                    await score(GroupRequest(samples=requests(1, 2)))
    assert [one["sampled_length"] for one in asked[0]["samples"]] == [1, 2]
    assert asked[0]["rewards"] == ([0.0, {"score": 1.0}] if isinstance(found, list) else [])


@pytest.mark.parametrize(
    ("name", "reason"), [("too_few", "want 4 rewards, one for each sample, got 1"), ("raises", "KeyError('group')")]
)
async def test_a_failure_fails_the_whole_group(
    open_bus: BusOpener, nats_server: EmbeddedServer, name: str, reason: str
) -> None:
    async with open_bus(max_attempts=1) as bus, engine(bus):
        (task,) = await issue(bus, await take_over(bus))
        async with acting(bus, nats_server, reward="", group_reward=f"{HERE}:{name}"):
            await samples_until(bus, lambda found: len(found) == 4)
            await settled(bus)
        found = await all_samples(bus)
        assert Counter(sample.status for sample in found) == {Status.FAILED: 4}
        assert all(reason in sample.metadata["error"] and sample.response_length for sample in found)
        assert [letter.task async for _, letter in bus.dead.scan()] == [task]


async def test_a_sample_that_fails_fails_its_group(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus(max_attempts=1) as bus, engine(bus):
        await issue(bus, await take_over(bus))
        async with acting(bus, nats_server, reward="tests.child_rewards:raises", group_reward=f"{HERE}:ranks"):
            await samples_until(bus, lambda found: len(found) == 4)
            await settled(bus)
        found = await all_samples(bus)
        assert len(found) == 4
        assert all(
            sample.status is Status.FAILED and "the judge answered 500" in sample.metadata["error"] for sample in found
        )


def requests(*lengths: int) -> tuple[RewardRequest, ...]:
    return tuple(
        RewardRequest(
            prompt="", response="", label=None, status=Status.COMPLETED, response_length=99, sampled_length=length
        )
        for length in lengths
    )


def test_relative_length() -> None:
    found = relative_length(GroupRequest(samples=requests(10, 20, 30, 10), rewards=(1.0, 1.0, 1.0, 0.0)), weight=0.5)
    assert [one["score"] for one in found] == [1.25, 1.0, 0.75, 0.0], "a wrong response gains nothing by being short"
    assert [one["length"] for one in found] == [0.5, 0.0, -0.5, 0.0]
    assert relative_length(GroupRequest(samples=requests(5, 5), rewards=(1.0, 0.0)))[0]["score"] == 1.0
    with refusal(RewardFailed, reward="relative_length", reason=re.compile(r"\bactor\.reward\b")):
        relative_length(GroupRequest(samples=requests(5)))


@pytest.mark.parametrize(
    "result", [None, 1.0, "12", {"score": 1.0}, [1.0, "x"], [1.0, float("nan")], [1.0, {"score": 1e39}]]
)
async def test_what_a_reward_of_groups_may_not_return(result: Any) -> None:
    with pytest.raises(RewardFailed):
        GROUP.checked("g", result)


async def test_options_and_names_are_checked() -> None:
    with refusal(BadRewardOption, reward="relative_length", option="wieght"):
        bind("relative_length", {"wieght": 1.0}, GROUP)
    with refusal(ValueError, name="relative"):
        async with opened_group("relative", {}, ProcessLimits()):
            pass


async def test_whatever_a_built_in_reward_raises_is_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: GroupRequest) -> list[float]:
        raise ZeroDivisionError("no samples")

    monkeypatch.setattr("tidemill.rewards.group.relative_length", broken)
    async with opened_group("relative_length", {}, ProcessLimits()) as score:
        with refusal(RewardFailed, reward="relative_length", reason=re.compile("^ZeroDivisionError")):
            await score(GroupRequest(samples=()))
