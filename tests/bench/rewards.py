"""Samples/s per core of each reward that ships, beside a reference: a library, plain calls of the same server, or the
definition in Python.

python -m tests.bench.rewards [--seconds 0.2] [--lines 50] [--names gsm8k,math]

A response is a solution of GSM8K's test split in the notation that the reward reads, with the gold answer as label, and
a response with a wrong one; both count. ``math:latex`` has the answers of ``tests/data/reward_references.jsonl``, with
fractions, intervals, sets and expressions, and so has ``math:rest``, with the option ``rest: math_verify``; ``code``
has programs, each with two tests. Reward and reference score the same responses in turn, the processor time of their
child processes included; their results are compared. ``relative_length`` scores groups of eight.

``judge``, ``remote`` and ``reward_model`` ask a local server, a process of its own, 16 calls at a time; the reference
posts the same JSON with aiohttp alone. Only this process's time counts there.

At the end, the way of a call: to an empty function in child processes, for responses of 1 kB and 100 kB, one call at a
time (latency) and 64 at a time, and likewise to a scorer, a process with the reward ``length``, by HTTP.
"""

import argparse
import asyncio
import functools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from tests.bench import plain_rewards as plain
from tidemill import launch
from tidemill.actors.actor.sample_scoring import RemoteScoring, ScorerClient, ScorerPool
from tidemill.actors.engines.server_discovery import ServerStatus
from tidemill.bus.keys import Keys, RunKeys
from tidemill.bus.system.coroutines import beside
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Status
from tidemill.bus.wire.task_settings import BY_ROLLOUT
from tidemill.rewards import group
from tidemill.rewards.port import RewardRequest, fields_of
from tidemill.rewards.registry import bind
from tidemill.rewards.scorers import opened

ROUNDS = 3
"""Measurements of each side, in turn; the median counts."""
AT_ONCE = 16
"""Calls of a server at a time."""
UNMEASURED = {
    BY_ROLLOUT: "it computes nothing: it raises for a response without a reward",
    "sentence": "no other system has it",
}
"""Rewards without a row, with the reason."""
IFEVAL_RULES = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words", "keywords:frequency"],
    "kwargs": [
        {},
        {"relation": "less than", "num_words": 300},
        {"keyword": "the", "relation": "at least", "frequency": 1},
    ],
}
IFBENCH_RULES = {
    "instruction_id_list": ["count:word_count_range", "count:numbers", "words:repeats"],
    "kwargs": [{"min_words": 20, "max_words": 120}, {"N": 8}, {"small_n": 6}],
}
ADDED = "```python\nprint(sum(map(int, input().split())))\n```"
"""A program that passes its tests; with ``max`` instead of ``sum`` it does not."""


# ---- responses


def solutions(lines: int, write: str = "#### {}", *, label: str = "", **more: Any) -> list[RewardRequest]:
    """Return a right and a wrong response for each of so many questions of GSM8K; ``label`` takes the place of the gold
    answer.
    """
    found = []
    for line in (Path(launch.__file__).parent / "data/gsm8k/test.jsonl").read_text().splitlines()[:lines]:
        solution, _, gold = json.loads(line)["answer"].rpartition("#### ")
        for answer in ("A", "B") if label else (gold, f"{gold}1"):
            response = solution + write.format(answer)
            tokens = len(response) // 4
            asked = RewardRequest(
                prompt="q",
                response=response,
                label=label or gold,
                status=Status.COMPLETED,
                response_length=tokens,
                sampled_length=tokens,
                **more,
            )
            found.append(asked)
    return found


def answers(lines: int) -> list[RewardRequest]:
    """Return gold answers alone, as labels and responses."""
    return [_request(str(one.label) + wrong, one.label) for one in solutions(lines)[::2] for wrong in ("", "1")]


def formed(lines: int) -> list[RewardRequest]:
    """Return solutions as thoughts in tags, with a right form and a wrong one."""
    found = [(one.response, one.label) for one in solutions(lines)[::2]]
    return [
        _request(f"<think>{text}</think>{tag}{gold}</answer>", gold) for text, gold in found for tag in ("<answer>", "")
    ]


