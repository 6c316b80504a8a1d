"""The contracts of a reward, a reward of groups, filters, a source of prompts, a tool, a rollout and a metric sink,
ours and yours.

pytest tests/contract/test_custom_functions.py --reward my_rewards:mine --group-reward my_rewards:ours --filter
my_filters:keep \
    --buffer-filter my_filters:all --source my_rows:rows --tool my_tools:look_up --rollout my_agents:Agent --sink
my_sinks:send \
    --function-options '{"url": "http://..."}'
"""

import hashlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.episode_kit import stage, task
from tests.tiny_models import write_tiny_model
from tests.web_hook import web_hook
from tidemill.actors.episodes.children import Children
from tidemill.actors.episodes.programs.tools import FAILED, TABLE, CallThreads, Tool, tools_of
from tidemill.actors.episodes.rollouts import ProgramRollout
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import SequenceSize, Status, score_of
from tidemill.launch.cli.metrics import open_sink
from tidemill.launch.metrics.sinks import SINK, StepMetrics
from tidemill.learner.filters import (
    BUFFER_FILTER,
    BUILT_IN,
    FILTER,
    BufferGroup,
    BufferSample,
    FilterBuffer,
    FilterGroup,
    FilterSample,
    decision_in,
    decisions_in,
)
from tidemill.learner.prompts.formats import PREFIX, add_rows, rows_of
from tidemill.rewards.group import GroupRequest
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import Bound, bind
from tidemill.rewards.scorers import opened, opened_group

