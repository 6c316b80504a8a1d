"""``tidemill audit``: the accounting of a run, whichever way its processes were started."""

import argparse
import asyncio
import json
import math
import sys
import time
from pathlib import Path

from tidemill.actors.engines.membership import CONFIG_KEY
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import EndRow, Outcome
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import look
from tidemill.launch.run import summary
from tidemill.launch.run.accounting import read_accounts
from tidemill.launch.run.run_end import end_of, new_end
from tidemill.launch.settings.config_loader import from_map
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.checkpoints import disk

NOT_ENDED = "not ended"


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="of the run (default: where its learner wrote)")
    parser.add_argument("--wait", action="store_true", help="wait until the run has ended")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="also write the accounting there, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the accounting of a run. Returns 0 when it balances, nothing is lost or trained twice, else 1.

    Raises ValueError for a bus or a run that cannot be read.
    """
    if args.checkpoints is not None and not args.checkpoints.is_dir():
        raise ValueError(f"--checkpoints: want a directory, got {str(args.checkpoints)!r}")
    return look(args, show_audit)


async def show_audit(bus: Bus, args: argparse.Namespace) -> int:
    """Print the accounting, and write it to ``args.summary``; return the exit code. Raises ValueError."""
    end = await new_end(bus) if args.wait and not args.ended else await end_of(bus)
    row, _ = await bus.rows("run").read(CONFIG_KEY)
    if row is None:
        raise ValueError(f"run {bus.run}: want one that a learner has begun (row run/{CONFIG_KEY}), got none")
    config = from_map(row, f"run {bus.run}, row run/{CONFIG_KEY}", {})
    checkpoints, newest = await _checkpoints(bus, args, config)
    accounts = await read_accounts(
        bus,
        config,
        checkpoints=checkpoints,
        newest=newest,
        goes_on=end is None,
        progress=_Progress().report,
    )
    result = accounts.summary(ended_by=NOT_ENDED if end is None else end.reason)
    if args.summary is not None:
        await asyncio.to_thread(write_whole, args.summary, json.dumps(result, indent=2) + "\n")
    _print(result, end)
    return int(bool(result["promises_broken"]))


async def _checkpoints(
    bus: Bus, args: argparse.Namespace, config: RunConfig
) -> tuple[Path | None, tuple[float, float]]:
    """Return the directory of the run's checkpoints, None when none are on this machine, and the newest that counts.

    A directory may have later checkpoints than the bus knows: a restored bus is a copy of an earlier state of its run.
    """
    row, _ = await bus.rows("run").read(disk.CHECKPOINT_KEY)
    newest = (math.inf, math.inf) if row is None else (row["step"], row.get("epoch", math.inf))
    places = [args.checkpoints, Path(args.run_dir) / "checkpoints" if args.run_dir else None]
    places += [Path(row["directory"]).parent if row is not None else config.checkpoints]
    for place in places:
        if place is not None and any((kept.step, kept.epoch) <= newest for kept in disk.listed(place)):
            return place, newest
    return None, newest


class _Progress:
    """Lines on stderr while a long stream is read."""

    def __init__(self) -> None:
        self._reported_s = time.monotonic()

    def report(self, done: int, total: int) -> None:
        if time.monotonic() - self._reported_s >= summary.REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            print(f"auditing: {done:,} of {total:,} messages of SAMPLES read", file=sys.stderr)


def _print(result: JsonObject, end: EndRow | None) -> None:
    state = "goes on"
    if end is not None:
        state = "is done" if end.outcome is Outcome.DONE else f"has failed (code {end.code})"
        state += f" after step {end.step}: {end.reason}"
    print(f"{result['run']}: the run {state}")
    names = [name for name in summary.REPORTED if name in result]
    for name in [*names, "samples_buffered", "samples_duplicate", "books_balance"]:
        print(f"  {name:<26} {summary.as_text(result[name])}")
    for text in result["not_checked"]:
        print(f"  not checked: {text}")
    for text in result["problems"]:
        print(f"  problem: {text}")
    for text in result["promises_broken"]:
        print(f"  broken: {text}")
