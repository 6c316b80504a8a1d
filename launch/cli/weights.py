"""``tidemill weights``: the version that each engine serves, and whether all engines of a version have the same bits;
``tidemill debug weights``: tensors that differ between model directories, checkpoints, engines and the files of a run.

``tidemill weights`` works without torch: it compares checksums by their text.
"""

import argparse
import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tidemill.bus.http.client import ApiClient, CallFailed, Headers, no_headers
from tidemill.bus.keys import api_keys
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import find_run, look, on_bus
from tidemill.launch.run.process import set_up_logging
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.run_config import CONFIG_FILE
from tidemill.learner.checkpoints.disk import has_weights

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.weightstore.format.checksums import ChecksumReport

ANSWER_S = 120.0  # seconds for an engine's checksums: on CPU it computes some GB a second
SHOWN = 5  # maximum number of tensors that are named of a comparison
HEAD = "lm_head.weight"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tidemill weights``."""
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
    # (scheme, dtype, tensors, zeros) -> checksum.
    sums: dict[tuple[str, str, tuple[str, ...], int], str] = field(default_factory=dict)
    silent: str = ""  # Reason why there are no checksums; empty if there are
    # Tensors in which it differs from most other engines of this version.
    differs: list[str] = field(default_factory=list)


async def show_weights(bus: Bus, args: argparse.Namespace) -> int:
    """Print every engine's version and comparison; return 1 if engines of one version differ, else 0."""
    if args.ended:
        head, revision = await bus.rows("weights").read("head")
        newest = "its head cannot be read" if head is None and revision else "it has published no version"
        if head is not None and "version" in head:
            newest = f"its newest version is {head['version']} (step {head['step']})"
        text = f"no engine serves: the run is not running; {newest}"
        Console(highlight=False, stderr=args.json).print(text, markup=False)
        return 0
    rows = [row for row in await LiveView(bus).alive("engine") if row.address]
    keys = api_keys(bus)
    engines = await asyncio.gather(*[_ask(row.id, row.address, row.version, keys.headers) for row in rows])
    compare(engines)
    engines = sorted(engines, key=lambda engine: (engine.version, engine.engine))
    console = Console(highlight=False)
    for engine in engines:
        if args.json:
            row = {"engine": engine.engine, "version": engine.version, "tensors": len(engine.sums)}
            print(json.dumps(row | {"differs": engine.differs, "silent": engine.silent}))
        else:
            text = f"engine {engine.engine}  version {engine.version}  {_in_words(engine, engines)}"
            console.print(text, style="red" if engine.differs else None, markup=False)
    if not engines and not args.json:
        console.print("no engine is running")
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
    try:
        answer = await _read_checksums(address, headers)
        scheme = str(answer["scheme"])
        sums = {
            (scheme, part["dtype"], tuple(part["names"]), int(part.get("zeros", 0))): str(part["sum"])
            for part in answer["parts"]
        }
        return EngineChecksums(engine=engine, version=str(answer["weight_version"]), sums=sums)
    except (ValueError, KeyError, TypeError) as error:
        return EngineChecksums(engine=engine, version=str(version), silent=str(error) or type(error).__name__)


async def _read_checksums(url: str, headers: Headers) -> JsonObject:
    """Return an engine's answer to a request for the checksums of the weights that it serves. Raises ValueError."""

    def refused(failed: CallFailed) -> ValueError:
        return ValueError(f"{f'HTTP {failed.status}: ' if failed.status else ''}{failed.reason:.200}")

    api = ApiClient(url, refused, headers=headers)
    try:
        answer: JsonObject = json.loads(
            await api.read("POST", "/weights_checksums", {"of": "served"}, timeout_s=ANSWER_S)
        )
        return answer
    finally:
        await api.close()