EXAMPLES = "docs.examples.extending."
OURS: dict[str, list[str]] = {
    "reward": ["exact", "digits", "math_answer", EXAMPLES + "my_rewards:tagged"],
    "group_reward": ["relative_length", EXAMPLES + "my_group_reward:behind_the_best"],
    "filter": [name for name in BUILT_IN if name != "gibberish"] + [EXAMPLES + "my_filter:useful"],
    "buffer_filter": [EXAMPLES + "my_buffer_filter:balanced"],
    "source": [EXAMPLES + "my_rows:sums"],
    "tool": [name for name in TABLE if name != "search"] + [EXAMPLES + "my_tool:convert"],
    "rollout": [EXAMPLES + "my_agent:Twice"],
    "sink": ["jsonl", EXAMPLES + "my_sink:hook"],
}
"""Functions of each kind that are held to its contract: those that ship and need no options, and the examples."""
LIMITS = ProcessLimits(timeout_s=60.0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for kind in OURS.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(kind, [*OURS[kind], *metafunc.config.getoption(f"--{kind.replace('_', '-')}")])


def given(request: pytest.FixtureRequest, kind: str, name: str) -> dict[str, Any]:
    """Return the options of a function: those of the command line for one of yours."""
    found: dict[str, Any] = {} if name in OURS[kind] else json.loads(request.config.getoption("--function-options"))
    return found


def response(text: str, *, status: Status = Status.COMPLETED) -> RewardRequest:
    tokens = np.arange(len(text) + 3, dtype=np.int32)
    return RewardRequest(
        prompt="3 + 4 =", response=text, label="7", status=status, tokens=tokens, response_length=len(text)
    )


RESPONSES = [
    response("7"),
    response("so <answer> 7 </answer>"),
    response(""),
    response("\u00fc \U0001f30a\n\t\x00 \\boxed{"),
    response("7 " * 20_000, status=Status.TRUNCATED),
]


async def test_a_reward_gives_every_response_numbers(request: pytest.FixtureRequest, reward: str) -> None:
    """In the processes in which an actor calls it; a map has a ``score``, and the same parts for every response."""
    async with opened(reward, given(request, "reward", reward), LIMITS) as score:
        found = [await score(one) for one in RESPONSES]
    assert len({frozenset(one) if isinstance(one, dict) else None for one in found}) == 1
    assert all(np.isfinite(score_of(one)) for one in found)


async def test_a_group_reward_follows_its_samples(request: pytest.FixtureRequest, group_reward: str) -> None:
    """One reward for each sample, whatever their order, and for a group of one."""
    rewards = (1.0, 0.25, {"score": 0.0, "form": 1.0}, 0.0, 1.0)
    async with opened_group(group_reward, given(request, "group_reward", group_reward), LIMITS) as score:
        whole = await score(GroupRequest(samples=tuple(RESPONSES), rewards=rewards))
        turned = await score(GroupRequest(samples=tuple(RESPONSES[::-1]), rewards=rewards[::-1]))
        alone = await score(GroupRequest(samples=(RESPONSES[0],), rewards=rewards[:1]))
    assert (len(whole), len(alone)) == (len(RESPONSES), 1)
    assert [score_of(one) for one in turned[::-1]] == pytest.approx([score_of(one) for one in whole])


def group(rewards: list[float], *, text: str = "some words", status: Status = Status.COMPLETED) -> FilterGroup:
    samples = tuple(
        FilterSample(
            index=index,
            reward=reward,
            parts={},
            response=text,
            tokens=np.arange(8, dtype=np.int32),
            log_probs=np.full(5, -0.5, np.float32),
            loss_mask=np.ones(5, np.uint8),
            status=status,
            sequences=(SequenceSize(8, 5),),
            metadata={"level": "hard"},
            lag=index,
        )
        for index, reward in enumerate(rewards)
    )
    return FilterGroup(prompt="3 + 4 =", label="7", metadata={"level": "hard"}, samples=samples)


GROUPS = [
    group([0.0, 1.0, 0.5]),
    group([1.0, 1.0]),
    group([0.0, 0.0], status=Status.TRUNCATED),
    group([0.3]),
    group([0.0, 1.0], text=""),
]


async def result_of(bound: Bound, argument: object) -> Any:
    """Return the checked result of a plain or an async function."""
    if not bound.is_async:
        return bound.checked(argument)
    return bound.contract.checked(bound.name, await bound(argument))


async def test_a_filter_decides_every_group(request: pytest.FixtureRequest, filter: str) -> None:
    """As it gets them in a child process: written and read again. It masks samples of the group alone."""
    bound = bind(filter, given(request, "filter", filter), FILTER)
    for one in GROUPS:
        found = await result_of(bound, FILTER.decode(json.loads(FILTER.encode(one))))
        decision_in(filter, json.loads(json.dumps(found)), one)


async def test_a_buffer_filter_decides_on_every_group(request: pytest.FixtureRequest, buffer_filter: str) -> None:
    """As it gets them in a child process, for the groups that a step needs, for more, and for old ones alone."""
    bound = bind(buffer_filter, given(request, "buffer_filter", buffer_filter), BUFFER_FILTER)
    groups = tuple(
        BufferGroup(
            task=number,
            prompt="3 + 4 =",
            label="7",
            metadata={"level": ("easy", "hard")[number % 2]},
            samples=tuple(
                BufferSample(index=index, reward=reward, num_tokens=5, lag=number)
                for index, reward in enumerate((0.0, 1.0))
            ),
        )
        for number in range(9)
    )
    for some in (groups[:2], groups, groups[5:]):
        buffer = FilterBuffer(step=12, num_wanted=2, groups=some)
        found = await result_of(bound, BUFFER_FILTER.decode(json.loads(BUFFER_FILTER.encode(buffer))))
        decisions_in(buffer_filter, json.loads(json.dumps(found)), buffer)


def test_a_source_gives_the_same_rows_again(source: str) -> None:
    """A run that is resumed reads them again, and is refused with other rows."""
    digests = set()
    for _ in range(2):
        digest = hashlib.sha256()
        add_rows(digest, Path(PREFIX + source))
        digests.add(digest.hexdigest())
    assert len(digests) == 1
    rows = list(rows_of(Path(PREFIX + source)))
    assert rows and all(isinstance(row, dict) and row for row in rows)


VALUES: dict[str, Any] = {"string": "1 + 1", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


@pytest.fixture
def made(request: pytest.FixtureRequest, tool: str) -> Tool:
    [found] = tools_of([{"use": tool, "options": given(request, "tool", tool)}]).values()
    return found


async def test_a_tool_describes_itself_and_answers(made: Tool) -> None:
    """The model is shown a description, and a type for every parameter; a call with values of these types is answered
    by text.
    """
    shown = made.schema["function"]
    assert shown["description"], "want a docstring: the model is shown its first paragraph"
    properties = shown["parameters"]["properties"]
    assert all(one.get("type") in VALUES for one in properties.values()), (
        "want annotated parameters: str, int, float, bool, list, dict"
    )
    answer = await made.call(
        {name: VALUES[one["type"]] for name, one in properties.items()}, seconds=60.0, threads=CallThreads()
    )
    assert not answer.startswith(FAILED), answer
    assert (await made.call({"no_such_argument": 1}, seconds=60.0, threads=CallThreads())).startswith(FAILED)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("contract") / "model", max_position_embeddings=1024)


async def test_a_rollout_makes_a_sample(request: pytest.FixtureRequest, model_dir: Path, rollout: str) -> None:
    """In a child process, on a real engine: it is loaded, asks the model through the gateway, and its sample is
    valid.
    """

    async def unused(client: object) -> None:
        raise AssertionError("programs of this test run in children")

    options = given(request, "rollout", rollout)
    config = RolloutConfig(use=f"agent:{rollout}", options=options)
    async with stage(model_dir, unused) as scene, Children(config) as children:
        await children.load()
        made = await ProgramRollout(scene.gateway, children, config).sample(task(), 0, "n0")
    check_sample(made.sample)
    assert made.sample.status in (Status.COMPLETED, Status.TRUNCATED)
    assert made.sample.turns is not None and len(made.sample.turns.at) >= 1


@pytest.fixture(scope="module")
def sink_hook() -> Iterator[tuple[str, list[Any]]]:
    with web_hook() as served:
        yield served


async def test_a_sink_takes_steps_and_scores(
    request: pytest.FixtureRequest, tmp_path: Path, sink: str, sink_hook: tuple[str, list[Any]]
) -> None:
    """It returns nothing, takes metrics that it does not know, and is closed once."""
    of_ours = {"jsonl": {"path": str(tmp_path / "metrics.jsonl")}, EXAMPLES + "my_sink:hook": {"url": sink_hook[0]}}
    options = of_ours[sink] if sink in of_ours else given(request, "sink", sink)
    opened_sink = open_sink(sink, options)
    for step in (1, 2):
        one = StepMetrics(
            run="r", step=step, epoch=1, metrics={"data/reward_mean": 0.5, "train/loss": -0.1, "new/number": 1.0}
        )
        await result_of(opened_sink, one)
    scores = StepMetrics(run="r", step=1, epoch=1, metrics={"eval/held_out/mean": 0.25}, evaluation=True)
    await result_of(opened_sink, SINK.decode(json.loads(SINK.encode(scores))))
    if sink.endswith("my_sink:hook"):
        assert [one["step"] for one in sink_hook[1]] == [1, 2]
    close = getattr(opened_sink.function, "close", lambda: None)()
    if inspect.isawaitable(close):
        await close
