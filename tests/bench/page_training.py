"""What training pays for a page that looks on: processor time of a step, with and without a viewer, in the same run.

python -m tests.bench.page_training [--windows 8] [--steps 40] [--viewers 1] [--config digits]

``tidemill up`` trains without an end. Windows of ``--steps`` steps alternate in the order without, with, with, without:
with, ``tidemill dashboard`` serves ``--viewers`` readers of its events, one of whom asks for the overview every ten
seconds, as an open page does. A step's time is of all processes of the run below ``up``, nats-server included, without
the page and its viewers.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import psutil

from tests.bench.page import ROOT, page
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.messages import Done

WARM_STEPS = 100  # Responses become shorter while the run learns, most of all at its begin
ASK_S = 10.0


def cpu_s(pid: int) -> float:
    """Return the processor time of the processes below ``pid``, and of the ended children that they waited for."""
    total = 0.0
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


class Steps:
    """The newest step that is done."""

    def __init__(self) -> None:
        self.newest, self._waiter = 0, Waiter()

    async def follow(self, bus: Bus) -> None:
        async for _, record in bus.plans.follow():
            if isinstance(record, Done):
                self.newest = record.step
                self._waiter.wake()

    async def reach(self, step: int) -> int:
        """Return the newest step once it is ``step`` or a later one."""
        while self.newest < step:
            await self._waiter.wait()
        return self.newest


@asynccontextmanager
async def viewed(url: str, run: str, directory: Path, viewers: int) -> AsyncIterator[None]:
    """Serve the page to viewers while entered."""
    with page(url, run, directory) as (address, _):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

            async def read() -> None:
                async with session.get(f"{address}events") as response:
                    async for _ in response.content.iter_any():
                        pass

            async def ask() -> None:
                while True:
                    async with session.get(f"{address}api/overview") as response:
                        await response.read()
                    await asyncio.sleep(ASK_S)

            tasks = [asyncio.create_task(work) for work in (*[read() for _ in range(viewers)], ask())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)


async def measure(args: argparse.Namespace, up: "subprocess.Popen[bytes]", directory: Path) -> dict[bool, list[float]]:
    """Return the processor seconds of a step in each window, by whether it was looked at."""
    address = directory / "bus.url"
    while not address.exists():
        assert up.poll() is None, "the run has ended"
        await asyncio.sleep(0.1)
    url, costs = address.read_text().strip(), {False: list[float](), True: list[float]()}
    async with connect(url, args.run, name="bench") as bus:
        steps = Steps()
        following = asyncio.create_task(steps.follow(bus))
        await steps.reach(WARM_STEPS)
        for window in range(args.windows):
            is_viewed = window % 4 in (1, 2)
            async with viewed(url, args.run, directory, args.viewers) if is_viewed else asyncio.timeout(None):
                first = await steps.reach(steps.newest + 3)  # the start of the page reads the past once
                before_s = cpu_s(up.pid)
                last = await steps.reach(first + args.steps)
                costs[is_viewed].append((cpu_s(up.pid) - before_s) / (last - first))
            print(f"window {window} viewed={is_viewed}: {costs[is_viewed][-1]:.4f} CPU-s a step", file=sys.stderr)
        following.cancel()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="steps of a window")
    parser.add_argument("--viewers", type=int, default=1)
    parser.add_argument("--config", default="digits")
    parser.add_argument("--run", default="digits", help="name of the run of that configuration")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        settings = {"directory": directory, "up.dashboard": "false", "learner.steps": 1_000_000}
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        with (Path(folder) / "up.log").open("wb") as log:
            command = [sys.executable, "-m", "tidemill", "up", args.config, *words, "--fresh"]
            up = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            costs = asyncio.run(measure(args, up, directory))
        finally:
            up.terminate()
            up.wait()
    without, viewed_s = statistics.median(costs[False]), statistics.median(costs[True])
    for is_viewed, rows in costs.items():
        middle, bounds = statistics.median(rows), f"{min(rows):.4f} to {max(rows):.4f}"
        print(f"viewed={is_viewed}: CPU-s a step, median {middle:.4f}, {bounds}")
    print(f"RATIO a step that is looked at / not: {viewed_s / without:.4f}")


if __name__ == "__main__":
    main()
