"""A storm: processes of a running `tidemill up` are killed with -9 or frozen at random moments, itself included, drawn
from a seed.

The seed draws each victim, the pause before its signal, and how long it is frozen. A signal hits any instant of the
process's life, its start included; every ``BREATH`` signals the run must have completed a step, so that no storm passes
because nothing ran.
"""

import asyncio
import contextlib
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.auditor import Verdict, judge
from tests.whole.running import Up, start
from tidemill.bus.errors import BusError
from tidemill.bus.streams.bus import connect
from tidemill.bus.streams.readers import History
from tidemill.launch.run.access import viewer_line

VICTIMS = {"actor": 5, "engine": 4, "learner": 2, "feeder": 2, "rank": 2, "nats-server": 3, "bus": 1, "up": 1}
"""Processes, and how often each is drawn, of 20. `up` is the supervisor: all the others end with it, and it is started
again.
"""
CHILD = "rollout child"
"""A process that runs programs of rollouts, as a further victim."""
READER = "reader"
"""A process that reads a shard of SAMPLES, as a further victim."""
MEAN_GAP_S = 1.0
BREATH = 8
PATIENCE_S = 300.0
FROZEN_S = (0.2, 8.0)
"""Seconds that a process is frozen: shorter and longer than a lease."""
SETTINGS = (
    "learner.steps=1000000",
    "learner.checkpoint_every=3",
    "learner.weights_digest=true",
    "bus.lease_s=3",
    "bus.history_samples=64",
    "up.restarts=100000",
    "up.restart_window_s=2",
)


