"""``tidemill eval``: its arguments as settings, and its result on the terminal."""

import argparse
import asyncio
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.cli.inputs import loaded_config, with_fetched
from tidemill.launch.run.scores import in_words, line_of
from tidemill.launch.settings.config_loader import Loaded, render
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.hub_names import DATASET, MODEL, parse
from tidemill.launch.settings.shipped import config_file

OPEN_TASKS = 256
"""Prompts that are out at a time, where no training needs the engines."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="runs/<run>/final, another directory, or org/name")
    parser.add_argument(
        "data",
        type=Path,
        nargs="?",
        metavar="DATA",
        help="prompt file or org/name; default: eval.sets",
    )
    parser.add_argument("--config", type=config_file, nargs="+", default=[], help="a run's YAML file, with eval.sets")
    parser.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="change a setting")
    parser.add_argument("--reward", default="", metavar="NAME", help="actor.reward: a name, or package.module:function")
    parser.add_argument("--samples", type=int, metavar="K", help="with DATA: responses to each prompt")
    parser.add_argument("--temperature", type=float, metavar="T", help="with DATA: 0 = greedy")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="with DATA: only the first N prompts")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where logs and samples are kept")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each set")
    parser.add_argument("--print-config", action="store_true", help="print every setting and its origin, and end")


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print the scores. Returns 0, 1 when a response is missing, or 75 when it was ended before."""
    with _directory(args.dir) as directory:
        args.set = [*settings(args, directory), *args.set]
        loaded = loaded_config(args)
        if args.print_config:
            print(render(loaded), end="")
            return 0
        require("engine")
        loaded, _ = with_fetched(args, loaded)
        _checked(loaded).refuse()
        return _evaluated(loaded, as_json=args.json)


def settings(args: argparse.Namespace, directory: Path) -> list[str]:
    """Return the settings that the arguments stand for. Raises ValueError for options of DATA without DATA."""
    model = args.model if parse(MODEL, str(args.model)) else args.model.resolve()
    if model.is_absolute() and not (model / "config.json").exists():
        raise ValueError(
            f"MODEL: want a directory with a Hugging Face model (config.json in it), got {str(args.model)!r}"
        )
    options = {
        name: getattr(args, name) for name in ("samples", "temperature", "limit") if getattr(args, name) is not None
    }
    if args.data is None and options:
        raise ValueError(f"--{next(iter(options))}: want it with DATA; without, change eval.sets of --config")
    if args.data is None and not args.config:
        raise ValueError("want DATA, a file of prompts, or --config with eval.sets")
    words = [
        "run=eval",
        f"directory={directory}",
        "prepare=null",
        f"model.path={model}",
        "eval.every=1",
        'eval.best=""',  # one version has no other to be compared with, and DATA replaces the sets
        "eval.stop_after=0",
        f"eval.max_open_tasks={OPEN_TASKS}",
        "learner.colocated=false",
        "actor.scorers.enabled=false",
        "up.scorers=0",
        'bus.url=""',
        "bus.cluster=1",
        "bus.auth=false",
    ]
    if args.data is not None:
        data = args.data if parse(DATASET, str(args.data)) else args.data.resolve()
        sets = {_name(args.data): {"path": str(data), **options}}
        words += [f"eval.sets={json.dumps(sets)}"]
    return words + ([f"actor.reward={args.reward}"] if args.reward else [])


def _name(data: Path) -> str:
    return (
        "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "-" for letter in data.stem)[
            :40
        ]
        or "data"
    )


@contextmanager
def _directory(directory: Path | None) -> Iterator[Path]:
    """Yield an empty directory for logs and the bus: ``--dir``, or one that is removed. Raises ValueError."""
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="tidemill-eval-") as temporary:
            yield Path(temporary)
        return
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"--dir: want an empty directory, got {str(directory)!r}, which is not empty")
    yield directory.resolve()


def _checked(loaded: Loaded) -> Report:
    return check(loaded, Purpose(trains=False))


def _evaluated(loaded: Loaded, *, as_json: bool) -> int:
    from tidemill.bus.wire.messages import Evaluated
    from tidemill.launch.run import process
    from tidemill.launch.run.evaluate import evaluate

    records: list[Evaluated] = []

    async def body(draining: asyncio.Event) -> None:
        """Evaluate."""
        records.extend(await evaluate(loaded.config, draining))

    process.set_up_logging("eval", level=logging.WARNING)
    code = process.run(body, drain_s=loaded.config.up.drain_s * 3)
    for record in records:
        line = line_of(record)
        print(json.dumps(line) if as_json else _block(line))
    if code or not records:
        return code or process.NOT_IN_TIME
    return int(any(record.metrics["missing"] > 0 for record in records))


def _block(line: dict[str, object]) -> str:
    shown = {
        name: value
        for name, value in line.items()
        if name not in ("version", "step", "set", "versions_later", "versions_later_min")
    }
    rows = [
        f"  {name:<18} {value:.6g}" if isinstance(value, float) else f"  {name:<18} {value}"
        for name, value in shown.items()
    ]
    return "\n".join([in_words(line).removesuffix(" (version 0)"), *rows])
