"""``tidemill weights``: the version that each engine serves, and whether all engines of a version have the same
bits.
"""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from tidemill.bus.http.client import ApiClient, CallFailed, Headers
from tidemill.bus.liveness.heartbeats import LiveView
from tidemill.bus.liveness.keys import api_keys
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import look

ANSWER_S = 120.0
"""Seconds for an engine's checksums: on CPU it computes some GB a second."""
SHOWN = 5
"""Maximum number of tensors that are named for an engine that differs."""
Checksums = dict[tuple[str, str, tuple[str, ...], int], str]
"""(scheme, dtype, tensors, zeros) -> checksum."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_run(parser)
    parser.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Print the version of each engine. Returns 0, or 1 when engines of one version differ. Raises ValueError."""
    return look(args, show_weights)


@dataclass(slots=True, kw_only=True)
class EngineChecksums:
    """The checksums of one engine."""

    engine: str
    version: str
    sums: Checksums = field(default_factory=dict)
    silent: str = ""
    """Reason why there are no checksums; empty if there are."""
    differs: list[str] = field(default_factory=list)
    """Tensors in which it differs from most other engines of this version."""


async def show_weights(bus: Bus, args: argparse.Namespace) -> int:
    """Print every engine's version and comparison; return 1 if engines of one version differ, else 0."""
    if args.ended:
        head, revision = await bus.rows("weights").read("head")
        newest = "its head cannot be read" if head is None and revision else "it has published no version"
        if head is not None and "version" in head:
            newest = f"its newest version is {head['version']} (step {head['step']})"
        Console(highlight=False, stderr=args.json).print(
            f"no engine serves: the run is not running; {newest}", markup=False
        )
        return 0
    rows = [row for row in await LiveView(bus).alive("engine") if row.address]
    keys = api_keys(bus)
    engines = await asyncio.gather(*[_ask(row.id, row.address, row.version, keys.headers) for row in rows])
    compare(engines)
    _print(engines, as_json=args.json)
    return int(any(engine.differs for engine in engines))


def compare(engines: Sequence[EngineChecksums]) -> None:
    """Fill ``differs``: of a version and format, the majority's checksum is right; in a tie all differ."""
    for engine in engines:
        rivals = [rival for rival in engines if rival.version == engine.version]
        for key, value in engine.sums.items():
            votes = Counter(rival.sums[key] for rival in rivals if key in rival.sums)
            best = max(votes.values())
            if votes[value] < best or sum(count == best for count in votes.values()) > 1:
                engine.differs.append(" + ".join(key[2]))


async def _ask(engine: str, address: str, version: int, headers: Headers) -> EngineChecksums:
    api = ApiClient(address, lambda failed: failed, headers=headers)
    try:
        answer = json.loads(await api.read("POST", "/weights_checksums", {"of": "served"}, timeout_s=ANSWER_S))
        return EngineChecksums(engine=engine, version=str(answer["weight_version"]), sums=_sums(answer))
    except CallFailed as failed:
        reason = f"{f'HTTP {failed.status}: ' if failed.status else ''}{failed.reason:.200}"
        return EngineChecksums(engine=engine, version=str(version), silent=reason)
    except (ValueError, KeyError, TypeError) as error:
        return EngineChecksums(engine=engine, version=str(version), silent=str(error) or type(error).__name__)
    finally:
        await api.close()


def _sums(answer: JsonMapping) -> Checksums:
    scheme = str(answer["scheme"])
    return {
        (scheme, part["dtype"], tuple(part["names"]), int(part.get("zeros", 0))): str(part["sum"])
        for part in answer["parts"]
    }


def _print(engines: Sequence[EngineChecksums], *, as_json: bool) -> None:
    console = Console(highlight=False)
    for engine in sorted(engines, key=lambda engine: (engine.version, engine.engine)):
        if as_json:
            print(
                json.dumps(
                    {
                        "engine": engine.engine,
                        "version": engine.version,
                        "tensors": len(engine.sums),
                        "differs": engine.differs,
                        "silent": engine.silent,
                    }
                )
            )
            continue
        num_equal = sum(
            bool(rival.sums) and not rival.differs
            for rival in engines
            if rival.version == engine.version and rival is not engine
        )
        compared = (
            f"the same as {num_equal} other{'s' * (num_equal > 1)} of this version"
            if num_equal
            else "no other engine serves this version"
        )
        text = engine.silent or f"{len(engine.sums)} tensors; {compared}"
        if engine.differs:
            hidden = f" and {len(engine.differs) - SHOWN} more" if len(engine.differs) > SHOWN else ""
            text = (
                f"DIFFERS in {len(engine.differs)} of {len(engine.sums)} tensors: "
                f"{', '.join(engine.differs[:SHOWN])}{hidden}"
            )
        console.print(
            f"engine {engine.engine}  version {engine.version}  {text}",
            style="red" if engine.differs else None,
            markup=False,
        )
    if not engines and not as_json:
        console.print("no engine is running")