def latex(lines: int) -> list[RewardRequest]:
    """Return the answers in LaTeX on which the tests compare ``math`` with its reference."""
    rows = map(json.loads, (Path(__file__).parents[1] / "data/reward_references.jsonl").read_text().splitlines())
    return [
        _request(row["response"], row["label"])
        for row in rows
        if row["reward"] == "math" and "\\boxed" in row["response"]
    ][: 2 * lines]


def programs(lines: int) -> list[RewardRequest]:
    """Return programs that read two numbers, at most four of them."""
    tests = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3", "34"]}
    return [_request(f"So:\n{text}", tests) for text in (ADDED, ADDED.replace("sum", "max"))] * min(lines, 2)


def groups(lines: int) -> list[group.GroupRequest]:
    """Return groups of at most eight solutions with their rewards."""
    found = [solutions(lines)[first : first + 8] for first in range(0, 2 * lines, 8)]
    return [
        group.GroupRequest(samples=tuple(one), rewards=tuple(float(place % 2 == 0) for place in range(len(one))))
        for one in found
    ]


def _request(response: str, label: Any) -> RewardRequest:
    return RewardRequest(prompt="q", response=response, label=label, status=Status.COMPLETED)


# ---- rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A reward that is called here, with its responses and its reference."""

    work: Callable[[int], Sequence[Any]]
    """Makes the responses from the number of lines of GSM8K."""
    options: dict[str, Any] = field(default_factory=dict)
    reference: Callable[[Any], Any] | None = None
    against: str = "the definition"


def _gsm8k(write: str = "#### {}", **more: Any) -> Callable[[int], Sequence[Any]]:
    return functools.partial(solutions, write=write, **more)


LIBRARY = "math-verify"
ROWS: dict[str, Row] = {
    "code": Row(
        work=programs, options={"seconds": 60.0}, reference=plain.code, against="an interpreter without a sandbox"
    ),
    "dapo": Row(work=_gsm8k("Answer: {}"), reference=plain.dapo),
    "deepscaler": Row(work=_gsm8k(r"</think> \boxed{{{}}}"), reference=plain.math_verify, against=LIBRARY),
    "digits": Row(work=answers),
    "exact": Row(work=answers, reference=plain.exact),
    "f1": Row(work=_gsm8k(), reference=plain.f1),
    "format": Row(work=formed, reference=plain.format_tags),
    "gpqa": Row(work=_gsm8k("The answer is ({}).", label="A"), reference=plain.gpqa),
    "gsm8k": Row(work=_gsm8k(), reference=plain.gsm8k),
    "ifeval": Row(work=_gsm8k(metadata=IFEVAL_RULES), reference=plain.ifeval),
    "ifeval:ifbench": Row(work=_gsm8k(metadata=IFBENCH_RULES), reference=plain.ifbench),
    "length": Row(work=_gsm8k(), options={"target": 100}),
    "math": Row(work=_gsm8k(r"\boxed{{{}}}"), reference=plain.math_verify, against=LIBRARY),
    "math:latex": Row(work=latex, reference=plain.math_verify, against=LIBRARY),
    "math:rest": Row(work=latex, options={"rest": "math_verify"}, reference=plain.math_verify, against=LIBRARY),
    "math_answer": Row(
        work=_gsm8k(), options={"format_weight": 0.0}, reference=plain.gsm8k, against="GSM8K's definition"
    ),
    "math_verify": Row(work=_gsm8k(r"\boxed{{{}}}"), reference=plain.math_verify, against=LIBRARY),
    "overlong": Row(
        work=_gsm8k(),
        options={"max_tokens": 100, "buffer": 50},
        reference=functools.partial(plain.overlong, max_tokens=100, buffer=50),
    ),
    "regex": Row(
        work=_gsm8k(),
        options={"pattern": r"#### (\S+)", "group": "1"},
        reference=functools.partial(plain.regex, pattern=r"#### (\S+)"),
        against="re.findall",
    ),
    "relative_length": Row(work=groups, reference=plain.relative_length),
    "repetition": Row(work=_gsm8k(), options={"ngram": 3}, reference=functools.partial(plain.repetition, ngram=3)),
}
"""Rows by the name of the reward, with ``:`` and a word where there are several."""


def _chat(request: RewardRequest) -> object:
    return {
        "model": "m",
        "max_tokens": 1024,
        "temperature": 0.0,
        "messages": [{"role": "user", "content": request.response}],
    }


