"""``tidemill stats``: statistics of a window of samples. Reads headers alone, unless a filter needs payloads."""

import argparse
import asyncio
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import TypedDict

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.wire.messages import Kind
from tidemill.launch.cli.arguments import add_filter, add_run
from tidemill.launch.cli.find_run import look
from tidemill.launch.samples.filters import Headline, filter_of
from tidemill.launch.samples.search import SampleSearch, seconds

_REFRESH_S = 2.0
_LIMIT = 1_000_000
"""Maximum number of messages read for a window of a number of samples."""
_RIGHT = ("completed", "truncated")
"""Statuses of samples that count for groups."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_run(parser)
    parser.add_argument(
        "--window", default="5m", metavar="TIME|N", help="a time (5m) or a number of samples (default 5m)"
    )
    parser.add_argument(
        "--pass-reward", type=float, default=1.0, metavar="R", help="for pass@k: right means reward >= R (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("-f", "--follow", action="store_true", help="repeat every two seconds")
    add_filter(parser)


def run(args: argparse.Namespace) -> int:
    """Print statistics of the newest samples; with --follow until interrupted. Returns 0. Raises ValueError."""
    return look(args, show_stats)


class Statistics(TypedDict):
    """Numbers of a window of samples; shares are of the samples, None if there are none to count."""

    samples: int
    seconds: float
    samples_per_s: float | None
    tokens_per_s: float | None
    tokens: dict[str, float] | None
    """Mean, maximum and percentiles."""
    reward: dict[str, float] | None
    """Mean and standard deviation."""
    groups: int
    zero_variance_share: float | None
    pass_at: dict[str, float]
    status: dict[str, float]
    lag: dict[str, int]
    """Number of samples by lag."""
    actors: dict[str, float]
    engines: dict[str, float]


class WindowStatistics(Statistics):
    """The numbers with the run and the window they are of, as ``--json`` prints them."""

    run: str
    window: str


async def show_stats(bus: Bus, args: argparse.Namespace) -> int:
    """Print the statistics once, or with --follow until cancelled; return 0. Raises ValueError.

    The window of a run that is over ends with its newest sample.
    """
    filter = filter_of(args)
    search = SampleSearch(bus, replace(filter, kind=filter.kind or Kind.TRAIN.value))
    end_s = await (search.history.newest_s() if args.ended else search.history.now_s())
    window = await _Window.open(search, args.window, end_s)

    def now(now_s: float) -> WindowStatistics:
        """Return the statistics of the window at ``now_s`` (Unix time of the server, s)."""
        return {
            "run": bus.run,
            "window": args.window,
            **summarize(window.lines, window.seconds(now_s), pass_reward=args.pass_reward),
        }

    if args.follow and not args.ended:
        await first_of(window.grow(), _refresh(window, now, as_json=args.json))
    else:
        _print(now(end_s), as_json=args.json)
    return 0


async def _refresh(window: "_Window", now: Callable[[float], WindowStatistics], *, as_json: bool) -> None:
    """Background loop: print every ``_REFRESH_S`` seconds, in place on a terminal."""
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else nullcontext() as live:
        while True:
            now_s = await window.search.history.now_s()
            window.forget(now_s)
            if live is None:
                _print(now(now_s), as_json=as_json)
            else:
                live.update(as_table(now(now_s)), refresh=True)
            await asyncio.sleep(_REFRESH_S)


@dataclass(slots=True, kw_only=True)
class _Window:
    """The newest samples: the samples of a time span, or a number of them."""

    search: SampleSearch
    lines: deque[Headline]
    last_seq: int
    span_s: float | None = None
    """Length in seconds; None = a number of samples."""
    count: int | None = None
    whole: bool = False
    """True if it began with the first sample of the stream."""

    @classmethod
    async def open(cls, search: SampleSearch, window: str, end_s: float) -> "_Window":
        """Read the samples of a window that ends at ``end_s`` (Unix time of the server, s). Raises ValueError for other
        text.
        """
        if window.isdigit():
            matches, last_seq, _ = await search.newest(int(window), limit=_LIMIT, payloads=False)
            return cls(
                search=search, lines=deque(match.line for match in matches), last_seq=last_seq, count=int(window)
            )
        span_s = seconds("--window", window)
        state = await search.history.state()
        first = await search.history.at_time(end_s - span_s)
        lines = deque([match.line async for match in search.forward(first, state.last_seq, payloads=False)])
        return cls(search=search, lines=lines, last_seq=state.last_seq, span_s=span_s, whole=first <= state.first_seq)

    def seconds(self, now_s: float) -> float:
        """Return the length of the window up to now: from its first sample on, unless a time span cuts it."""
        if not self.lines:
            return self.span_s or 0.0
        since_first_s = max(0.0, now_s - self.lines[0].stored_s)
        return since_first_s if self.span_s is None or self.whole else self.span_s

    async def grow(self) -> None:
        """Background loop: add new samples."""
        async for match in self.search.forward(self.last_seq + 1, payloads=False):
            self.lines.append(match.line)

    def forget(self, now_s: float) -> None:
        """Remove samples that have left the window."""
        while self.count is not None and len(self.lines) > self.count:
            self.lines.popleft()
        while self.span_s is not None and self.lines and self.lines[0].stored_s < now_s - self.span_s:
            self.lines.popleft()
            self.whole = False


def pass_at_k(num: int, right: int, k: int) -> float:
    """Return the probability that at least one of k draws out of ``num`` samples, ``right`` of them right, is right; 1
    <= k <= num.

    Unbiased for the probability that one of k new samples is. Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    return 1.0 - math.comb(num - right, k) / math.comb(num, k)