@dataclass
class Storm:
    """One storm over one run."""

    directory: Path
    seed: int
    kills: int
    """Smallest number of processes killed or frozen."""
    lasts_s: float = 0.0
    """Smallest number of seconds."""
    settings: tuple[str, ...] = ()
    auth: bool = False
    """True = the bus has users."""
    victims: Mapping[str, int] = field(default_factory=lambda: VICTIMS)
    """Processes, and how often each is drawn."""
    freezes: float = 0.0
    """Share of the victims that are frozen for a while (SIGSTOP, then SIGCONT), not killed."""
    killed: Counter[str] = field(default_factory=Counter)
    frozen: Counter[str] = field(default_factory=Counter)
    witnessed: dict[int, str] = field(default_factory=dict)
    """Message ids of SAMPLES by sequence, seen by a reader that is never killed."""
    steps: int = 0
    starts: int = 0

    @property
    def hits(self) -> int:
        """Return the number of processes killed or frozen."""
        return sum(count for name, count in (self.killed + self.frozen).items() if name in self.victims)

    def rage(self) -> Up:
        """Run the storm from the first start to a drained end; return the run as left."""
        return asyncio.run(self.blow())

    async def blow(self) -> Up:
        """Run the storm in the caller's loop."""
        rng, ends_s = random.Random(self.seed), time.monotonic() + self.lasts_s
        run = self._start()
        witness = asyncio.create_task(self._witness())
        thaws = set[asyncio.Task[None]]()
        try:
            await self._step(run)
            while self.hits < self.kills or time.monotonic() < ends_s:
                await asyncio.sleep(min(rng.expovariate(1 / MEAN_GAP_S), 4 * MEAN_GAP_S))
                victim = rng.choices(list(self.victims), list(self.victims.values()))[0]
                if self.freezes and rng.random() < self.freezes:
                    thaws.add(asyncio.create_task(self._freeze(run, victim, rng.uniform(*FROZEN_S))))
                else:
                    run = await self._kill(run, victim)
                if self.hits % BREATH == 0:
                    await self._step(run)
            await asyncio.gather(*thaws)
            await self._step(run)
            run.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(run.wait)
            assert code in (0, 75), f"seed {self.seed}: drained with code {code}\n{run.log[-3000:]}"
            return run
        finally:
            for task in (witness, *thaws):
                task.cancel()
            await asyncio.gather(witness, *thaws, return_exceptions=True)
            if run.process.returncode is None:
                run.process.kill()
                run.process.wait()

    def _start(self, *settings: str) -> Up:
        """Start `up`, with --resume when the run exists."""
        flags = ("--resume",) if (self.directory / "run" / "config.yaml").exists() else ()
        self.starts += 1
        return start(self.directory, *SETTINGS, *self.settings, *settings, flags=flags)

    async def finish(self, steps: int) -> Up:
        """Run ``steps`` more steps undisturbed after the storm; return the run after its own end."""
        run = self._start(f"learner.steps={self.steps + steps}")
        try:
            assert await asyncio.to_thread(run.wait) == 0, (
                f"seed {self.seed}: it did not end by itself\n{run.log[-3000:]}"
            )
        finally:
            if run.process.returncode is None:
                run.process.kill()
                run.process.wait()
        return run

    async def _kill(self, run: Up, victim: str) -> Up:
        if victim == "up":
            run.process.kill()
            run.process.wait()
            self.killed["up"] += 1
            await _until_alone(self.directory / "run")
            return self._start()
        for process in _children(run.process):
            if process[0] == victim:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process[1].kill()
                    self.killed[victim] += 1
                return run
        self.killed[f"no {victim} there"] += 1
        return run

    async def _freeze(self, run: Up, victim: str, seconds: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [("up", psutil.Process(run.process.pid)), *_children(run.process)]
            process = next((process for name, process in processes if name == victim), None)
            if process is None:
                self.frozen[f"no {victim} there"] += 1
                return
            process.suspend()
            self.frozen[victim] += 1
            try:
                await asyncio.sleep(seconds)
            finally:
                process.resume()

    def _address(self) -> str:
        return address_of(self.directory / "run", auth=self.auth)

    async def _step(self, run: Up) -> None:
        """Wait until a further step is done."""
        want, deadline = self.steps + 1, time.monotonic() + PATIENCE_S
        while self.steps < want:
            assert time.monotonic() < deadline, f"seed {self.seed}: no step for {PATIENCE_S:.0f} s\n{run.log[-3000:]}"
            assert run.process.returncode is None, f"seed {self.seed}: `up` gave up\n{run.log[-3000:]}"
            with contextlib.suppress(BusError, OSError):
                async with connect(self._address(), "smoke", name="storm", wait_s=5) as bus:
                    async with asyncio.timeout(20):
                        async for _, record in bus.plans.scan():
                            self.steps = max(self.steps, record.step if type(record).__name__ == "Done" else 0)
            await asyncio.sleep(0.1)

    async def _witness(self) -> None:
        """Follow SAMPLES, over every restart of the bus."""
        while True:
            with contextlib.suppress(BusError, OSError, TimeoutError):
                async with connect(self._address(), "smoke", name="witness", wait_s=5) as bus:
                    async for glimpse in History(bus.jet).glimpses(1):
                        self.witnessed[glimpse.seq] = glimpse.headers["Nats-Msg-Id"]
            await asyncio.sleep(0.2)


def address_of(directory: Path, *, auth: bool = False) -> str:
    """Return the address of a run's bus, with the user of a viewer. Raises OSError while it does not run."""
    return viewer_line((directory / "bus.url").read_text().strip(), {}, directory, {"auth": auth})


def _children(process: subprocess.Popen[str]) -> list[tuple[str, psutil.Process]]:
    """Return (command, process) of every descendant of `up`."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = child.cmdline()
            if "tidemill" in words:
                found.append((words[words.index("tidemill") + 1], child))
            elif child.name() == "nats-server":
                found.append(("nats-server", child))
            elif any(word.endswith("shard_reader") for word in words):
                found.append((READER, child))
            elif any(word.endswith("child_program.py") for word in words):
                found.append((CHILD, child))
    return found


async def _until_alone(directory: Path) -> None:
    """Wait until the kernel has ended the children of a killed `up`."""
    deadline = time.monotonic() + 30
    while True:
        left = [
            p.pid
            for p in psutil.process_iter(["cmdline"])
            if any(str(directory) in word for word in p.info["cmdline"] or ())
        ]
        if not left:
            return
        assert time.monotonic() < deadline, f"children of a killed `up` are alive after 30 s: {left}"
        await asyncio.sleep(0.05)


async def drained_and_judged(run: Up) -> Verdict:
    """End a run that has no end of its own; return the auditor's verdict on it, which must be good."""
    run.process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(run.wait)
    assert code in (0, 75), run.log[-3000:]
    async with standing_bus(run.directory) as url:
        verdict = await judge(url, run.run, run.directory / "checkpoints", {})
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    return verdict


@contextlib.asynccontextmanager
async def standing_bus(directory: Path) -> AsyncIterator[str]:
    """Start the bus of a run that has ended again, for reading."""
    from tidemill.bus.config import BusConfig
    from tidemill.bus.server.nats_server import EmbeddedServer

    server = EmbeddedServer(directory / "bus", BusConfig())
    url = await asyncio.to_thread(server.start)
    try:
        yield url
    finally:
        await asyncio.to_thread(server.stop)
