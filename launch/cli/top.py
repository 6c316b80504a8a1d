"""``tidemill top``: a run of many hosts on a terminal, a line for each host, and the processes that need a look.

Consumes what ``RunWatch`` reads from the bus; asks no process.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter, first_of
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import decode_record
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import look
from tidemill.launch.cli.status import steps_of
from tidemill.launch.run.summary import newest_scores_in_words
from tidemill.launch.run.view import REFRESH_S, progress
from tidemill.launch.run.watch import LOOK_EVERY_S, SILENT_S, RunWatch

_FIRST_S = 20.0  # Longest wait in seconds for rows and the newest outcome before a picture
_SETTLE_S = SILENT_S + LOOK_EVERY_S  # Then rows are read so long: a process is silent when its row does not change
_RATES_S = 10.0  # Time over which tokens are counted for a rate
_ROLES = ("engine", "actor", "scorer", "learner", "feeder", "router", "host", "bus")
_MOST_LOOKS = 8  # Maximum number of lines of silent processes and troubles


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="print one picture; also without a terminal")


def run(args: argparse.Namespace) -> int:
    """Show the run until Ctrl-C. Returns 0. Raises ValueError when it cannot be read."""
    with suppress(KeyboardInterrupt):
        return look(args, show_top)
    return 0


async def show_top(bus: Bus, args: argparse.Namespace) -> int:
    """Show a picture every half second, or one."""
    config, _ = await bus.rows("run").read("config")
    newest = await bus.jet.last(subjects.stream(bus.run, subjects.PLAN), subjects.plan(bus.run, "done"))
    step = 0 if newest is None else decode_record(newest.data).step  # type: ignore[union-attr]  # a Done
    # Steps of before are no pace: they are all read at once.
    earlier, waiter = {step: 0.0} if step else {}, Waiter()
    watch = RunWatch(bus, steps=steps_of(config), earlier=earlier, on_record=lambda _: waiter.wake())
    rates, console = Rates(), Console(highlight=False)
    once = args.once or not sys.stdout.isatty()

    def picture() -> object:
        return hosts_picture(watch, rates, f"tidemill {bus.run}", width=console.width, height=console.height)

    async def draw() -> None:
        if once:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S):
                    while watch.samples is None or watch.step < step:  # rows are read before SAMPLES
                        await waiter.wait(REFRESH_S)
            picture()  # the rates count from here on
            await asyncio.sleep(_SETTLE_S)
            console.print(picture())
            return
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(picture(), refresh=True)  # type: ignore[arg-type]
                await asyncio.sleep(REFRESH_S)

    await first_of(watch.run(), draw())
    return 0


@dataclass(slots=True)
class HostLine:
    """The processes of one host, summed up."""

    host: str
    roles: Counter[str] = field(default_factory=Counter)
    silent: int = 0
    troubles: int = 0
    versions: set[int] = field(default_factory=set)
    tokens: dict[str, float] = field(default_factory=dict)
    """Tokens generated so far, by engine."""
    waiting: list[float] = field(default_factory=list)
    """Waiting shares of its engines and actors."""

    def add(self, row: LiveRow, age_s: float) -> None:
        """Add a process."""
        self.roles[row.role] += 1
        self.silent += age_s > SILENT_S
        self.troubles += bool(row.trouble)
        if row.role == "engine":
            self.versions.add(row.version)
            self.tokens[f"{row.id}.{row.pid}"] = row.load.get("tokens_generated", 0.0)
        if row.role in ("engine", "actor") and "waiting_share" in row.load:
            self.waiting.append(row.load["waiting_share"])


def lines_of(rows: Sequence[tuple[LiveRow, float]]) -> list[HostLine]:
    """Return a line for each host: those with a silent process or a trouble first, then by name."""
    hosts: dict[str, HostLine] = {}
    for row, age_s in rows:
        hosts.setdefault(row.host, HostLine(row.host)).add(row, age_s)
    return sorted(hosts.values(), key=lambda line: (-line.silent, -line.troubles, line.host))


class Rates:
    """Tokens a second of each host, over the last seconds; an engine that has begun anew counts from then on."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}
        """(time, tokens) of each engine at the begin of the present window."""
        self._rates: dict[str, float] = {}

    def of(self, lines: Sequence[HostLine], now: float) -> Mapping[str, float]:
        """Return the rate of each host whose engines have been seen for a while."""
        for line in lines:
            rate, is_known = 0.0, False
            for engine, tokens in line.tokens.items():
                began_s, before = self._seen.setdefault(f"{line.host} {engine}", (now, tokens))
                if now > began_s:
                    rate, is_known = rate + max(0.0, tokens - before) / (now - began_s), True
                if now - began_s > _RATES_S:
                    self._seen[f"{line.host} {engine}"] = (now, tokens)
            if is_known:
                self._rates[line.host] = rate
        return self._rates


def hosts_picture(watch: RunWatch, rates: Rates, title: str, *, width: int, height: int) -> Panel:
    """Return the view, with as many hosts as fit."""
    lines = lines_of(watch.rows)
    looks = [Text(text, style="red", no_wrap=True, overflow="ellipsis") for text in _looks(watch)[:_MOST_LOOKS]]
    scores = [Text(f"evaluation {words}") for words in newest_scores_in_words(watch.evaluated.values())]
    room = max(1, height - 8 - len(looks) - len(scores))
    facts = "   ".join(f"{name} {value}" for name, value in watch.flat().items() if name != "step")
    table = _table(lines[:room], rates.of(lines, time.monotonic()))
    blocks: list[Table | Text] = [progress(watch), Text(facts, style="dim"), *scores, Text(), table]
    if len(lines) > room:
        blocks.append(Text(f"and {len(lines) - room} more hosts", style="dim"))
    return Panel(Group(*blocks, *looks), title=f"[bold]{title}[/]", border_style="cyan", padding=(0, 1), width=width)


def _table(lines: Sequence[HostLine], rates: Mapping[str, float]) -> Table:
    roles = [role for role in _ROLES if any(line.roles[role] for line in lines)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("host", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in (
        *(f"{role}s" if role != "bus" else role for role in roles),
        "version",
        "tokens/s",
        "waiting",
        "silent",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        versions = sorted(line.versions)
        span = "" if not versions else f"{versions[0]}" + (f"-{versions[-1]}" if len(versions) > 1 else "")
        rate = f"{rates[line.host]:.0f}" if line.host in rates else ""
        waiting = f"{sum(line.waiting) / len(line.waiting):.0%}" if line.waiting else ""
        cells = [*(str(line.roles[role] or "") for role in roles), span, rate, waiting]
        style = "red" if line.silent else "yellow" if line.troubles else ""
        table.add_row(Text(line.host), *cells, str(line.silent or ""), style=style)
    return table


def _looks(watch: RunWatch) -> list[str]:
    """Return the processes that need a look, in a line each."""
    if watch.bus_silence:
        return [watch.bus_silence]
    silent = [
        f"{row.role} {row.id} on {row.host}: silent for {age_s:.0f} s" for row, age_s in watch.rows if age_s > SILENT_S
    ]
    return silent + [f"{row.role} {row.id} on {row.host}: {row.trouble}" for row, _ in watch.rows if row.trouble]
