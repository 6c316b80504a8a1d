"""A run of weeks in an hour: small steps, every fault in turn, and what grows with them.

`tidemill up` of the smoke run. After every `--every` steps the next fault comes: a kill (-9) of actor, engine, rank,
feeder and nats-server, and a stop of actor, engine and rank for some seconds. At every twentieth of the run the memory
of each process of some seconds and the bytes of its files are noted. It fails when a sample is lost or trained twice,
when a process is given up, or when memory or files grow from the second to the last quarter by more than `--growth`.
Not bounded are logs (docs/operating.md), and the log of plans and the rows of versions, which are the run's record.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
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
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire.messages import Done
from tidemill.launch.run.access import BUS_URL_FILE

RUN, RECORD = "soak", "plans and versions"
KINDS = (RECORD, "other streams", "checkpoints, others", "logs")
BLOCK_BYTES = 512  # Unit of ``st_blocks``
START_S, STOP_S, OLD_S = 300.0, 4.0, 5.0
ROLES = ("actor", "engine", "learner", "feeder", "rank", "bus", "nats-server")
FAULTS = (
    *((role, signal.SIGKILL) for role in ("actor", "engine", "rank", "feeder", "nats-server")),
    *((role, signal.SIGSTOP) for role in ("actor", "engine", "rank")),
)
SETTINGS = (
    *(f"run={RUN}", "learner.checkpoint_every=20", "bus.lease_s=5", "bus.history_samples=500", "up.require_reward=-1"),
    *("up.restarts=1000000", "up.restart_window_s=0.4", "up.dashboard=false", "weights.phase_deadline_s=20"),
    *("bus.samples_max_bytes=50000000", "bus.trained_max_bytes=500000"),
)
"""Streams of small bounds, which are reached within the run."""


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
        """Values over the run: MB of each role's memory, and of the files."""
        settings = (f"directory={directory}", f"learner.steps={steps}", *SETTINGS)
        words = [word for setting in settings for word in ("--set", setting)]
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".log").open("wb") as log:
            command = [sys.executable, "-m", "tidemill", "up", str(SMOKE), "--fresh", *words]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

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
                    self._note()
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

    def _note(self) -> None:
        for role in ROLES:
            old = [process for process in self._processes(role) if time.time() - process.create_time() > OLD_S]
            with contextlib.suppress(psutil.NoSuchProcess):
                if old:
                    self.noted[role].append(max(process.memory_info().rss for process in old) / 1e6)
        sizes: Counter[str] = Counter()
        for root, _, names in os.walk(self._directory):  # passes over directories that are removed meanwhile
            for path in (Path(root, name) for name in names):
                with contextlib.suppress(OSError):
                    sizes[_kind(path)] += path.stat().st_blocks * BLOCK_BYTES
        for kind in KINDS:
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
    """Return the kind of a file by its place."""
    if {f"TM_{RUN}_PLAN", f"KV_TM_{RUN}_weights"} & set(path.parts):
        return RECORD
    if "streams" in path.parts:
        return "other streams"
    return "logs" if path.suffix in (".log", ".jsonl") else "checkpoints, others"


def report(directory: Path, code: int, scene: Scene, *, growth: float) -> int:
    """Print the accounting and what has grown. Returns 1 when the run failed, or grew by more than ``growth``."""
    summary = json.loads((directory / "summary.json").read_text())
    lost, twice = summary["samples_lost"], summary["samples_trained_twice"]
    print(f"up ended with {code}; {summary['steps']} steps, {len(scene.faults)} faults; lost {lost}, twice {twice}")
    print(f"{'':<20} {'2nd quarter':>12} {'last quarter':>12} {'growth':>8}")
    failed = code != 0 or lost != 0 or twice != 0
    for name, values in scene.noted.items():
        if len(values) < 8:
            continue
        quarter = len(values) // 4
        before, after = median(values[quarter : 2 * quarter]), median(values[-quarter:])
        print(f"{name:<20} {before:12.1f} {after:12.1f} {after / before - 1:8.1%}")
        failed = failed or (name not in (RECORD, "logs") and after / before - 1 > growth)
    print(f"{RECORD}: {1000 * scene.noted[RECORD][-1] / summary['steps']:.1f} KB a step, kept as long as the run")
    return int(failed)
