"""A run of weeks in an hour: small steps, every fault in turn, and what grows with them.

`tidemill up` of the smoke run. After every `--every` steps the next fault comes: a kill (-9) of actor, engine, rank,
feeder and nats-server, and a stop of actor, engine and rank for some seconds. At every twentieth of the run the memory
of each process of some seconds, the contents of each stream and the bytes of the files are noted. It fails when

- a sample is lost or trained twice, or a process is given up;
- a stream ever has more than its settings allow, or files of more than twice its contents and a block;
- nats-server ever has more memory than its limit and its program, or another process, or the checkpoints, have grown
  from the second to the last quarter by more than `--growth`.

Not bounded are logs (docs/operating.md), plans and versions of weights, which are the run's record: their growth for
a step is printed.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import psutil

from tests import waits
from tests.bench.learn import ROOT
from tests.whole.running import SMOKE
from tidemill.bus.client.layout import stream_configs
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done
from tidemill.launch.run.access import BUS_URL_FILE
from tidemill.launch.settings import config_loader

RUN = "soak"
RECORD = (subjects.stream(RUN, subjects.PLAN), subjects.bucket_stream(RUN, "weights"))
"""Streams that are kept as long as the run."""
CHECKPOINTS, LOGS, FILES = "checkpoints, others, MB", "logs, MB", "files of a stream, of their bound"
SERVER = "nats-server"
SERVER_MB, PROGRAM_MB = 80, 30
"""Limit of the server's heap, up to which Go collects as it likes, and the rest of its memory: program and stacks. The
heap has the newest block of each of six streams.
"""
BLOCK_MB = 10
"""A stream's newest block of up to 8.4 MB keeps the bytes of removed messages; blocks behind it are compacted when more
than half of one is removed (nats-server's filestore). 4,000 steps fill the first block of TASKS or of the live rows:
before, files that are never compacted are not seen.
"""
ROWS = 100
"""More than the rows of any bucket but the versions': they are of processes, of which few have ever lived here."""
BLOCK_BYTES = 512  # Unit of ``st_blocks``
START_S, STOP_S, OLD_S = 300.0, 4.0, 5.0
ROLES = ("actor", "engine", "learner", "feeder", "rank", "bus", SERVER)
FAULTS = (
    *((role, signal.SIGKILL) for role in ("actor", "engine", "rank", "feeder", SERVER)),
    *((role, signal.SIGSTOP) for role in ("actor", "engine", "rank")),
)
SETTINGS = (
    *(f"run={RUN}", "learner.checkpoint_every=20", "bus.lease_s=5", "bus.history_samples=500", "up.require_reward=-1"),
    *("up.restarts=1000000", "up.restart_window_s=0.4", "up.dashboard=false", "weights.phase_deadline_s=20"),
    *("bus.samples_max_bytes=50000000", "bus.trained_max_bytes=500000", "bus.duplicate_window_s=20"),
    "bus.history_steps=500",
)
"""Streams of small bounds, which are reached within a hundred steps."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=100, help="steps between two faults")
    parser.add_argument("--growth", type=float, default=0.15, help="largest growth of memory and of files")
    args = parser.parse_args(arguments)
    directory = ROOT / "runs" / "bench" / RUN
    shutil.rmtree(directory, ignore_errors=True)
    scene = Scene(directory, args.steps)
    try:
        asyncio.run(scene.soak(args.every))
        code = scene.process.wait()
    finally:
        scene.end()
    sys.exit(report(directory, code, scene, growth=args.growth))


class Scene:
    """The run, its faults, and what was noted."""

    def __init__(self, directory: Path, steps: int) -> None:
        self._directory, self._steps = directory, steps
        self.faults: list[str] = []
        self.noted: dict[str, list[float]] = defaultdict(list)
        """Values over the run: MB of each role's memory, contents of streams, MB of files."""
        settings = (f"directory={directory}", f"learner.steps={steps}", *SETTINGS)
        words = [word for setting in settings for word in ("--set", setting)]
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".log").open("wb") as log:
            command = [sys.executable, "-m", "tidemill", "up", str(SMOKE), "--fresh", *words]
            environment = {**os.environ, "GOMEMLIMIT": f"{SERVER_MB}000000"}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    async def soak(self, every: int) -> None:
        """Bring every fault in turn, until the last step is done."""
        address = self._directory / BUS_URL_FILE
        await waits.until(address.exists, alive=self._running, timeout_s=START_S)
        faults, noted = itertools.cycle(FAULTS), 0
        async with connect(address.read_text().strip(), RUN, name="soak", wait_s=60) as bus:
            async for step in self._steps_of(bus):
                if step * 20 // self._steps > noted:
                    noted += 1
                    self._note_memory()
                    await self._note_files(bus)
                if step % every == 0 and step < self._steps - every:
                    await self._bring(*next(faults))
                if step >= self._steps:
                    return

    async def _steps_of(self, bus: Bus) -> AsyncIterator[int]:
        last = 0
        async for _, record in bus.plans.follow():
            if isinstance(record, Done) and record.step > last:
                last = record.step
                yield last

    def _running(self) -> bool:
        return self.process.poll() is None

    async def _bring(self, role: str, number: signal.Signals) -> None:
        """Kill a process of this role, or stop it for some seconds."""
        for process in self._processes(role)[:1]:
            self.faults.append(f"{number.name} {role}")
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                if number == signal.SIGSTOP:
                    await asyncio.sleep(STOP_S)
                    process.send_signal(signal.SIGCONT)

    def _note_memory(self) -> None:
        for role in ROLES:
            old = [process for process in self._processes(role) if time.time() - process.create_time() > OLD_S]
            with contextlib.suppress(psutil.NoSuchProcess):
                if old:
                    self.noted[role].append(max(process.memory_info().rss for process in old) / 1e6)

    async def _note_files(self, bus: Bus) -> None:
        sizes: Counter[str] = Counter()
        for root, _, names in os.walk(self._directory):  # passes over directories that are removed meanwhile
            for path in (Path(root, name) for name in names):
                with contextlib.suppress(OSError):
                    sizes[_kind(path)] += path.stat().st_blocks * BLOCK_BYTES
        files = [0.0]
        for stream in (config["name"] for config in stream_configs(RUN, bus.config)):
            state = await bus.jet.retry_for_ever(lambda stream=stream: bus.jet.state(stream))  # type: ignore[misc]
            files.append(sizes.pop(stream, 0) / (2 * state.bytes + BLOCK_MB * 1e6))
            is_trained = stream == subjects.stream(RUN, subjects.TRAINED)
            name = f"{stream}, MB" if is_trained or stream in RECORD else stream
            self.noted[name].append(state.bytes / 1e6 if name != stream else state.messages)
        self.noted[FILES].append(max(files))
        for kind in (CHECKPOINTS, LOGS):
            self.noted[kind].append(sizes[kind] / 1e6)

    def _processes(self, role: str) -> list[psutil.Process]:
        """Return the processes of a role below this run, in the order of their ids."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                program = Path(words[0]).name if words else ""
                if role == program or ("tidemill" in words and words[words.index("tidemill") + 1 :][:1] == [role]):
                    found.append(process)
        return found


def _kind(path: Path) -> str:
    """Return the kind of a file by its place: its stream, or what it is for."""
    if "streams" in path.parts[:-1]:
        return path.parts[path.parts.index("streams") + 1]
    return LOGS if path.suffix in (".log", ".jsonl") else CHECKPOINTS


def bounds() -> dict[str, float]:
    """Return the largest value that the settings allow, by the names in ``Scene.noted``.

    When the streams are trimmed to the oldest of two checkpoints it is less than three intervals old.
    """
    config = config_loader.load(SMOKE, SETTINGS).config
    learner, history = config.learner, config.bus.history_samples
    groups = (3 * learner.checkpoint_every + config.staleness.max_lag + 1) * learner.groups_per_step
    streams = {
        subjects.stream(RUN, subjects.TASKS): history + groups,
        subjects.stream(RUN, subjects.SAMPLES): history + groups * learner.group_size,
        f"{subjects.stream(RUN, subjects.TRAINED)}, MB": config.bus.trained_max_bytes / 1e6,
        **{subjects.stream(RUN, name): ROWS for name in (subjects.PARTIALS, subjects.DEAD)},
    }
    buckets = [subjects.bucket_stream(RUN, bucket) for bucket in subjects.BUCKETS]
    rows = {name: ROWS for name in buckets if name not in RECORD}
    # Twice the settings, and the marks of three checkpoints; four records a step: plan, outcome, and those given up
    kept = 2 * config.bus.history_steps + 3 * learner.checkpoint_every
    rows |= {RECORD[0]: 4 * kept, RECORD[1]: 2 * kept}
    return streams | rows | {FILES: 1.0, SERVER: SERVER_MB + PROGRAM_MB}


def report(directory: Path, code: int, scene: Scene, *, growth: float) -> int:
    """Print the accounting, and the values beside their bounds. Returns 1 when the run failed, or one is beyond."""
    summary = json.loads((directory / "summary.json").read_text())
    lost, twice = summary["samples_lost"], summary["samples_trained_twice"]
    print(f"up ended with {code}; {summary['steps']} steps, {len(scene.faults)} faults; lost {lost}, twice {twice}")
    print(f"{'':<36} {'2nd quarter':>12} {'last quarter':>12} {'largest':>10} {'bound':>10}")
    failed = code != 0 or lost != 0 or twice != 0
    of_settings = bounds()
    for name, values in scene.noted.items():
        if len(values) < 8:
            continue
        quarter = len(values) // 4
        before, after = median(values[quarter : 2 * quarter]), median(values[-quarter:])
        unbounded = name == LOGS or name.removesuffix(", MB") in RECORD
        bound = math.inf if unbounded else of_settings.get(name, before * (1 + growth))
        beyond = (max(values) if name in of_settings else after) > bound
        failed = failed or beyond
        row = f"{name:<36} {before:12.2f} {after:12.2f} {max(values):10.2f} {bound:10.2f}"
        print(row + (" BEYOND" if beyond else ""))
    for name in (LOGS, *(f"{stream}, MB" for stream in RECORD)):
        print(f"{name.removesuffix(', MB')}: {1000 * scene.noted[name][-1] / summary['steps']:.1f} KB a step")
    return int(failed)