def _in_words(engine: EngineChecksums, engines: Sequence[EngineChecksums]) -> str:
    if engine.differs:
        hidden = f" and {len(engine.differs) - SHOWN} more" if len(engine.differs) > SHOWN else ""
        names = ", ".join(engine.differs[:SHOWN])
        return f"DIFFERS in {len(engine.differs)} of {len(engine.sums)} tensors: {names}{hidden}"
    others = [rival for rival in engines if rival.version == engine.version and rival is not engine]
    num_equal = sum(bool(rival.sums) and not rival.differs for rival in others)
    compared = "no other engine serves this version"
    if num_equal:
        compared = f"the same as {num_equal} other{'s' * (num_equal > 1)} of this version"
    return engine.silent or f"{len(engine.sums)} tensors; {compared}"


# ---- tidemill debug weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The comparison of two sets of weights."""

    what: str
    tensors: int = 0
    differs: Sequence[str] = ()  # A line for each tensor that differs or is missing, by layer
    failure: str = ""  # Why there is no comparison; empty if there is one

    def __str__(self) -> str:
        if self.failure:
            return f"{self.what}: not compared: {self.failure}"
        if not self.differs:
            return f"{self.what}: {self.tensors} tensors, all equal"
        lines = [f"{self.what}: DIFFERS in {len(self.differs)} of {self.tensors} tensors"]
        lines += [f"  {line}" for line in self.differs[:SHOWN]]
        return "\n".join(lines + [f"  and {len(self.differs) - SHOWN} more"] * (len(self.differs) > SHOWN))


def compare_weights(args: argparse.Namespace) -> int:
    """Print the comparisons. Returns 0, or 1 when something differs or cannot be compared. Raises ValueError."""
    require("engine")
    if args.run_dir:
        if args.sides:
            raise ValueError("want two of DIR|CHECKPOINT|URL, or --run-dir, got both")
        comparisons = _of_run(args)
    elif len(args.sides) == 2:
        ours, theirs = args.sides
        comparisons = [_of_sides(ours, theirs, args.model)]
    else:
        want = "two of DIR|CHECKPOINT|URL, or --run-dir RUN and perhaps --model DIR"
        raise ValueError(f"want {want}, got {len(args.sides)} sides")
    for comparison in comparisons:
        print(json.dumps(asdict(comparison)) if args.json else comparison)
    return int(any(comparison.differs or comparison.failure for comparison in comparisons))


def _of_sides(ours: str, theirs: str, model: Path | None) -> Compared:
    """Compare two directories or checkpoints, two engines, or one of each. Raises ValueError."""
    what, sides = f"{ours} and {theirs}", (ours, theirs)
    urls = [side for side in sides if side.startswith(("http://", "https://"))]
    directories = [Path(side) for side in sides if side not in urls]
    if model is not None and not any(map(has_weights, directories)):
        raise ValueError(f"--model: want none without --run-dir or a checkpoint, got {model}")
    tensors = [tensors_of(directory, model) for directory in directories]
    if not urls:
        return between_tensors(what, *tensors)
    reports = [asyncio.run(_report(url, no_headers)) for url in urls]
    return with_report(what, reports[0], tensors[0]) if tensors else between_reports(what, *reports)


async def _report(url: str, headers: Headers) -> "ChecksumReport":
    from tidemill.weightstore.format.checksums import ChecksumReport

    try:
        answer = await _read_checksums(url, headers)
    except ValueError as error:
        raise ValueError(f"{url}: want checksums, got {error}") from None
    return ChecksumReport.parse(answer)


def tensors_of(directory: Path, model: Path | None = None) -> "dict[str, Tensor]":
    """Return the tensors of a model directory, or the weights of a checkpoint, by their Hugging Face names.

    ``model``: the model directory of the checkpoint; None = the directory of its run. Raises ValueError for a directory
    without any.
    """
    if has_weights(directory):
        require("learner")
        from tidemill.launch.cli.convert import weights_of

        return weights_of(directory, model)
    from tidemill.actors.errors import UnsupportedModel
    from tidemill.actors.serving.builtin.weights import read_safetensors

    try:
        return dict(read_safetensors(directory))
    except UnsupportedModel as error:
        raise ValueError(str(error)) from None


