"""Metrics of other runs, drawn over the metrics of this run: runs of the same bus, or directories of ended runs."""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tidemill.bus.streams.bus import connect, runs_of
from tidemill.bus.wire import subjects
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Done
from tidemill.launch.page.columns import MetricColumns
from tidemill.launch.page.texts import safe

METRICS_FILE = "metrics.jsonl"
MAX_RUNS = 16  # Runs of directories, and runs of the bus whose metrics are kept
KEPT_S = 10.0  # Seconds for which the metrics of another run are kept: its curves are requested one after the other
READ_S = 20.0  # Longest time for the records of another run of the bus
MAX_LINE_BYTES = 1 << 20


class ComparedRuns:
    """The runs that this page may be compared with."""

    def __init__(self, url: str, run: str, directories: Sequence[Path] = ()) -> None:
        """Raises ValueError for too many directories, or one without metrics."""
        self._url, self._run = url, run
        if len(directories) > MAX_RUNS:
            raise ValueError(f"--compare: want at most {MAX_RUNS} directories, got {len(directories)}")
        for directory in directories:
            if not (directory / METRICS_FILE).is_file():
                raise ValueError(f"--compare: want the directory of a run ({METRICS_FILE} in it), got {directory}")
        self._directories = {safe(directory.name): directory for directory in directories}
        self._kept: OrderedDict[str, tuple[float, MetricColumns]] = OrderedDict()  # With the time of reading
        self._reading = asyncio.Lock()

    async def as_map(self, step: int) -> JsonObject:
        """Return the names of all runs. ``step``: the last one of this run."""
        runs: list[JsonObject] = [{"name": self._run, "this": True, "from": "bus", "steps": step}]
        others = [name for name in await self._on_bus() if name != self._run]
        runs += [{"name": name, "this": False, "from": "bus", "steps": None} for name in others]
        runs += [{"name": name, "this": False, "from": "directory", "steps": None} for name in self._directories]
        return {"runs": runs}

    async def columns(self, name: str) -> MetricColumns | None:
        """Return the metrics of another run, None for this one.

        Raises ValueError for an unknown name, BusError, TimeoutError.
        """
        if name == self._run:
            return None
        async with self._reading:
            kept = self._kept.pop(name, None)
            if kept is None or time.monotonic() > kept[0] + KEPT_S:
                kept = time.monotonic(), await self._read(name)
            self._kept[name] = kept
            while len(self._kept) > MAX_RUNS:
                self._kept.popitem(last=False)
            return kept[1]

    async def _read(self, name: str) -> MetricColumns:
        if name in self._directories:
            return await asyncio.to_thread(_read_file, self._directories[name] / METRICS_FILE)
        if name not in await self._on_bus():
            raise ValueError(f"run: want one of /api/runs, got {safe(name)[:80]!r}")
        return await self._read_bus(name)

    async def _on_bus(self) -> list[str]:
        return await runs_of(self._url, name="dashboard", wait_s=3.0, having=subjects.PLAN)

    async def _read_bus(self, name: str) -> MetricColumns:
        columns = MetricColumns()
        async with asyncio.timeout(READ_S), connect(self._url, name, name="dashboard", wait_s=3.0) as bus:
            async for _, record in bus.plans.scan():
                if isinstance(record, Done):
                    columns.add(record.step, {safe(key): value for key, value in record.metrics.items()}, 0.0)
        return columns


def _read_file(file: Path) -> MetricColumns:
    """Return the metrics of an ended run; lines that cannot be read are left out."""
    columns = MetricColumns()
    with file.open("rb") as lines:
        while line := lines.readline(MAX_LINE_BYTES):
            try:
                fields = json.loads(line)
                step = int(fields["step"])
            except (ValueError, KeyError, TypeError):
                continue
            numbers = {safe(name): value for name, value in fields.items() if isinstance(value, int | float)}
            numbers = {name: value for name, value in numbers.items() if name not in ("step", "epoch")}
            if 0 < step < 1 << 31:
                columns.add(step, numbers, 0.0)
    return columns
