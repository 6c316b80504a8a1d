"""A run on a cluster of ``slurm_lab.py``: submitted by `tidemill slurm` on the login node, observed over its bus, and
audited at its end.
"""

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.auditor import judge
from tests.deploy.slurm_lab import LOGIN, SlurmLab
from tests.waits import poll
from tidemill.bus.errors import BusError
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.cli.find_run import find_run
from tidemill.launch.run.access import BUS_URL_FILE
from tidemill.launch.run.bus_process import EndedBus, started
from tidemill.learner.feed.restart import CHECKPOINT_KEY

PROGRAM = Path(sys.executable).parent / "tidemill"
CHECKPOINT_EVERY = 10
ENDS_S = 400.0


class SlurmRun:
    """One run of the smoke configuration, in a working directory of its own."""

    def __init__(self, slurm: SlurmLab, directory: Path, *, steps: int) -> None:
        self.slurm, self.directory, self.steps = slurm, directory, steps
        directory.mkdir()
        self.root = directory / "runs/smoke"
        self.ids: dict[str, str] = {}
        self._began_s = time.monotonic()

    def tidemill(self, *words: str) -> str:
        """Run a command on the login node and return its output."""
        return self.slurm(str(PROGRAM), *words, cwd=self.directory)

    def submit(self, *words: str) -> None:
        """Write and submit the jobs, as a user does."""
        settings = (f"learner.steps={self.steps}", f"learner.checkpoint_every={CHECKPOINT_EVERY}")
        self.tidemill("slurm", "smoke", *words, *(w for one in settings for w in ("--set", one)), "--submit")
        lines = (self.root / "slurm/jobs").read_text().splitlines()
        self.ids = dict(line.split() for line in lines)

    def until_step(self, step: int) -> None:
        """Wait until a checkpoint of this step or a later one is the newest."""
        self.until(lambda: self.step() >= step, f"step {step}")

    def step(self) -> int:
        """Return the step of the newest checkpoint; 0 while the bus cannot be read."""
        with self.slurm.lab[LOGIN].inside():
            return asyncio.run(self._step())

    async def _step(self) -> int:
        with contextlib.suppress(BusError, TimeoutError, OSError, ValueError):
            url, run = find_run(str(self.root), "", "")
            async with asyncio.timeout(10), connect(url, run, name="test", wait_s=3) as bus:
                row, _ = await bus.rows("run").read(CHECKPOINT_KEY)
                return int(row["step"]) if row else 0
        return 0

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait for a condition, for as long as the head has not ended. Prints the time."""

        def holds_or_over() -> bool:
            over = not self.jobs("head")
            return bool(holds()) or over

        poll(holds_or_over, every_s=0.3, timeout_s=ENDS_S)
        assert holds(), f"the head has ended before {what}\n{self.report()}"
        self.say(what)

    def jobs(self, name: str) -> dict[str, str]:
        """Return the states of the jobs of the head, or of an array, that have not ended."""
        number = self.ids[name]
        return {job: state for job, state in self.slurm.jobs().items() if job.partition("_")[0] == number}

    def running(self, name: str, count: int = 1) -> bool:
        """Return whether so many jobs of that name run."""
        return sum(state == "RUNNING" for state in self.jobs(name).values()) == count

    def node(self, name: str) -> str:
        """Return the node of a running job, of an array the first one's; empty when it does not run."""
        state = ["--states=RUNNING", "--format=%N"]
        job = self.ids[name] if name == "head" else f"{self.ids[name]}_0"
        return self.slurm("squeue", "--noheader", f"--jobs={job}", *state, check=False).strip()

    def bus_url(self) -> str:
        """Return the address of the bus; empty while there is none."""
        file = self.root / BUS_URL_FILE
        return file.read_text().strip() if file.exists() else ""

    def starts(self, name: str) -> int:
        """Return how often the job, or the first one of an array, was started."""
        job = self.ids[name] if name == "head" else f"{self.ids[name]}_0"
        (restarts,) = re.findall(r" Restarts=(\d+)", self.slurm("scontrol", "show", "job", "--oneliner", job))
        return int(restarts) + 1

    def steps_per_s(self, during_s: float) -> float:
        """Return the steps in a second, over some seconds."""
        began_s, step = time.monotonic(), self.step()
        time.sleep(during_s)
        return (self.step() - step) / (time.monotonic() - began_s)

    def requeue(self, name: str, task: int | None = None) -> None:
        """Requeue a job, or a task of an array."""
        self.slurm("scontrol", "requeue", self.ids[name] if task is None else f"{self.ids[name]}_{task}")
        self.say(f"{name} requeued")

    def audited(self) -> JsonObject:
        """Wait until no job is left, and return the accounting, which must balance: by the head's own `tidemill audit`,
        and by the tests' auditor, which shares no code with it.
        """
        poll(lambda: not self.slurm.jobs(), every_s=0.5, timeout_s=ENDS_S)
        self.say("no job is left")
        assert (self.root / "summary.json").exists(), self.report()
        summary = json.loads((self.root / "summary.json").read_text())
        counts = {name: summary[name] for name in ("steps", "samples_lost", "samples_trained_twice", "books_balance")}
        assert counts == {
            "steps": self.steps,
            "samples_lost": 0,
            "samples_trained_twice": 0,
            "books_balance": True,
        }, f"{counts}\n{self.report()}"
        bus = EndedBus.of(self.root)
        assert bus is not None
        with started(bus) as url:
            verdict = asyncio.run(judge(url, "smoke", self.root / "checkpoints", {}))
        assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
        return summary

    def say(self, what: str) -> None:
        """Print a line with the seconds since the start (pytest -s)."""
        print(f"{time.monotonic() - self._began_s:6.1f} s  {what}", file=sys.stderr)

    def report(self, last: int = 2500) -> str:
        """Return the ends of all logs, for a failure's message."""
        files = sorted([*self.root.glob("slurm/*.log"), *self.root.glob("slurm/hosts/*/logs/*.log")])
        logs = (f"== {file.relative_to(self.root)}\n{file.read_text(errors='replace')[-last:]}" for file in files)
        return "\n".join([self.slurm.report(), *logs])
