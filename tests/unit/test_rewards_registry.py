"""Rewards by name: options checked against the signature, results checked, slow ones in a thread."""

import asyncio
import inspect
import pickle
import re
import threading
from typing import Any

import pytest

from tests.refusals import refusal
from tests.waits import turn
from tidemill.bus.system.functions import find_object
from tidemill.bus.wire.invariants import MAX_REWARD
from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import BadRewardOption, RewardFailed, UnknownReward
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import TABLE, UNBOUNDED, load

HERE = __name__
REQUEST = RewardRequest(prompt="p", response="12", label="12", status=Status.COMPLETED)
release = threading.Event()


def plain(request: RewardRequest, *, bonus: float = 0.0) -> float:
    return len(request.response) + bonus


async def waiting(request: RewardRequest, *, url: str) -> dict[str, float]:
    await turn()
    return {"score": 1.0, "length": float(len(url))}


class Callable:
    async def __call__(self, request: RewardRequest, *, limit: int = 3) -> int:
        return limit


an_object = Callable()


def open_ended(request: RewardRequest, **options: Any) -> float:
    return float(len(options))


def where(request: RewardRequest) -> float:
    return float(threading.current_thread() is threading.main_thread())


def hangs(request: RewardRequest) -> float:
    release.wait()
    return 0.0


def result_of_label(request: RewardRequest) -> Any:
    return request.label


def raises(request: RewardRequest) -> float:
    raise request.label


def no_request(*, bonus: float = 0.0) -> float:
    return bonus


not_callable = 3


@pytest.mark.parametrize(
    ("name", "options", "want"),
    [
        ("digits", {}, 1.0),
        ("exact", {"strip": False}, 1.0),
        ("math_answer", {"format_weight": 0}, {"score": 1.0, "correct": 1.0, "format": 0.0}),
        (f"{HERE}:plain", {"bonus": 1}, 3.0),
        (f"{HERE}:plain", {"bonus": 1, "in_thread": False}, 3.0),
        (f"{HERE}:waiting", {"url": "abc"}, {"score": 1.0, "length": 3.0}),
        (f"{HERE}:an_object", {"limit": 4}, 4.0),
        (f"{HERE}:open_ended", {"a": 1, "b": 2}, 2.0),
    ],
)
async def test_a_reward_gives_numbers(name: str, options: dict[str, Any], want: object) -> None:
    assert await load(name, options)(REQUEST) == want


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digit", ["'digit'", "nearest: 'digits'", "math_answer"]),
        ("no.such.module:f", ["cannot import no.such.module"]),
        (f"{HERE}:plane", ["no 'plane'", "nearest: 'plain'"]),
        (f"{HERE}:not_callable", ["want a callable", "int"]),
        (f"{HERE}:no_request", ["first parameter"]),
    ],
)
def test_an_unknown_reward_is_named_with_the_nearest(name: str, words: list[str]) -> None:
    with pytest.raises(UnknownReward) as raised:
        load(name)
    for word in words:
        assert word in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "math_answer",
            {"format_wait": 1},
            ["reward_options.format_wait", "nearest: 'format_weight'", "correct_weight"],
        ),
        ("digits", {"bonus": 1}, ["reward_options.bonus", "no such option"]),
        ("digits", {"request": 1}, ["reward_options.request", "no such option"]),
        (f"{HERE}:waiting", {}, ["reward_options.url", "missing"]),
        ("math_answer", {"format_weight": "0.1"}, ["format_weight", "want a number", "'0.1'"]),
        ("exact", {"strip": 1}, ["strip", "want true or false"]),
        (f"{HERE}:an_object", {"limit": True}, ["limit", "want a whole number"]),
        (f"{HERE}:plain", {"in_thread": "yes"}, ["in_thread", "'yes'"]),
    ],
)
def test_a_wrong_option_is_named_with_the_nearest(name: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadRewardOption) as raised:
        load(name, options)
    for word in words:
        assert word in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize("label", ["1", 2, True, {"score": "3"}])
async def test_what_can_be_a_number_is_one(label: object) -> None:
    result = await load(f"{HERE}:result_of_label")(
        RewardRequest(prompt="", response="", label=label, status=Status.COMPLETED)
    )
    assert all(type(value) is float for value in (result.values() if isinstance(result, dict) else [result]))


BAD_RESULTS: list[Any] = [
    *(None, "x", [1.0], {}, {"score": None}),
    *(float("nan"), float("inf"), -1e39, 1.001 * MAX_REWARD, 10**400),
    *({"score": float("nan")}, {"score": 0.0, "time": 1e7}, {"a": 0.6 * MAX_REWARD, "b": 0.6 * MAX_REWARD}),
]


@pytest.mark.parametrize("label", BAD_RESULTS, ids=lambda label: str(label)[:20])
async def test_a_result_that_is_no_number_fails(label: object) -> None:
    with pytest.raises(RewardFailed):
        await load(f"{HERE}:result_of_label")(
            RewardRequest(prompt="", response="", label=label, status=Status.COMPLETED)
        )


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("error", [KeyError("judge"), SystemExit(1), StopIteration()], ids=repr)
async def test_whatever_a_reward_raises_is_the_reason_of_its_failure(error: BaseException, in_thread: bool) -> None:
    request = RewardRequest(prompt="", response="", label=error, status=Status.COMPLETED)
    with pytest.raises(RewardFailed) as failed:
        await load(f"{HERE}:raises", {"in_thread": in_thread})(request)
    line = inspect.getsourcelines(raises)[1] + len(inspect.getsource(raises).splitlines()) - 1
    assert failed.value.reason == f"{error!r} ({__file__}, line {line})" and failed.value.__cause__ is error


@pytest.mark.parametrize("in_thread", [True, False])
async def test_a_reward_without_an_answer_in_time_is_no_other_failure(in_thread: bool) -> None:
    request = RewardRequest(prompt="", response="", label=TimeoutError(), status=Status.COMPLETED)
    with pytest.raises(TimeoutError):
        await load(f"{HERE}:raises", {"in_thread": in_thread})(request)


async def test_only_foreign_plain_rewards_run_in_a_thread_by_default() -> None:
    assert await load(f"{HERE}:where")(REQUEST) == 0.0
    assert await load(f"{HERE}:where", {"in_thread": False})(REQUEST) == 1.0


async def test_a_reward_that_hangs_in_its_thread_blocks_no_other_call() -> None:
    score = load(f"{HERE}:hangs")
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await score(REQUEST)
        hanging = [asyncio.ensure_future(score(REQUEST)) for _ in range(255)]
        await turn()
        with refusal(RewardFailed, outside=True, reason=re.compile("^256 ")):
            await score(REQUEST)
    finally:
        release.set()
    assert await asyncio.gather(*hanging) == [0.0] * 255
    assert await score(REQUEST) == 0.0


@pytest.mark.parametrize("name", sorted(TABLE.keys() - UNBOUNDED))
def test_rewards_of_the_event_loop_are_plain_functions(name: str) -> None:
    """They have no time limit, which could not end them; one that waits would need it."""
    function = find_object(TABLE[name])
    assert inspect.isfunction(function) and not inspect.iscoroutinefunction(function)
