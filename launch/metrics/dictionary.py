"""The dictionary of metrics: meaning, unit, healthy range and source of each, from ``dictionary.toml`` and the table of
alarms. It makes ``docs/metrics.md``, the HELP texts of Prometheus, the board of Grafana, and the labels of pages.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.algorithms.alarms import FLOAT32, MIN_GAP, MIN_SPREAD, MIN_TOKENS, THRESHOLDS

FILE = Path(__file__).with_name("dictionary.toml")
_PLACE = re.compile(r"(?:/|_at_)<(\w+)>$")
_BOUND = re.compile(r"([<>]) ([\d.]+)(?:;|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, or a family of them by lag, part or the like."""

    name: str
    """As in the records; a family ends in ``/<lag>`` or another word in angle brackets."""
    meaning: str
    unit: str = ""
    healthy: str = ""
    """Healthy range, in words."""
    low: float | None = None
    """Smallest healthy value; None = no bound is known."""
    high: float | None = None
    source: str
    """Process that computes it."""
    group: str
    """Group in ``docs/metrics.md``."""
    counter: bool = False
    """True if it counts up from the start of its process."""
    peers: str = ""
    """Names in slime and verl, or another framework."""

    @property
    def base(self) -> str:
        """Name without the part of a family's members."""
        return _PLACE.sub("", self.name)

    @property
    def label(self) -> str:
        """What the members of a family differ in: ``lag``, ``part``; empty for a single metric."""
        match = _PLACE.search(self.name)
        return match[1] if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Metrics of one kind, in the order of the page."""

    name: str
    about: str
    rows: tuple[tuple[Metric, ...], ...]
    """Metrics that share a line of the page."""


@cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


@cache
def groups() -> tuple[Group, ...]:
    """Return all groups."""
    return tuple(_group(name, table) for name, table in _tables().items() if isinstance(table, dict))


def _group(name: str, table: Mapping[str, Any]) -> Group:
    rows = tuple(tuple(_metrics(name, table["source"], row)) for row in table["metrics"])
    return Group(name=name, about=table.get("about", ""), rows=rows)


def _metrics(group: str, source: str, row: Mapping[str, Any]) -> Iterator[Metric]:
    units = row.get("units") or [row.get("unit", "")] * len(row["names"])
    healthy = row.get("healthy", "")
    for name, unit in zip(row["names"], units, strict=True):
        low, high = _band(name, healthy)
        yield Metric(
            name=name,
            meaning=row["is"],
            unit=unit,
            healthy=healthy,
            low=low,
            high=high,
            source=source,
            group=group,
            counter=row.get("counter", False),
            peers=row.get("peers", ""),
        )


def _band(name: str, healthy: str) -> tuple[float | None, float | None]:
    """Return the healthy range: within the warnings of its alarms, else the bound that ``healthy`` begins with."""
    # That of `lag` is max_lag, a setting.
    alarms = [row for alarm, row in THRESHOLDS.items() if row.metric == name and alarm != "lag"]
    if alarms:
        low = max((row.warn for row in alarms if row.below), default=None)
        return low, min((row.warn for row in alarms if not row.below), default=None)
    if healthy == "0" or healthy.startswith("0:"):
        return 0.0, 0.0
    bound = _BOUND.match(healthy)
    if bound is None:
        return None, None
    return (None, float(bound[2])) if bound[1] == "<" else (float(bound[2]), None)


@cache
def metrics() -> Mapping[str, Metric]:
    """Return all metrics by name, in the order of the page."""
    return {metric.name: metric for group in groups() for row in group.rows for metric in row}


@cache
def _families() -> Mapping[str, Metric]:
    return {metric.base: metric for metric in metrics().values() if metric.label}


def described(name: str) -> Metric | None:
    """Return the metric, or the family, of a name in a record; None for one that no table has.

    A score is ``eval/SET/METRIC`` in what sinks get, and ``eval/METRIC`` here.
    """
    if name in metrics():
        return metrics()[name]
    head, _, tail = name.rpartition("/")
    if head in _families():
        return _families()[head]
    if name.startswith("eval/") and head != "eval":
        return described(f"eval/{tail}")
    if re.fullmatch(r"eval/pass_at_\d+", name):
        return metrics()["eval/pass_at_<k>"]
    return None


def as_json() -> list[JsonObject]:
    """Return the dictionary for pages, in order."""
    return [asdict(metric) | {"base": metric.base, "label": metric.label} for metric in metrics().values()]


# ---- docs/metrics.md


def page() -> str:
    """Return ``docs/metrics.md``."""
    parts: list[str] = [_tables()["introduction"]]
    for group in groups():
        parts.append(f"\n## {group.name}/\n" if group.name != "episodes" else "\n## data/ of episodes\n")
        if group.about:
            parts.append(f"\n{group.about}\n")
        parts.append(_table(group))
        if group.name == "alarm":
            bounds = {"min_tokens": MIN_TOKENS, "min_gap": MIN_GAP, "min_spread": MIN_SPREAD}
            parts.append(_tables()["alarms"].format(rows="\n".join(_alarm_rows()), **bounds))
    return "".join(parts)


def _table(group: Group) -> str:
    with_peers = any(metric.peers for row in group.rows for metric in row)
    source = group.rows[0][0].source
    columns = ["name", "meaning", "unit", "healthy", *(["elsewhere"] if with_peers else [])]
    lines = [f"\nSource: {source}.\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in group.rows:
        names = ", ".join(f"`{metric.name}`" for metric in row)
        units = list(dict.fromkeys(metric.unit for metric in row))
        unit = units[0] if len(units) == 1 else ", ".join(metric.unit or "1" for metric in row)
        cells = [names, row[0].meaning, unit, row[0].healthy, *([row[0].peers] if with_peers else [])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _alarm_rows() -> Iterator[str]:
    for name, row in THRESHOLDS.items():
        sign, scale = "<" if row.below else ">", " × a" if row.ages else ""
        bounds = [f"{sign} {bound:g}{scale}" for bound in (row.warn, row.error)]
        if name in FLOAT32:
            bounds = [f"{text} (float32: {bound:g})" for text, bound in zip(bounds, FLOAT32[name], strict=True)]
        if name == "lag":
            bounds = ["", "> max_lag"]
        if row.warn == row.error:
            bounds[0] = ""
        advice = row.advice.replace("|", "\\|")
        yield f"| `{name}` | `{row.metric}` | {bounds[0]} | {bounds[1]} | {advice} | {row.source} |"
