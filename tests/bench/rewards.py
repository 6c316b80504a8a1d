"""Samples/s per core of each reward that ships, ``math`` against the library math-verify, and a reward by import path in child processes.

python -m tests.bench.rewards [--seconds 1.0] [--names gsm8k,math]

A response is a solution of GSM8K's test split in the notation that the reward reads, with the gold answer as label, and a response with a
wrong one; both count. The reward of a child is an empty function: its figure is the cost of the way there and back, for responses of 1 kB
and 100 kB, one call at a time (latency) and 64 at a time. Likewise the way to a scorer, a process with the reward ``length``, by HTTP.

``math`` and the reward ``math_verify``, which calls math-verify, score the same answers in turn, in this process: those of GSM8K, and those
of ``tests/data/reward_references.jsonl``, with fractions, intervals, sets and expressions. Their verdicts are compared.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import launch
from actors.engines.server_pool import ServerStatus
from actors.scoring.scorer_pool import RemoteScoring, ScorerClient, ScorerPool
from bus.liveness.keys import Keys, RunKeys
from bus.system.coroutines import beside
from bus.wire.messages import Status
from rewards.children.limits import Limits
from rewards.port import RewardRequest
from rewards.registry import ASKING, TABLE, bind
from rewards.scorers.single import opened

ROUNDS = 3
"""Measurements of each side, in turn; the median counts."""
OPTIONS: dict[str, dict[str, Any]] = {
    "overlong": {"max_tokens": 200, "buffer": 50},
    "regex": {"pattern": r"#### (\S+)", "group": "1"},
    "length": {"target": 100},
}
NOTATIONS = {"math": r"\boxed{{{}}}", "deepscaler": r"</think> \boxed{{{}}}", "dapo": "Answer: {}", "gpqa": "The answer is ({})."}
RULES = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words", "keywords:frequency"],
    "kwargs": [{}, {"relation": "less than", "num_words": 300}, {"keyword": "the", "relation": "at least", "frequency": 1}],
}


def requests(name: str, count: int = 200) -> list[RewardRequest]:
    """Return right and wrong responses for a reward."""
    found = []
    for line in (Path(launch.__file__).parent / "data/gsm8k/test.jsonl").read_text().splitlines()[:count]:
        solution, _, gold = json.loads(line)["answer"].rpartition("#### ")
        for answer in ("A", "B") if name == "gpqa" else (gold, f"{gold}1"):
            label = "A" if name == "gpqa" else gold
            response = solution + NOTATIONS.get(name, "#### {}").format(answer)
            request = RewardRequest(
                prompt="q", response=response, label=label, status=Status.COMPLETED, metadata=RULES, response_length=len(response) // 4
            )
            found.append(request)
    return found


def references() -> list[RewardRequest]:
    """Return the answers in LaTeX on which the tests compare ``math`` with its reference."""
    rows = map(json.loads, (Path(__file__).parents[1] / "data/reward_references.jsonl").read_text().splitlines())
    found = [
        RewardRequest(prompt="q", response=r["response"], label=r["label"], status=Status.COMPLETED) for r in rows if r["reward"] == "math"
    ]
    return [request for request in found if "\\boxed" in request.response]


def against_math_verify(seconds: float) -> None:
    """Print the speed of ``math`` over that of math-verify on the same answers, and how many verdicts are the same."""
    for what, work in (("GSM8K", requests("math")), ("LaTeX", references())):
        verdicts = {name: [_score(name, request) for request in work] for name in ("math", "math_verify")}
        same = sum(ours == theirs for ours, theirs in zip(*verdicts.values(), strict=True))
        rates: dict[str, list[float]] = {name: [] for name in verdicts}
        for _ in range(ROUNDS):
            for name, found in rates.items():
                found.append(per_second(name, seconds / ROUNDS, work))
        ours, theirs = (statistics.median(found) for found in rates.values())
        print(f"math / math-verify, {what}: {ours:,.0f} and {theirs:,.0f} samples/s per core, ratio {ours / theirs:.1f}; ", end="")
        print(f"{same} of {len(work)} verdicts are the same")


def _score(name: str, request: RewardRequest) -> float:
    found: Any = bind(name)(request)
    return float(found["score"] if isinstance(found, dict) else found)


def per_second(name: str, seconds: float, work: list[RewardRequest] | None = None) -> float:
    """Return the samples that one core scores in a second of its own time; ``work``: None = those of the reward."""
    reward, work, done = bind(name, OPTIONS.get(name)), work or requests(name), 0
    begin = time.process_time()
    while (took := time.process_time() - begin) < seconds:
        for request in work:
            reward(request)
        done += len(work)
    return done / took


def nothing(request: RewardRequest) -> float:
    """Score nothing: only the path of a call is measured."""
    return 0.0


async def children(size: int, at_once: int, seconds: float) -> tuple[float, float]:
    """Return the calls of ``nothing`` in children per second, and the seconds of this process's core that each takes."""
    request = RewardRequest(prompt="q", response="x" * size, label="7", status=Status.COMPLETED)
    async with opened("tests.bench.rewards:nothing", {}, Limits(workers=min(at_once, 2))) as score:
        await asyncio.gather(*(score(request) for _ in range(2)))
        begin, cpu_s, done = time.monotonic(), time.process_time(), 0
        while (took := time.monotonic() - begin) < seconds:
            await asyncio.gather(*(score(request) for _ in range(at_once)))
            done += at_once
        return done / took, (time.process_time() - cpu_s) / done


