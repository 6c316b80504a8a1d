"""Rewards in child processes: results, and every way to fail, none of which stops the event loop or leaves a
process.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import waited_for_a_core_s
from tests.waits import LIMIT_S, turn, until
from tidemill.bus.system.limits import ProcessLimits, children_of
from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import BadRewardOption, RewardFailed, UnknownReward
from tidemill.rewards.port import RewardRequest, Scorer
from tidemill.rewards.processes import function_processes
from tidemill.rewards.processes.function_processes import KeeperProcess
from tidemill.rewards.registry import REWARD
from tidemill.rewards.scorers import opened

HERE = "tests.child_rewards"
LIMITS = ProcessLimits(timeout_s=LIMIT_S, workers=3)
BRIEF = ProcessLimits(timeout_s=0.5, workers=3)
"""For calls that never end; others are tried again (``surely``), as a busy machine may take longer."""


def request(response: str, label: Any = None, **more: Any) -> RewardRequest:
    return RewardRequest(**{"prompt": "p", "response": response, "label": label, "status": Status.COMPLETED, **more})


@asynccontextmanager
async def scoring(function: str, limits: ProcessLimits = LIMITS, **options: Any) -> AsyncIterator[Scorer]:
    """Give the scorer; afterwards nothing that it has started is left."""
    before = children_of({os.getpid()})  # servers of other tests
    async with opened(f"{HERE}:{function}", options, limits) as score:
        yield score
    assert children_of({os.getpid()}) <= before


async def surely(score: Scorer, response: str) -> object:
    """Return the reward of a response that takes no time."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(TimeoutError):
                return await score(request(response))


