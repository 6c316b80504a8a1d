"""Rewards of slime, verl and TRL under ``SYSTEM:MODULE:NAME``, in the process and in an actor's child."""

from typing import Any

import numpy as np
import pytest

from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import RewardFailed, UnknownReward
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import load
from tidemill.rewards.scorers import opened

HERE = "tests.peer_rewards"
REQUEST = RewardRequest(
    prompt="6 * 7?",
    response="It is 42",
    label="42",
    status=Status.TRUNCATED,
    tokens=np.arange(10, dtype=np.int32),
    metadata={"data_source": "arithmetic", "level": 3},
    response_length=4,
)
REWARDS: list[tuple[str, dict[str, Any], Any]] = [
    (f"slime:{HERE}:slime_rm", {"scale": 2.0}, 2.0 + 0.1 + 0.01),
    (f"slime:{HERE}.slime_rm", {"scale": 1.0}, 1.0 + 0.1 + 0.01),
    (f"verl:{HERE}:compute_score", {}, {"score": 2.0, "acc": 1.0, "hard": 3.0}),
    (f"verl:{HERE}.compute_score", {"strict": True}, {"score": 0.0, "acc": 0.0, "hard": 3.0}),
    (f"trl:{HERE}:accuracy", {"label_column": "solution"}, 1.0 + 3 + 0.04),
]


@pytest.mark.parametrize(("name", "options", "reward"), REWARDS)
async def test_a_function_is_called_as_its_system_calls_it(name: str, options: dict[str, Any], reward: Any) -> None:
    assert await load(name, options)(REQUEST) == pytest.approx(reward)


async def test_messages_are_answered_by_a_message() -> None:
    asked = RewardRequest(
        prompt=[{"role": "user", "content": "6 * 7?"}],
        response="42",
        label="42",
        status=Status.COMPLETED,
        metadata={"level": 0},
    )
    assert await load(f"trl:{HERE}:accuracy", {"label_column": "solution"})(asked) == 1.0


async def test_an_empty_response_has_no_ids() -> None:
    asked = RewardRequest(
        prompt="a",
        response="",
        label="",
        status=Status.COMPLETED,
        tokens=np.arange(5, dtype=np.int32),
        metadata={"level": 0},
    )
    assert await load(f"trl:{HERE}:accuracy", {"label_column": "solution"})(asked) == 1.0


async def test_in_a_child_of_an_actor() -> None:
    for name, options, reward in (REWARDS[0], REWARDS[2], REWARDS[4]):
        async with opened(name, options, ProcessLimits(timeout_s=60.0, workers=1)) as score:
            assert await score(REQUEST) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"trl:{HERE}:too_many", r"want a list with one reward, got \[1.0, 2.0\]"),
        (f"verl:{HERE}:no_score", "want a number, or a map with a number under score, got {'acc': 1.0}"),
        (f"slime:{HERE}:broken", "args.rm_url: there are only the options of the reward; want it in reward_options"),
        (f"verl:{HERE}:slime_rm", "missing 2 required positional arguments"),
    ],
)
async def test_a_result_or_call_that_is_wrong_fails_the_sample(name: str, reason: str) -> None:
    with pytest.raises(RewardFailed, match=reason):
        await load(name)(REQUEST)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"slime:{HERE}:nothing", f"{HERE} has no 'nothing'"),
        (f"verl:{HERE}:not_callable", "want a callable, not_callable is int"),
        ("trl:no_such_module:f", "cannot import no_such_module"),
        (f"{HERE}:slime_rm", f"those of a reward of slime; want slime:{HERE}:slime_rm"),
        (f"{HERE}:compute_score", f"those of a reward of verl; want verl:{HERE}:compute_score"),
        (f"{HERE}:accuracy", f"those of a reward of trl; want trl:{HERE}:accuracy"),
    ],
)
def test_a_name_that_is_wrong_is_refused_before_the_start(name: str, reason: str) -> None:
    with pytest.raises(UnknownReward, match=reason):
        load(name)


async def test_functions_of_ours_are_called_as_before() -> None:
    assert await load(f"{HERE}:plain")(REQUEST) == 1.0