class OneScorer:
    """A discovery of one scorer at a fixed URL."""

    def __init__(self, url: str) -> None:
        self._status = ServerStatus(url=url, id="s", serving=True, version=-1)

    async def discover(self) -> list[ServerStatus]:
        """Return it."""
        return [self._status]

    def watch(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Return a context that never calls ``wake``."""
        return nullcontext()

    async def close(self) -> None:
        """Do nothing."""


async def scorer(size: int, at_once: int, seconds: float) -> tuple[float, float, float]:
    """Return calls of a scorer per second, and the seconds of this process's core and of the scorer's that each takes."""
    request = RewardRequest(prompt="q", response="x" * size, label="7", status=Status.COMPLETED)
    words = ("-m", "launch", "reward-server", "length", "--option", "target=100", "--port", "0")
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().split()[-1].removesuffix("/score")
        pool = ScorerPool(OneScorer(url), lambda url: ScorerClient(url, RunKeys.fixed(Keys())))
        remote = RemoteScoring(pool)
        async with beside(pool.run()):
            await asyncio.gather(*(remote.score(request) for _ in range(at_once)))
            begin, cpu_s, theirs_s, done = time.monotonic(), time.process_time(), _cpu_s(process.pid), 0
            while (took := time.monotonic() - begin) < seconds:
                await asyncio.gather(*(remote.score(request) for _ in range(at_once)))
                done += at_once
            return done / took, (time.process_time() - cpu_s) / done, (_cpu_s(process.pid) - theirs_s) / done
    finally:
        process.terminate()
        await process.wait()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench rewards")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--names", default=",".join(sorted(TABLE.keys() - ASKING)))
    args = parser.parse_args()
    for name in args.names.split(","):
        rate = per_second(name, args.seconds)
        print(f"{name:<14} {rate:>10,.0f} samples/s per core   {1e6 / rate:>8.1f} us each")
    against_math_verify(args.seconds)
    for size in (1_000, 100_000):
        for at_once in (1, 64):
            rate, cpu_s = asyncio.run(children(size, at_once, args.seconds))
            what = f"{size:,} characters, {at_once} at a time"
            print(f"children       {rate:>10,.0f} calls/s, {1e6 * cpu_s:,.0f} us of the actor's core each: {what}, at most 2 workers")
    for size in (1_000, 100_000):
        for at_once in (1, 64):
            rate, cpu_s, theirs_s = asyncio.run(scorer(size, at_once, args.seconds))
            what = f"{size:,} characters, {at_once} at a time"
            print(f"scorer         {rate:>10,.0f} calls/s, {1e6 * cpu_s:,.0f} and {1e6 * theirs_s:,.0f} us of both cores: {what}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