def summarize(lines: Sequence[Headline] | deque[Headline], span_s: float, *, pass_reward: float = 1.0) -> Statistics:
    """Return all numbers of a window of ``span_s`` seconds."""
    tokens = [line.tokens for line in lines if line.tokens is not None]
    groups = complete_groups(lines)
    return {
        "samples": len(lines),
        "seconds": round(span_s, 3),
        "samples_per_s": len(lines) / span_s if span_s else None,
        "tokens_per_s": sum(tokens) / span_s if span_s else None,
        "tokens": _spread(tokens),
        "reward": _mean_std([line.reward for line in lines if line.reward is not None]),
        "groups": len(groups),
        "zero_variance_share": fmean(len(set(rewards)) == 1 for rewards in groups) if groups else None,
        "pass_at": {str(k): value for k, value in _pass(groups, pass_reward).items()},
        "status": _shares(line.status for line in lines),
        "lag": {
            str(lag): count
            for lag, count in sorted(Counter(line.lag for line in lines if line.lag is not None).items())
        },
        "actors": _shares(line.actor for line in lines),
        "engines": _shares(line.engine for line in lines),
    }


def complete_groups(lines: Iterable[Headline]) -> list[list[float]]:
    """Return the rewards of every complete group; of several samples of a place the first one in stream order
    counts.
    """
    places: dict[tuple[str, int], dict[int, float]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for line in lines:
        if (
            line.task is None
            or line.index is None
            or line.group_size is None
            or line.reward is None
            or line.status not in _RIGHT
        ):
            continue
        sizes[line.kind, line.task] = line.group_size
        places.setdefault((line.kind, line.task), {}).setdefault(line.index, line.reward)
    return [list(rewards.values()) for key, rewards in places.items() if len(rewards) == sizes[key]]


def _pass(groups: Sequence[Sequence[float]], reward: float) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ...: the mean over the groups with at least k samples."""
    pass_at: dict[int, float] = {}
    k = 1
    while able := [group for group in groups if len(group) >= k]:
        pass_at[k] = fmean(pass_at_k(len(group), sum(value >= reward for value in group), k) for group in able)
        k *= 2
    return pass_at


def _spread(numbers: Sequence[int]) -> dict[str, float] | None:
    """Return mean, maximum and percentiles by nearest rank, which are numbers that occur; None without numbers."""
    if not numbers:
        return None
    ranked = sorted(numbers)

    def rank(share: float) -> int:
        """Return the smallest of the numbers that at least ``share`` of them do not exceed."""
        return ranked[max(0, math.ceil(share * len(ranked)) - 1)]

    return {"mean": fmean(ranked), "p50": rank(0.5), "p95": rank(0.95), "max": ranked[-1]}


def _mean_std(numbers: Sequence[float]) -> dict[str, float] | None:
    return {"mean": fmean(numbers), "std": pstdev(numbers)} if numbers else None


def _shares(values: Iterable[str | None]) -> dict[str, float]:
    """Return the share of each word, most frequent first; ``?`` counts the missing ones."""
    counts = Counter(value or "?" for value in values)
    return {word: count / counts.total() for word, count in counts.most_common()}


def _print(stats: WindowStatistics, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(stats), flush=True)
    else:
        Console(highlight=False).print(as_table(stats))


def as_table(stats: WindowStatistics) -> Table:
    """Return the statistics as a table for a terminal."""
    table = Table(
        box=None,
        show_header=False,
        padding=(0, 2, 0, 0),
        title=f"{stats['run']}, window {stats['window']}",
        title_justify="left",
    )
    tokens, reward = stats["tokens"], stats["reward"]
    rates = f"{_number(stats['samples_per_s'])} samples/s, {_number(stats['tokens_per_s'])} tokens/s"
    table.add_row("samples", f"{stats['samples']} in {stats['seconds']:.1f} s: {rates}")
    if tokens:
        table.add_row(
            "tokens", f"mean {tokens['mean']:.1f}, p50 {tokens['p50']}, p95 {tokens['p95']}, max {tokens['max']}"
        )
    if reward:
        table.add_row("reward", f"mean {reward['mean']:.4f}, std {reward['std']:.4f}")
    if stats["groups"]:
        table.add_row(
            "groups", f"{stats['groups']} complete; all rewards equal in {stats['zero_variance_share']:.1%} of them"
        )
        table.add_row("pass@k", ", ".join(f"{k}: {value:.4f}" for k, value in stats["pass_at"].items()))
    for name, shares in (("status", stats["status"]), ("actors", stats["actors"]), ("engines", stats["engines"])):
        if shares:
            table.add_row(name, ", ".join(f"{word} {share:.1%}" for word, share in shares.items()))
    for lag, count in stats["lag"].items():
        share = count / sum(stats["lag"].values())
        table.add_row(f"lag {lag}", f"{'█' * round(40 * share):40} {share:.1%}")
    return table


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f}"