async def gone(*pids: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


async def test_a_start_that_is_cancelled_twice_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time while the process, which hangs in its import, is waited for."""
    (tmp_path / "hangs_when_imported.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    started: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
    start = asyncio.create_subprocess_exec

    async def noting(*command: Any, **settings: Any) -> asyncio.subprocess.Process:
        process = await start(*command, **settings)
        started.put_nowait(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noting)
    starting = asyncio.create_task(KeeperProcess.start("hangs_when_imported:f", {}, LIMITS, REWARD))
    process = await started.get()
    for _ in range(2):
        starting.cancel()
        await turn(5)
    await asyncio.wait({starting})
    assert starting.cancelled()
    async with asyncio.timeout(LIMIT_S):
        assert await process.wait() == -signal.SIGKILL


async def test_a_reward_gets_the_whole_request_and_its_options() -> None:
    async with scoring("length", bonus=0.5) as score:
        assert await asyncio.gather(*(score(request("x" * n)) for n in range(20))) == [n + 0.5 for n in range(20)]
    async with scoring("echo") as score:
        found = await score(
            request(
                "\ud800\x00é" * 100_000,
                {"gold": 4},
                status=Status.TRUNCATED,
                tokens=np.array([1, 2, 70_000], np.int32),
                metadata={"n": 7},
                prompt=[{"role": "user", "content": "q"}],
            )
        )
    assert found == {
        "response": 300_000.0,
        "tokens": 70_003.0,
        "metadata": 7.0,
        "prompt": 1.0,
        "label": 4.0,
        "truncated": 1.0,
    }


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        (f"{HERE}:nothing", {}, UnknownReward, "has no 'nothing'"),
        ("tests.no_such_module:f", {}, UnknownReward, "cannot import tests.no_such_module"),
        ("exat", {}, UnknownReward, "nearest: 'exact'"),
        (f"{HERE}:length", {"bonos": 1}, BadRewardOption, "nearest: 'bonus'"),
        (f"{HERE}:length", {"bonus": {1, 2}}, BadRewardOption, "JSON"),
    ],
)
async def test_a_reward_that_cannot_be_loaded_is_refused_at_the_start(
    name: str, options: Any, error: type, words: str
) -> None:
    before = children_of({os.getpid()})
    with pytest.raises(error, match=words):
        async with opened(name, options, LIMITS):
            pass
    assert children_of({os.getpid()}) <= before


async def test_every_way_to_fail_is_a_reason_and_the_next_call_is_scored() -> None:
    reasons = {
        "raise": r"KeyError\('judge'\)",
        "exit": r"SystemExit\(3\)",
        "leave": "its process exited with code 7",
        "abort": "its process was killed by SIGABRT",
        "memory": "MemoryError",
        "large": "a result of .* bytes",
        "rubbish": "its process wrote no JSON",
        "huge": "its process wrote a result of 2147483647 bytes",
        "keeper": "its keeper process ended",
    }
    async with scoring("misbehaves") as score:
        for response, words in reasons.items():
            with pytest.raises(RewardFailed, match=words):
                await score(request(response))
            assert await score(request("ok")) == 1.0, response


@pytest.mark.parametrize(
    "label", [None, "x", [1.0], {}, {"score": None}, float("nan"), -1e39, {"score": 0.0, "time": 1e7}]
)
async def test_a_result_that_is_no_number_fails(label: object) -> None:
    async with scoring("of_label") as score:
        with pytest.raises(RewardFailed):
            await score(request("", label))


async def test_a_built_in_reward_that_can_take_long_runs_in_children() -> None:
    async with opened("regex", {"pattern": "(a+)+b"}, BRIEF) as score:
        assert await surely(score, "xab") == 1.0
        with pytest.raises(TimeoutError):
            await score(request("a" * 60))


async def test_a_label_that_json_lacks_fails() -> None:
    async with scoring("of_label") as score:
        with pytest.raises(RewardFailed, match="JSON"):
            await score(request("", b"bytes"))


async def test_a_regular_expression_that_backtracks_does_not_stop_the_event_loop() -> None:
    """The least of three measurements counts: a busy machine stops the loop, too, but not each time."""
    for _ in range(3):
        if (longest := await _longest_stop_s()) < 0.2:
            break
    assert longest < 0.2


async def _longest_stop_s() -> float:
    """Return the longest time between two turns of the event loop while four calls backtrack."""
    longest, last, ended = 0.0, 0.0, asyncio.Event()

    def now() -> float:
        """Return seconds, without those in which this thread wanted a core and had none."""
        return time.monotonic() - waited_for_a_core_s()

    async def beat() -> None:
        nonlocal longest, last
        while not ended.is_set():
            await asyncio.sleep(0.01)
            longest, last = max(longest, now() - last), now()

    async with scoring("backtracks", BRIEF) as score, asyncio.TaskGroup() as group:
        await surely(score, "b")
        last = now()
        group.create_task(beat())
        found = await asyncio.gather(*(score(request("a" * 60)) for _ in range(4)), return_exceptions=True)
        ended.set()
    assert [type(error) for error in found] == [TimeoutError] * 4
    return longest


@pytest.mark.parametrize("response", ["hang", "ignore"])
async def test_a_call_past_its_limit_is_killed_and_others_are_scored(response: str) -> None:
    async with scoring("misbehaves", BRIEF) as score:
        first = int(await surely(score, "pid"))  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            await score(request(response))
        await gone(first)
        assert await surely(score, "ok") == 1.0


async def test_a_call_that_is_cancelled_is_killed() -> None:
    async with scoring("misbehaves") as score:
        first = int(await score(request("pid")))  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await score(request("hang"))
        await gone(first)


async def test_processes_that_a_reward_has_started_end_with_it_in_whatever_session(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    async with scoring("leaves_processes", ProcessLimits(timeout_s=30.0), file=str(file)) as score:
        call = asyncio.ensure_future(score(request("")))
        async with asyncio.timeout(LIMIT_S):
            await until(lambda: file.exists() and file.read_text().endswith("\n"))
        pids = [int(pid) for pid in file.read_text().split()]
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)  # noqa: ASYNC240
        call.cancel()
        await gone(*pids)


async def test_the_credentials_of_the_bus_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEMILL_PASSWORD", "NATS_PASSWORD", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    async with scoring("environment") as score:
        assert [await score(request(name)) for name in ("TIDEMILL_PASSWORD", "NATS_PASSWORD", "JUDGE_KEY")] == [
            0.0,
            0.0,
            1.0,
        ]


async def test_a_module_with_threads_is_imported_anew_by_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scoring("own_interpreter") as score:
        assert await score(request("")) == 0.0
    monkeypatch.setenv("CHILD_REWARDS_THREAD", "1")
    async with scoring("own_interpreter") as score:
        assert await score(request("")) == 1.0


async def test_calls_of_an_async_reward_share_a_process_and_one_that_blocks_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with scoring("counted", ProcessLimits(timeout_s=60.0, workers=3)) as score:
        assert [await score(request("")) for _ in range(3)] == [1.0, 2.0, 3.0]
        with monkeypatch.context() as patch:
            patch.setattr(function_processes, "CANCEL_S", 60.0)  # a busy machine is late with the confirmation, too
            waiting, behind = asyncio.ensure_future(score(request("wait"))), asyncio.ensure_future(score(request("")))
            assert await behind == 5.0, "the call that waits has begun"
            waiting.cancel()
            await asyncio.wait({waiting})
        assert await score(request("")) == 6.0, "a call that waits is cancelled, and costs no other"
        blocking, begun = asyncio.ensure_future(score(request("block", str(tmp_path / "begun")))), tmp_path / "begun"
        async with asyncio.timeout(120):
            await until(begun.exists)
            blocking.cancel()
            await asyncio.wait({blocking})
            while True:
                try:
                    count = await score(request(""))
                    assert isinstance(count, float) and count < 6.0, "a new process"
                    return
                except RewardFailed:  # the loop is blocked until the process is killed
                    continue


async def test_a_function_that_prints_does_not_fail_because_the_disk_of_the_log_is_full() -> None:
    before, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    try:
        async with scoring("loud") as score:
            assert await score(request("abc")) == 1.0
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(full)
