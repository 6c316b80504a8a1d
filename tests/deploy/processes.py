"""A run whose processes are started one by one, each by a command of its own, as on the machines of a cluster."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from tests.waits import until
from tests.whole.running import SMOKE, until_step
from tidemill.bus.errors import BusUnavailable
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire.messages import Done
from tidemill.launch.run.audit import EVERYTHING, audit
from tidemill.launch.run.checkpoint_cursor import read_cursor
from tidemill.launch.run.workers import run_prepare
from tidemill.launch.settings.config_loader import load

LIMIT_S = 240.0
STEPS = 100_000
"""More steps than a run takes within a test, which ends it."""


class Processes:
    """Processes of a run, whose model and prompts are prepared; a context manager that kills what is left of them."""

    def __init__(self, directory: Path, *settings: str, older: str = "", config: Path = SMOKE) -> None:
        """``older``: the command ``tidemill`` of another release, for processes of the release ``old``."""
        self.directory, self.config = directory, config
        directory.mkdir(parents=True, exist_ok=True)
        self._commands = {"old": [older], "new": [sys.executable, "-m", "tidemill"]}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        port = free_port()
        self.url = f"nats://127.0.0.1:{port}"
        self.settings = [
            f"directory={directory}",
            f"bus.port={port}",
            f"learner.steps={STEPS}",
            "learner.checkpoint_every=5",
            "actor.drain_finish_s=2",
            *settings,
        ]

    def __enter__(self) -> Self:
        run_prepare(load([self.config], self.settings, {}).config)
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self, role: str, *options: str, release: str = "new") -> str:
        """Start a process, and return its name: ``actor-new-0``."""
        name = f"{role}-{release}-{sum(known.startswith(role) for known in self._running)}"
        words = [word for setting in self.settings for word in ("--set", setting)]
        own = {
            "bus": ["--config", self.config, *words],
            "learner": ["--config", self.config, "--bus", self.url, *words],
        }.get(role, ["--bus", self.url, "--id", name])
        with (self.directory / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*self._commands[release], role, *map(str, own), *options],
                cwd=self.directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={variable: value for variable, value in os.environ.items() if not variable.startswith("TIDEMILL_")},
            )
        return name

    async def drain(self, name: str) -> None:
        """End a process, which must succeed."""
        self._running[name].terminate()
        await self.ended(name)

    async def ended(self, name: str) -> None:
        """Wait until a process has ended, which must be with success."""
        assert await asyncio.to_thread(self._running[name].wait, LIMIT_S) == 0, self.log(name)

    def log(self, name: str) -> str:
        return f"{name}:\n" + (self.directory / f"{name}.log").read_text()[-4000:]

    def healthy(self) -> bool:
        """Return True. Raises AssertionError with the log of a process that has ended with an error."""
        for name, process in self._running.items():
            assert process.poll() in (None, 0), self.log(name)
        return True

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        """Connect to the bus, once the run has streams."""
        address = self.directory / "bus.url"
        await until(address.exists, alive=self.healthy, timeout_s=LIMIT_S)
        async with connect(self.url, "smoke", name="test") as bus:
            yield bus

    def kill(self) -> None:
        """Kill every process and all below it, as a machine that loses its power."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()

    async def audited(self, bus: Bus) -> list[Done]:
        """Assert that no sample is lost or trained twice. Returns the outcomes of the steps."""
        accounting, outcomes = await audit(bus, read_cursor(self.directory / "checkpoints"))
        assert (accounting.lost, accounting.trained_twice, accounting.balance()) == (0, 0, True), accounting.problems
        assert accounting.invalid == 0, accounting.invalid_by_field
        return outcomes


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def step_after(processes: Processes, bus: Bus, steps: int) -> int:
    """Wait until so many more steps are done than now, and return the last one."""
    last = max([record.step async for _, record in bus.plans.scan() if isinstance(record, Done)], default=0) + steps
    waiting = asyncio.create_task(until_step(bus, last))
    await until(waiting.done, alive=processes.healthy, timeout_s=LIMIT_S)
    await waiting
    return last


async def alive(processes: Processes, bus: Bus, *names: str) -> None:
    """Wait until these workers work."""
    view = LiveView(bus)

    async def working() -> bool:
        with contextlib.suppress(BusUnavailable):
            phases = {row.id: row.phase for row in await view.alive()}
            return all(phases.get(name) in ("serving", "working") for name in names)
        return False

    await until(working, alive=processes.healthy, timeout_s=LIMIT_S)


async def samples_by_actor(bus: Bus) -> Counter[str]:
    return Counter([received.actor async for received in bus.samples.tail(last=EVERYTHING, follow=False)])