ASKED: dict[str, tuple[dict[str, Any], Callable[[RewardRequest], object]]] = {
    "judge": ({"model": "m", "template": "{response}"}, _chat),
    "remote": ({}, fields_of),
    "reward_model": ({}, lambda request: {"text": f"{request.prompt}{request.response}"}),
}
"""Rewards that ask a server: options without the URL, and the JSON that they send."""
ANSWER = {"reward": 1.0, "choices": [{"message": {"role": "assistant", "content": "Score: 10"}}], "embedding": [1.0]}
"""The answer of the server, which is one for each of them."""


# ---- measuring


def measure(name: str, seconds: float, lines: int) -> str:
    """Measure a row; ``seconds`` are those of each side. Returns its line."""
    row = ROWS[name]
    reward = name.partition(":")[0]
    ours = bind(reward, row.options, group.GROUP) if reward in group.TABLE else bind(reward, row.options)
    work = row.work(lines)
    if row.reference is None:
        return _line(name, per_second(ours, work, seconds), "no reference")
    results = [[plain.score(side(one)) for one in work] for side in (ours, row.reference)]
    same = sum(one == other for one, other in zip(*results, strict=True))
    rate, other = (
        statistics.median(rates) for rates in zip(*_in_turn(ours, row.reference, work, seconds), strict=True)
    )
    return _line(
        name,
        rate,
        f"ratio {rate / other:.2f} to {row.against} ({other:,.0f}); {same} of {len(work)} results are the same",
    )


def _in_turn(
    ours: Callable[[Any], Any], other: Callable[[Any], Any], work: Sequence[Any], seconds: float
) -> list[tuple[float, float]]:
    return [
        (per_second(ours, work, seconds / ROUNDS), per_second(other, work, seconds / ROUNDS)) for _ in range(ROUNDS)
    ]


def _line(name: str, rate: float, what: str) -> str:
    return f"{name:<16} {rate:>10,.0f} samples/s per core {1e6 / rate:>9,.1f} us each   {what}"


def per_second(reward: Callable[[Any], Any], work: Sequence[Any], seconds: float) -> float:
    """Return the samples that are scored in a second of processor time, that of child processes that have ended
    included.
    """
    done, begin = 0, cpu_s()
    while (took := cpu_s() - begin) < seconds or not done:
        for one in work:
            reward(one)
        done += len(work)
    return done / max(took, 1e-9)


def cpu_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


async def ask(url: str, name: str, seconds: float, lines: int) -> str:
    """Measure a reward that asks a server beside plain posts of the same JSON. Returns its line."""
    (options, body), work = ASKED[name], solutions(lines)
    reward = bind(name, {"url": url, **options}).function

    async with ClientSession() as session:

        async def post(request: RewardRequest) -> float:
            """Post the same JSON, and read the JSON of the answer."""
            async with session.post(url, json=body(request)) as response:
                await response.json()
            return 1.0

        try:
            same = sum([plain.score(await reward(one)) == 1.0 for one in work])
            rates = [
                [await calls_per_second(side, work, seconds / ROUNDS) for side in (reward, post)] for _ in range(ROUNDS)
            ]
        finally:
            await reward._calls.close()
    rate, other = (statistics.median(side) for side in zip(*rates, strict=True))
    what = f"ratio {rate / other:.2f} to plain posts by aiohttp ({other:,.0f}); {same} of {len(work)} results are right"
    return f"{name:<16} {rate:>10,.0f} calls/s per core   {1e6 / rate:>9,.1f} us each   {what}"


async def calls_per_second(
    call: Callable[[RewardRequest], Awaitable[object]], work: Sequence[RewardRequest], seconds: float
) -> float:
    """Return the calls for which a second of this process's time suffices, ``AT_ONCE`` at a time."""
    done, begin = 0, time.process_time()
    while (took := time.process_time() - begin) < seconds or not done:
        for first in range(0, len(work), AT_ONCE):
            await asyncio.gather(*(call(one) for one in work[first : first + AT_ONCE]))
        done += len(work)
    return done / max(took, 1e-9)


