"""``tidemill runs``: the runs on one bus, with state, step, sizes, bounds and processes of each (docs/operating.md).
It only reads.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from tidemill.bus.client.connection import Connection, open_connection
from tidemill.bus.client.outbox import answered
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, NotFound, WireError
from tidemill.bus.liveness import processes
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import decode_record
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Done
from tidemill.bus.wire.rows import LiveRow
from tidemill.bus.wire.task_settings import RUN_NAME
from tidemill.launch.cli.arguments import bus_url
from tidemill.launch.run import process
from tidemill.launch.run.access import viewer_line
from tidemill.launch.samples.text import plain, plain_table

CONNECT_S = 5.0
_API = "$JS.API.STREAM"
_ANSWER_S = 5.0
_AT_ONCE = 16
_STREAMS = ("TASKS", r"SAMPLES(?:-\d+of\d+)?", "PLAN", "PARTIALS", "TURNS", "DEAD", "TRAINED")
_BUCKETS = [bucket for bucket in subjects.BUCKETS if bucket not in subjects.SECRET_BUCKETS]  # a viewer may not ask
_STREAM = re.compile(
    rf"TM_({RUN_NAME.pattern})_({'|'.join(_STREAMS)})|KV_TM_({RUN_NAME.pattern})_({'|'.join(_BUCKETS)})"
)


@dataclass(slots=True, kw_only=True)
class RunOnBus:
    """A run, or a run that only keeps samples or follows another one."""

    name: str
    state: str = "stopped"
    """done | failed | running (its learner is alive) | stopped | no learner yet."""
    step: int = 0
    steps: int = 0
    """``learner.steps``; 0 = not known."""
    bytes: int = 0
    reserved_bytes: int = 0
    """Sum of the bounds of its streams, which the server keeps free for it."""
    has_quota: bool = True
    """All its streams have a bound."""
    tasks_per_s: float = 0.0
    """``bus.tasks_per_s``; 0 = no bound, or not known."""
    owner: str = ""
    """Machine of its learner, and its directory."""
    processes: dict[str, int] = field(default_factory=dict)
    """Live processes by role."""
    has_tasks: bool = False
    """It issues tasks, so actors without ``--run`` find it."""


async def read_runs(url: str, *, wait_s: float) -> list[RunOnBus]:
    """Return every run on a bus, by name. Raises BusUnavailable, BusError."""
    async with open_connection(url, "runs", wait_s) as connection:
        runs = await _sizes(connection)
        await asyncio.gather(*[_fill(Bus(connection, run.name, BusConfig(), "runs"), run) for run in runs.values()])
    return [runs[name] for name in sorted(runs)]


async def _sizes(connection: Connection) -> dict[str, RunOnBus]:
    runs: dict[str, RunOnBus] = {}
    limit = asyncio.Semaphore(_AT_ONCE)

    async def add(stream: str) -> None:
        if (match := _STREAM.fullmatch(stream)) is None:
            return
        async with limit:
            info = await _ask(connection, f"INFO.{stream}")
        run = runs.setdefault(match[1] or match[3], RunOnBus(name=match[1] or match[3]))
        run.has_tasks = run.has_tasks or match[2] == subjects.TASKS
        run.bytes += int(info["state"]["bytes"])
        bound = int(info["config"].get("max_bytes", -1))
        run.reserved_bytes += max(0, bound)
        run.has_quota = run.has_quota and bound > 0

    await asyncio.gather(*map(add, await _stream_names(connection)))
    return runs


async def _stream_names(connection: Connection) -> Sequence[str]:
    names: list[str] = []
    while True:
        answer = await _ask(connection, "NAMES", {"offset": len(names)})
        page = answer.get("streams") or []
        names += page
        if not page or len(names) >= int(answer.get("total", 0)):
            return names


async def _ask(connection: Connection, verb: str, request: Mapping[str, object] | None = None) -> JsonObject:
    message = await connection.request(f"{_API}.{verb}", json.dumps(request or {}).encode(), _ANSWER_S)
    answer = answered(verb, message.data)
    if "error" in answer:
        raise BusError(f"{verb}: {answer['error'].get('description', answer['error'])}")
    return answer


async def _fill(bus: Bus, run: RunOnBus) -> None:
    """Read what a run has recorded of itself. A run whose streams are just made, or removed, stays as it is."""
    try:
        live = [row for row, age_s in await processes(bus) if not age_s]
        end, _ = await bus.rows("run").read(subjects.END_KEY)
        config, _ = await bus.rows("run").read("config")
        run.step = await _newest_step(bus)
    except NotFound:
        return
    run.processes = dict(Counter(row.role for row in live))
    run.steps = int(((config or {}).get("learner") or {}).get("steps") or 0)
    run.tasks_per_s = float(((config or {}).get("bus") or {}).get("tasks_per_s") or 0.0)
    run.owner = _owner(live, config or {})
    if {"learner", "feeder"} & run.processes.keys():
        run.state = "running"
    elif end is not None:
        run.state = str(end["outcome"])
    elif config is None:
        run.state = "no learner yet"


async def _newest_step(bus: Bus) -> int:
    message = await bus.jet.last(subjects.stream(bus.run, subjects.PLAN), subjects.plan(bus.run, "done"))
    try:
        record = decode_record(message.data) if message is not None else None
    except WireError:
        return 0
    return record.step if isinstance(record, Done) else 0


def _owner(live: Sequence[LiveRow], config: JsonObject) -> str:
    host = next((row.host for row in live if row.role == "learner"), "")
    return ":".join(text for text in (host, str(config.get("directory") or "")) if text)


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
