"""``tidemill runs``: the runs on one bus, with their sizes and bounds (docs/operating.md)."""

import argparse
import asyncio
import dataclasses
import json
import os

from rich.console import Console

from tidemill.bus.errors import BusError
from tidemill.launch.cli.arguments import bus_url
from tidemill.launch.deploy.registry import RunOnBus, read_runs
from tidemill.launch.run import process
from tidemill.launch.run.access import viewer_line
from tidemill.launch.samples.text import plain, plain_table

CONNECT_S = 5.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bus", required=True, type=bus_url, metavar="URL", help="the bus")
    parser.add_argument("--json", action="store_true", help="one JSON object for each run")


def run(args: argparse.Namespace) -> int:
    """Print the runs on a bus. Returns 0. Raises ValueError when they cannot be read."""
    process.set_up_logging(args.command)
    try:
        runs = asyncio.run(read_runs(viewer_line(args.bus, os.environ), wait_s=CONNECT_S))
    except BusError as error:
        raise ValueError(str(error)) from None
    if args.json:
        for row in runs:
            print(json.dumps(dataclasses.asdict(row)))
        return 0
    _print(runs)
    return 0


def _print(runs: list[RunOnBus]) -> None:
    sizes = ("stored", "reserved")
    rate = "tasks/s"
    table = plain_table("run", "state", "step", *sizes, rate, "processes", "learner", right=(*sizes, rate))
    for row in runs:
        step = f"{row.step} of {row.steps}" if row.steps else str(row.step)
        roles = ", ".join(f"{count} {role}" for role, count in sorted(row.processes.items()))
        stored, reserved = _megabytes(row.bytes), _megabytes(row.reserved_bytes) + ("" if row.has_quota else " + any")
        most = f"<= {row.tasks_per_s:g}" if row.tasks_per_s else "any"
        table.add_row(*map(plain, (row.name, row.state, step, stored, reserved, most, roles, row.owner)))
    Console(highlight=False, soft_wrap=True).print(table)
    print(f"{len(runs)} runs, {_megabytes(sum(row.bytes for row in runs))} stored")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
