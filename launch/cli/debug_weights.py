"""``tidemill debug weights``: tensors that differ between model directories, checkpoints, engines, and the files of a
run.
"""

import argparse
import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.launch.settings.extras import require
from tidemill.learner.checkpoints.disk import has_weights

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.bus.http.client import Headers
    from tidemill.bus.streams.bus import Bus
    from tidemill.weightstore.format.checksums import ChecksumReport

SHOWN = 5
"""Most tensors that are printed of a comparison."""
_ANSWER_S = 120.0
"""Deadline of an engine's checksums: on CPU it computes some GB a second."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The comparison of two sets of weights."""

    what: str
    tensors: int
    differs: Sequence[str]
    """A line for each tensor that differs or is missing, by layer."""
    failure: str = ""
    """Why there is no comparison; empty if there is one."""


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
        raise ValueError(
            f"want two of DIR|CHECKPOINT|URL, or --run-dir RUN and perhaps --model DIR, got {len(args.sides)} sides"
        )
    for comparison in comparisons:
        _print(comparison, as_json=args.json)
    return int(any(comparison.differs or comparison.failure for comparison in comparisons))


def _print(comparison: Compared, *, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps(
                {
                    "what": comparison.what,
                    "tensors": comparison.tensors,
                    "differs": list(comparison.differs),
                    "failure": comparison.failure,
                }
            )
        )
        return
    if comparison.failure:
        print(f"{comparison.what}: not compared: {comparison.failure}")
        return
    if not comparison.differs:
        print(f"{comparison.what}: {comparison.tensors} tensors, all equal")
        return
    print(f"{comparison.what}: DIFFERS in {len(comparison.differs)} of {comparison.tensors} tensors")
    for line in comparison.differs[:SHOWN]:
        print(f"  {line}")
    if len(comparison.differs) > SHOWN:
        print(f"  and {len(comparison.differs) - SHOWN} more")


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
    reports = asyncio.run(_reports(urls))
    return with_report(what, reports[0], tensors[0]) if tensors else between_reports(what, *reports)


async def _reports(urls: Sequence[str]) -> "list[ChecksumReport]":
    from tidemill.bus.http.client import no_headers

    return [await _report(url, no_headers) for url in urls]


async def _report(url: str, headers: "Headers") -> "ChecksumReport":
    from tidemill.bus.http.client import ApiClient, CallFailed
    from tidemill.weightstore.format.checksums import ChecksumReport

    def refused(failed: CallFailed) -> ValueError:
        """Return the error of an engine without checksums."""
        return ValueError(
            f"{url}: want checksums, got {f'HTTP {failed.status}: ' if failed.status else ''}{failed.reason:.200}"
        )

    api = ApiClient(url, refused, headers=headers)
    try:
        return ChecksumReport.parse(
            json.loads(await api.read("POST", "/weights_checksums", {"of": "served"}, timeout_s=_ANSWER_S))
        )
    finally:
        await api.close()


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
            differs.append(
                f"{name}: {int((gap > 0).sum())} of {gap.numel()} numbers, largest difference {float(gap.max()):.3g}"
            )
    return Compared(what=what, tensors=len(ours), differs=differs)


def with_report(what: str, report: "ChecksumReport", tensors: "Mapping[str, Tensor]") -> Compared:
    """Compare an engine's checksums with the tensors of a directory, in the engine's dtype."""
    from tidemill.weightstore.format.checksums import differences, sum_of

    reported_names = {name for part in report.parts for name in part.names}
    # A tied output projection
    comparable = {name: tensor for name, tensor in tensors.items() if name in reported_names or name != HEAD}
    lines = differences(report, comparable, lambda part: sum_of(report.scheme, part, comparable))
    return Compared(what=what, tensors=len(comparable), differs=sorted(lines, key=_by_layer))


def between_reports(what: str, ours: "ChecksumReport", theirs: "ChecksumReport") -> Compared:
    """Compare the checksums of two engines. Those of other formats cannot be compared."""
    sums = [{(part.names, part.dtype, part.zeros): part.sum for part in report.parts} for report in (ours, theirs)]
    if ours.scheme != theirs.scheme or sums[0].keys() != sums[1].keys():
        return Compared(
            what=what,
            tensors=0,
            differs=(),
            failure="the engines keep weights in different formats; compare each to DIR",
        )
    names = [" + ".join(key[0]) for key in sums[0] if sums[0][key] != sums[1][key]]
    return Compared(what=what, tensors=len(sums[0]), differs=sorted(names, key=_by_layer))


def _by_layer(name: str) -> tuple[int, str]:
    """Return a sort key: the number of the layer, then the name; tensors of no layer come first."""
    numbers = [int(part) for part in name.partition(":")[0].split(".") if part.isdigit()]
    return numbers[0] if numbers else -1, name


def _of_run(args: argparse.Namespace) -> list[Compared]:
    """Compare every engine of a running run with the files of the version that it serves."""
    from tidemill.launch.cli.find_run import find_run, on_bus
    from tidemill.launch.run.process import set_up_logging
    from tidemill.launch.settings.config_loader import load
    from tidemill.launch.settings.run_config import CONFIG_FILE

    set_up_logging("debug", level=logging.ERROR)
    url, run = find_run(args.run_dir, "", "")
    root = Path(args.run_dir)
    model = Path(load(root / CONFIG_FILE).config.model.path)
    chosen = None if args.model is None else (args.model, tensors_of(args.model, model))
    comparisons: list[Compared] = []

    async def look(bus: "Bus", _: argparse.Namespace) -> int:
        """Compare the engines that are alive."""
        comparisons.extend(await _engines(bus, root, model, chosen))
        return 0

    asyncio.run(on_bus(url, run, argparse.Namespace(command="debug"), look))
    if not comparisons:
        raise ValueError(f"{args.run_dir}: want a running engine, got none")
    return comparisons


async def _engines(
    bus: "Bus", root: Path, model: Path, chosen: "tuple[Path, Mapping[str, Tensor]] | None"
) -> list[Compared]:
    from tidemill.bus.liveness.heartbeats import LiveView
    from tidemill.bus.liveness.keys import api_keys

    engines = []
    rows = [row for row in await LiveView(bus).alive("engine") if row.address]
    keys = api_keys(bus)
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
            engines.append(Compared(what=what, tensors=0, differs=(), failure=str(error)))
    return engines