def between_tensors(what: str, ours: "Mapping[str, Tensor]", theirs: "Mapping[str, Tensor]") -> Compared:
    """Compare two sets of weights tensor by tensor, in the narrower of two dtypes."""
    differs = []
    for name in sorted(ours.keys() | theirs.keys(), key=_by_layer):
        if name not in ours or name not in theirs:
            differs.append(f"{name}: only in the {'first' if name in ours else 'second'}")
            continue
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            differs.append(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
            continue
        narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
        a, b = a.to(narrow), b.to(narrow)
        if not bool((a == b).all()):
            gap = (a.double() - b.double()).abs()
            counts = f"{int((gap > 0).sum())} of {gap.numel()} numbers"
            differs.append(f"{name}: {counts}, largest difference {float(gap.max()):.3g}")
    return Compared(what=what, tensors=len(ours), differs=differs)


def with_report(what: str, report: "ChecksumReport", tensors: "Mapping[str, Tensor]") -> Compared:
    """Compare an engine's checksums with the tensors of a directory, in the engine's dtype."""
    from tidemill.weightstore.format.checksums import differences, sum_of

    reported_names = {name for part in report.parts for name in part.names}
    # An engine with a tied output projection reports none, though files may have a copy of it.
    comparable = {name: tensor for name, tensor in tensors.items() if name in reported_names or name != HEAD}
    lines = differences(report, comparable, lambda part: sum_of(report.scheme, part, comparable))
    return Compared(what=what, tensors=len(comparable), differs=sorted(lines, key=_by_layer))


def between_reports(what: str, ours: "ChecksumReport", theirs: "ChecksumReport") -> Compared:
    """Compare the checksums of two engines. Those of other formats cannot be compared."""
    sums = [{(part.names, part.dtype, part.zeros): part.sum for part in report.parts} for report in (ours, theirs)]
    if ours.scheme != theirs.scheme or sums[0].keys() != sums[1].keys():
        return Compared(what=what, failure="the engines keep weights in different formats; compare each to DIR")
    names = [" + ".join(key[0]) for key in sums[0] if sums[0][key] != sums[1][key]]
    return Compared(what=what, tensors=len(sums[0]), differs=sorted(names, key=_by_layer))


def _by_layer(name: str) -> tuple[int, str]:
    """Return a sort key: the number of the layer, then the name; tensors of no layer come first."""
    numbers = [int(part) for part in name.partition(":")[0].split(".") if part.isdigit()]
    return numbers[0] if numbers else -1, name


def _of_run(args: argparse.Namespace) -> list[Compared]:
    """Compare every engine of a running run with the files of the version that it serves."""
    set_up_logging("debug", level=logging.ERROR)
    url, run = find_run(args.run_dir, "", "")
    root = Path(args.run_dir)
    model = Path(load(root / CONFIG_FILE).config.model.path)
    chosen = None if args.model is None else (args.model, tensors_of(args.model, model))
    comparisons: list[Compared] = []

    async def compare_engines(bus: Bus, _: argparse.Namespace) -> int:
        comparisons.extend(await _engines(bus, root, model, chosen))
        return 0

    asyncio.run(on_bus(url, run, argparse.Namespace(command="debug"), compare_engines))
    if not comparisons:
        raise ValueError(f"{args.run_dir}: want a running engine, got none")
    return comparisons


async def _engines(
    bus: Bus, root: Path, model: Path, chosen: "tuple[Path, Mapping[str, Tensor]] | None"
) -> list[Compared]:
    engines, keys = [], api_keys(bus)
    rows = [row for row in await LiveView(bus).alive("engine") if row.address]
    for row in sorted(rows, key=lambda row: row.id):
        directory = chosen[0] if chosen else model if row.version == 0 else root / "snapshots" / f"v{row.version}"
        what = f"engine {row.id}, version {row.version}, and {directory}"
        try:
            if not directory.is_dir():
                cure = "compare with a directory of these weights: --model DIR (final/ for the last version of a run)"
                raise ValueError(f"no snapshot of version {row.version} is on this machine; {cure}")
            tensors = chosen[1] if chosen else await asyncio.to_thread(tensors_of, directory)
            engines.append(with_report(what, await _report(row.address, keys.headers), tensors))
        except ValueError as error:
            engines.append(Compared(what=what, failure=str(error)))
    return engines
