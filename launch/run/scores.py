"""Scores of the evaluation sets, from the records in PLAN: lines of evaluations.jsonl, and the newest in words."""

from collections.abc import Iterable, Mapping

from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Evaluated

EVALUATIONS_FILE = "evaluations.jsonl"
"""File in the run's directory with a line for each evaluation set and version."""


def line_of(record: Evaluated) -> JsonObject:
    """Return the line of one set at one version."""
    return {"version": record.version, "step": record.step, "set": record.dataset, **record.metrics}


def lines_of(evaluated: Mapping[tuple[int, str], Evaluated]) -> list[JsonObject]:
    """Return the lines of all records, by version and set."""
    return [line_of(evaluated[key]) for key in sorted(evaluated)]


async def read(bus: Bus, *, after_epoch: int = 0) -> dict[tuple[int, str], Evaluated]:
    """Return the newest record by version and set; records up to ``after_epoch`` are of another run."""
    records = [record async for _, record in bus.plans.scan() if isinstance(record, Evaluated)]
    return {(record.version, record.dataset): record for record in records if record.epoch > after_epoch}


def newest(evaluated: Iterable[Evaluated]) -> dict[str, Evaluated]:
    """Return the record of the newest version of each set."""
    newest_records: dict[str, Evaluated] = {}
    for record in sorted(evaluated, key=lambda record: record.version):
        newest_records[record.dataset] = record
    return newest_records


def in_words(line: JsonMapping) -> str:
    """Return a line's mean with its interval and the versions of its tokens, in words."""
    if "mean" not in line:
        return f"{line['set']} without an answer (version {line['version']})"
    return f"{line['set']} {line['mean']:.3f} [{line['mean_low']:.3f}, {line['mean_high']:.3f}] ({_versions(line)})"


def _versions(line: JsonMapping) -> str:
    """Return the version of a line, and the versions of its tokens where they differ."""
    version = line["version"]
    oldest, newest = (version + int(line.get(name, 0)) for name in ("versions_later_min", "versions_later"))
    if newest == version:
        return f"version {version}"
    return (
        f"version {version}, tokens of {newest}"
        if oldest == newest
        else f"version {version}, tokens of {oldest} to {newest}"
    )


def best_in_words(row: JsonMapping) -> str:
    """Return the row ``run/best`` in words."""
    return (
        f"{row['set']}/{row['metric']} {row['value']:.4g} (version {row['version']}, step {row['step']}): "
        f"{row.get('directory', '')}"
    )


def newest_in_words(evaluated: Iterable[Evaluated]) -> list[str]:
    """Return the newest scores of each set, in words."""
    return [in_words(line_of(record)) for record in newest(evaluated).values()]
