"""Scores of the evaluation sets, from the records in PLAN: lines of evaluations.jsonl, and the newest in words."""

from collections.abc import Iterable, Mapping

from bus.streams.bus import Bus
from bus.wire.json_object import JsonMapping, JsonObject
from bus.wire.messages import Evaluated

EVALUATIONS_FILE = "evaluations.jsonl"
"""File in the run's directory with a line for each evaluation set and version."""


def line_of(record: Evaluated) -> JsonObject:
    """Return the line of one set at one version."""
    return {"version": record.version, "step": record.step, "set": record.dataset, **record.metrics}


def lines_of(evaluated: Mapping[tuple[int, str], Evaluated]) -> list[JsonObject]:
    """Return the lines of all records, by version and set."""
    return [line_of(evaluated[key]) for key in sorted(evaluated)]


async def read(bus: Bus) -> dict[tuple[int, str], Evaluated]:
    """Return the newest record by version and set."""
    return {(record.version, record.dataset): record async for _, record in bus.plans.scan() if isinstance(record, Evaluated)}


def newest(evaluated: Iterable[Evaluated]) -> dict[str, Evaluated]:
    """Return the record of the newest version of each set."""
    found: dict[str, Evaluated] = {}
    for record in sorted(evaluated, key=lambda record: record.version):
        found[record.dataset] = record
    return found


def in_words(line: JsonMapping) -> str:
    """Return a line's mean with its interval and version, in words."""
    if "mean" not in line:
        return f"{line['set']} without an answer (version {line['version']})"
    return f"{line['set']} {line['mean']:.3f} [{line['mean_low']:.3f}, {line['mean_high']:.3f}] (version {line['version']})"


def best_in_words(row: JsonMapping) -> str:
    """Return the row ``run/best`` in words."""
    return f"{row['set']}/{row['metric']} {row['value']:.4g} (version {row['version']}, step {row['step']}): {row.get('directory', '')}"


def newest_in_words(evaluated: Iterable[Evaluated]) -> list[str]:
    """Return the newest scores of each set, in words."""
    return [in_words(line_of(record)) for record in newest(evaluated).values()]