def serve() -> None:
    """Run the server that gives ``ANSWER`` to each POST, and print its URL, until it is ended."""

    async def handle(http: web.Request) -> web.Response:
        await http.read()
        return web.json_response(ANSWER)

    async def run() -> None:
        application = web.Application()
        application.router.add_post("/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


@asynccontextmanager
async def served(*arguments: str) -> AsyncIterator[tuple[str, int]]:
    """Run a Python program while entered; yields the last word of its first line, a URL, and its process id."""
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().split()[-1], process.pid
    finally:
        process.terminate()
        await process.wait()


# ---- the way of a call


def nothing(request: RewardRequest) -> float:
    """Score nothing: only the path of a call is measured."""
    return 0.0


async def children(size: int, at_once: int, seconds: float) -> tuple[float, float]:
    """Return the calls of ``nothing`` in children per second, and the seconds of this process's core that each
    takes.
    """
    request = _request("x" * size, "7")
    async with opened("tests.bench.rewards:nothing", {}, ProcessLimits(workers=min(at_once, 2))) as score:
        await asyncio.gather(*(score(request) for _ in range(2)))
        begin, cpu_s, done = time.monotonic(), time.process_time(), 0
        while (took := time.monotonic() - begin) < seconds or not done:
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


async def scorer(url: str, pid: int, size: int, at_once: int, seconds: float) -> tuple[float, float, float]:
    """Return calls of a scorer per second, and the seconds of this process's core and of the scorer's that each
    takes.
    """
    request = _request("x" * size, "7")
    pool = ScorerPool(OneScorer(url), lambda url: ScorerClient(url, RunKeys.fixed(Keys())))
    remote = RemoteScoring(pool)
    async with beside(pool.run()):
        await asyncio.gather(*(remote.score(request) for _ in range(at_once)))
        begin, cpu_s, theirs_s, done = time.monotonic(), time.process_time(), _cpu_s(pid), 0
        while (took := time.monotonic() - begin) < seconds or not done:
            await asyncio.gather(*(remote.score(request) for _ in range(at_once)))
            done += at_once
        return done / took, (time.process_time() - cpu_s) / done, (_cpu_s(pid) - theirs_s) / done


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ways(seconds: float) -> None:
    """Print the cost of a call in child processes and of one to a scorer."""
    kinds = [(size, at_once) for size in (1_000, 100_000) for at_once in (1, 64)]
    for size, at_once in kinds:
        rate, cpu_s = await children(size, at_once, seconds)
        what = f"{size:,} characters, {at_once} at a time"
        print(
            f"children       {rate:>10,.0f} calls/s, {1e6 * cpu_s:,.0f} us of the actor's core each: {what}, "
            "at most 2 workers"
        )
    async with served("-m", "tidemill", "reward-server", "length", "--option", "target=100", "--port", "0") as (
        url,
        pid,
    ):
        for size, at_once in kinds:
            rate, cpu_s, theirs_s = await scorer(url.removesuffix("/score"), pid, size, at_once, seconds)
            what = f"{size:,} characters, {at_once} at a time"
            print(
                f"scorer         {rate:>10,.0f} calls/s, {1e6 * cpu_s:,.0f} and {1e6 * theirs_s:,.0f} us of "
                f"both cores: {what}"
            )


async def asking(names: Sequence[str], seconds: float, lines: int) -> None:
    """Print the lines of rewards that ask a server."""
    async with served("-m", "tests.bench.rewards", "--serve") as (url, _):
        for name in names:
            print(await ask(url, name, seconds, lines), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench rewards")
    parser.add_argument("--seconds", type=float, default=0.2, help="processor time of each side of a row")
    parser.add_argument("--lines", type=int, default=50, help="questions of GSM8K; each has two responses")
    parser.add_argument("--names", default="", help="some of the rows, without the way of a call; default all")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
    names = args.names.split(",") if args.names else [*ROWS, *ASKED]
    if unknown := sorted(set(names) - ROWS.keys() - ASKED.keys()):
        raise SystemExit(f"bench rewards: want names of {', '.join([*ROWS, *ASKED])}, got {', '.join(unknown)}")
    for name in names:
        if name in ROWS:
            print(measure(name, args.seconds, args.lines), flush=True)
    asyncio.run(asking([name for name in names if name in ASKED], args.seconds, args.lines))
    for name, reason in UNMEASURED.items():
        print(f"{name:<16} not measured: {reason}")
    if not args.names:
        asyncio.run(ways(args.seconds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
