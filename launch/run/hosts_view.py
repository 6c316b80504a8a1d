"""The view of ``tidemill top``: a run of many hosts, a line for each, and the processes that need a look.

Consumes what ``RunWatch`` reads from the bus; asks no process.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.run.summary import newest_scores_in_words
from tidemill.launch.run.view import progress
from tidemill.launch.run.watch import SILENT_S, RunWatch

_RATES_S = 10.0  # Time over which tokens are counted for a rate
_ROLES = ("engine", "actor", "scorer", "learner", "feeder", "router", "host", "bus")
_MOST_LOOKS = 8  # Most lines of processes that need a look


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
