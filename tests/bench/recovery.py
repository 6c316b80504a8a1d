"""Pause of a run when one of its processes is killed (-9), against the time that the same process takes to start at
first.

A real `tidemill up` of the digits run with one actor and one engine, so that every death matters. For each victim, in
rounds: kill it, and measure until its successor is a process, until that is ready (it serves, works, answers; a rank:
it has imported, loaded the model and read its checkpoint), and until the run has its next result from it: a sample for
actor, engine and nats-server, a step for the learner and for the supervisor `up` (which takes all others with it, and
which this program starts again at once with --resume).
"""

import argparse
import asyncio
import contextlib
import math
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests import waits
from tests.bench.learn import CONFIG, ROOT
from tidemill.bus.errors import BusError
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus, connect, current_epoch
from tidemill.bus.wire.messages import Done
from tidemill.launch.run.access import BUS_URL_FILE

RUN = "recovery"
LOOK_S = 0.01
LIMIT_S = 180.0
READY = {"actor": ("working", "waiting"), "engine": ("serving",)}
VICTIMS = ("actor", "engine", "nats-server", "learner", "up")
SETTINGS = (
    *(f"run={RUN}", "learner.steps=1000000", "learner.checkpoint_every=10", "bus.lease_s=5", "up.restarts=1000"),
    *("up.restart_window_s=0.4", "up.require_reward=-1", "bus.history_samples=64"),
)
"""Settings with a short memory for restarts: each kill has the first back-off (0.5 s), like a single crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds after the kill, or after the start."""

    process: float
    ready: float
    result: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    directory = ROOT / "runs" / "bench" / "recovery"
    shutil.rmtree(directory, ignore_errors=True)
    scene = Scene(directory)
    try:
        first = scene.up("--fresh")
        print(f"first start of everything: {first.result:.1f} s to the first step")
        found: dict[str, list[Recovery]] = {victim: [] for victim in VICTIMS}
        for _ in range(args.rounds):
            for victim in VICTIMS:
                found[victim].append(scene.up("--resume") if victim == "up" else asyncio.run(scene.kill(victim)))
    finally:
        scene.end()
    print(
        f"{'killed':<12} {'process':>8} {'ready':>8} {'result':>8}   (medians of {args.rounds}, seconds after "
        "the kill; the longest result)"
    )
    for victim, times in found.items():
        process, ready, result = (
            median(getattr(one, name) for one in times) for name in ("process", "ready", "result")
        )
        longest = max(one.result for one in times)
        print(f"{victim:<12} {process:8.2f} {ready:8.2f} {result:8.2f}   {longest:.2f}")
        print(f"RATIO {victim} recovery / first start of everything: {result / first.result:.2f}")
    beyond = median(one.result - one.ready for one in found["learner"])
    print(f"learner: {beyond:.2f} s from a loaded model to the next step")


class Scene:
    """The run and its processes."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._log = directory, directory.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def up(self, flag: str) -> Recovery:
        """Start the run, after killing its remaining processes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        began_s = time.monotonic()
        waits.poll(lambda: not self._processes(), every_s=LOOK_S, timeout_s=math.inf)
        settings = [word for one in (f"directory={self._directory}", *SETTINGS) for word in ("--set", one)]
        command = [sys.executable, "-m", "tidemill", "up", str(CONFIG), flag, *settings]
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        started_s = time.monotonic()
        return asyncio.run(self._until_step(began_s, started_s))

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    async def kill(self, victim: str) -> Recovery:
        async with asyncio.timeout(LIMIT_S), self._bus() as bus, Results.seen(bus) as results:
            await results.until(lambda: results.steps > 1)  # all is well before
            epoch, log = results.epoch, self._begun()
            (pid,) = self._processes(victim)
            began_s = time.monotonic()
            psutil.Process(pid).kill()
            await results.until(lambda: any(other != pid for other in self._processes(victim)))
            process_s = time.monotonic() - began_s
            if victim == "learner":
                await results.until(lambda: self._begun() > log)
                ready_s = time.monotonic() - began_s
                await results.until(lambda: results.epoch > epoch)
            else:
                await _until_ready(bus, victim, pid)
                ready_s, before = time.monotonic() - began_s, results.samples
                await results.until(lambda: results.samples > before)
            return Recovery(process=process_s, ready=ready_s, result=time.monotonic() - began_s)

    async def _until_step(self, began_s: float, started_s: float) -> Recovery:
        async with asyncio.timeout(LIMIT_S):
            file = self._directory / BUS_URL_FILE
            while not file.exists():
                if self._process is None or self._process.poll() is not None:
                    raise SystemExit(f"`tidemill up` ended; its last words are in {self._log}")
                await asyncio.sleep(LOOK_S)
            async with self._bus() as bus, Results.seen(bus) as results:
                ready_s, epoch = time.monotonic() - began_s, await current_epoch(bus)
                await results.until(lambda: results.epoch > epoch)
            return Recovery(process=started_s - began_s, ready=ready_s, result=time.monotonic() - began_s)

    def _bus(self) -> AbstractAsyncContextManager[Bus]:
        return connect((self._directory / BUS_URL_FILE).read_text().strip(), RUN, name="bench", wait_s=60)

    def _begun(self) -> int:
        """Return how often a rank has loaded the model and its checkpoint, counted in its log."""
        return (
            (self._directory / "logs" / "learner.log")
            .read_text(errors="replace")
            .count("tidemill.learner.ranks.rank: begins rank=0")
        )

    def _processes(self, command: str = "") -> list[int]:
        """Return the ids of the processes below `up`, all or those of one command."""
        found = []
        for process in psutil.process_iter(["cmdline", "name"]):
            words = process.info["cmdline"] or []
            if "up" in words or not any(str(self._directory) in word for word in words):
                continue
            name = words[words.index("tidemill") + 1] if "tidemill" in words else process.info["name"]
            if command in ("", name):
                found.append(process.pid)
        return found


class Results:
    """Results of the run, counted from now on."""

    def __init__(self) -> None:
        self.samples = self.steps = self.epoch = 0

    @classmethod
    @asynccontextmanager
    async def seen(cls, bus: Bus) -> AsyncIterator["Results"]:
        results = cls()

        async def count(message: object) -> None:
            results.samples += 1

        async def follow() -> None:
            async for _, record in bus.plans.follow():
                if isinstance(record, Done):
                    results.steps, results.epoch = results.steps + 1, record.epoch

        await bus.nc.subscribe(f"tm.{RUN}.sample.>", cb=count)
        following = asyncio.create_task(follow())
        try:
            yield results
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def until(self, reached: Callable[[], bool]) -> None:
        await waits.until(reached, every_s=LOOK_S, timeout_s=math.inf)


async def _until_ready(bus: Bus, victim: str, pid: int) -> None:
    """Wait until the server answers again, or another process than ``pid`` has a working phase in its row."""
    view = LiveView(bus)
    while True:
        with contextlib.suppress(BusError):
            if victim == "nats-server":
                await bus.rows("run").get("config")
                return
            if any(row.pid != pid and row.phase in READY[victim] for row, _ in await view.refresh(victim)):
                return
        await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    main()
