"""``tidemill weights``: the version that each engine serves, and whether all engines of a version have the same bits."""

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

ANSWER_S = 120.0
"""Seconds for an engine's checksums: on CPU it computes some GB a second."""
SHOWN = 5
"""Most tensors named of an engine that differs."""
Checksums = dict[tuple[str, str, tuple[str, ...], int], str]
"""(scheme, dtype, tensors, zeros) -> checksum."""


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
        Console(highlight=False, stderr=args.json).print(f"no engine serves: the run is not running; {newest}", markup=False)
        return 0
    rows = [row for row in await LiveView(bus).alive("engine") if row.address]
    keys = api_keys(bus)
    found = await asyncio.gather(*[_ask(row.id, row.address, row.version, keys.headers) for row in rows])
    compare(found)
    _print(found, as_json=args.json)
    return int(any(one.differs for one in found))


def compare(found: Sequence[EngineChecksums]) -> None:
    """Fill ``differs``: among engines with the same version and format, the checksum of the majority is right; in a tie all differ."""
    for one in found:
        others = [other for other in found if other.version == one.version]
        for key, value in one.sums.items():
            votes = Counter(other.sums[key] for other in others if key in other.sums)
            best = max(votes.values())
            if votes[value] < best or sum(count == best for count in votes.values()) > 1:
                one.differs.append(" + ".join(key[2]))


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
    return {(scheme, part["dtype"], tuple(part["names"]), int(part.get("zeros", 0))): str(part["sum"]) for part in answer["parts"]}


def _print(found: Sequence[EngineChecksums], *, as_json: bool) -> None:
    console = Console(highlight=False)
    for one in sorted(found, key=lambda one: (one.version, one.engine)):
        if as_json:
            print(
                json.dumps(
                    {"engine": one.engine, "version": one.version, "tensors": len(one.sums), "differs": one.differs, "silent": one.silent}
                )
            )
            continue
        others = sum(bool(other.sums) and not other.differs for other in found if other.version == one.version and other is not one)
        compared = f"the same as {others} other{'s' * (others > 1)} of this version" if others else "no other engine serves this version"
        text = one.silent or f"{len(one.sums)} tensors; {compared}"
        if one.differs:
            more = f" and {len(one.differs) - SHOWN} more" if len(one.differs) > SHOWN else ""
            text = f"DIFFERS in {len(one.differs)} of {len(one.sums)} tensors: {', '.join(one.differs[:SHOWN])}{more}"
        console.print(f"engine {one.engine}  version {one.version}  {text}", style="red" if one.differs else None, markup=False)
    if not found and not as_json:
        console.print("no engine is running")
