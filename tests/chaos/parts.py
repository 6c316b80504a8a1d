"""A run with processes started one by one, as on several machines, which can be stopped, killed and inspected one by
one.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.forked import Forked
from tests.waits import until
from tests.whole.prepared import put_prepared
from tests.whole.running import SMOKE
from tidemill.bus.streams.bus import Bus, connect

RUN = "smoke"
PATIENCE_S = 400.0
"""Longest wait for an expected event, in seconds of wall time on shared cores."""


@dataclass
class Part:
    """One process of `tidemill`."""

    role: str
    name: str
    process: Forked
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Return the process and all its descendants."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    async def frozen(self, *, below: bool = False) -> list[psutil.Process]:
        """Wait until SIGSTOP has reached the whole family (or all below its top), and return it; `thaw` continues
        it.
        """
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: {process.status() for process in self.family()[below:]} == {psutil.STATUS_STOPPED})
        return self.family()[below:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def code(self) -> int:
        """Return its exit code, once it has ended."""
        try:
            return await asyncio.to_thread(self.process.wait, PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"{self.name} did not end within {PATIENCE_S:.0f} s:\n{self.log[-3000:]}") from None


def thaw(stopped: Sequence[psutil.Process]) -> None:
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


@dataclass
class Parts:
    """Starter of processes on one configuration, which ends those that remain."""

    directory: Path
    settings: tuple[str, ...] = ()
    url: str = ""
    started: list[Part] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.directory / "run"

    def start(
        self,
        role: str,
        *settings: str,
        name: str = "",
        url: str = "",
        instant: str = "",
        how: str = "KILL",
        words: Sequence[str] = (),
    ) -> Part:
        """Start ``tidemill ROLE``; ``url``: of the bus, if not the run's own; ``instant``, ``how``: it dies then (see
        `dying`).

        ``words``: further arguments.
        """
        module, *arguments = ["tests.chaos.dying", role, instant, how] if instant else ["tidemill", role]
        arguments += () if role in ("bus", "prepare") else ("--bus", url or self.url)
        arguments += [str(SMOKE)] if role == "prepare" else ["--config", str(SMOKE)]
        for setting in (f"directory={self.root}", *self.settings, *settings):
            arguments += ["--set", setting]
        arguments += words
        name = name or role
        if role in ("actor", "engine") or (role == "learner" and not instant):
            arguments += ["--id", name]
        log_file = self.directory / f"{name}.log"
        process = Forked.module(module, arguments, log_file, {"PYTHONUNBUFFERED": "1"})
        part = Part(role, name, process, log_file)
        self.started.append(part)
        return part

    async def begin(self, *roles: str, url: str = "") -> None:
        """Prepare model and prompts, start the bus (unless it is at ``url``), then the roles."""
        put_prepared(SMOKE, self.root)
        assert await self.start("prepare").code() == 0
        self.url = url or await self._begin_bus()
        for role in roles:
            self.start(role)

    async def _begin_bus(self) -> str:
        bus = self.start("bus")
        address = self.root / "bus.url"
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: address.exists() or bus.process.returncode is not None)
            assert bus.process.returncode is None, bus.log
        return address.read_text().strip()

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        async with connect(self.url, RUN, name="test", wait_s=PATIENCE_S) as bus:
            yield bus

    def end(self) -> None:
        """End the processes, the last started first; the bus gets only SIGTERM, and stops its server itself."""
        for part in reversed(self.started):
            if part.process.returncode is None:
                with contextlib.suppress(psutil.Error):
                    thaw(part.family())
                part.process.send_signal(signal.SIGTERM if part.name == "bus" else signal.SIGKILL)
                try:
                    part.process.wait(60)
                except TimeoutError:
                    part.kill()


@contextlib.contextmanager
def parts(directory: Path, *settings: str) -> Iterator[Parts]:
    running = Parts(directory, settings)
    try:
        yield running
    finally:
        running.end()
