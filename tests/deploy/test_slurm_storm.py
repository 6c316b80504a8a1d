"""A seeded storm over a run on Slurm: jobs are requeued and warned, processes killed, nodes lost, at random steps.

The next blow comes a random number of steps after the one before, so a slow machine sees the same storm.
"""

import random
from pathlib import Path

import pytest

from tests.deploy.slurm_lab import SlurmLab, why_no_slurm
from tests.deploy.slurm_run import SlurmRun

pytestmark = pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())
BLOWS, SEED = 12, 7
JOBS = ("head", "engines", "actors")
VICTIMS = ("tidemill host", "tidemill engine", "tidemill actor", "tidemill learner", "tidemill feeder", "nats-server")


class SlurmStorm:
    """The blows, and the nodes that are away."""

    def __init__(self, run: SlurmRun, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self._away = ""

    def blow(self) -> None:
        """Do one thing to the run. A node that is away returns at the next blow."""
        if self._away:
            self.end()
            return
        blow = self.random.choice((self._requeue, self._requeue, self._warn, self._kill, self._kill, self._lose_node))
        blow(self.random.choice(JOBS))

    def end(self) -> None:
        """Let a node that is away return."""
        if self._away:
            self.run.slurm.boot(self._away)
            self.run.say(f"{self._away} is back")
            self._away = ""

    def _requeue(self, job: str) -> None:
        self.run.slurm("scontrol", "requeue", self.run.ids[job], check=False)  # it may wait for a node
        self.run.say(f"{job}: requeued")

    def _warn(self, job: str) -> None:
        self.run.slurm("scancel", "--signal=TERM", "--batch", self.run.ids[job], check=False)
        self.run.say(f"{job}: warned")

    def _kill(self, job: str) -> None:
        lines = {node: self._victims(node) for node in self.run.slurm.nodes}
        choices = sorted((words, node, pid) for node, found in lines.items() for pid, words in found)
        if choices:
            words, node, pid = self.random.choice(choices)
            self.run.slurm.lab[node].run("sh", "-c", f"kill -KILL {pid} || true")
            self.run.say(f"{node}: {words} killed")

    def _victims(self, node: str) -> list[tuple[str, str]]:
        """Return process id and command of the run's processes on a node."""
        lines = (line.split(None, 1) for line in self.run.slurm.lab[node].run("ps", "-eo", "pid=,args=").splitlines())
        return [(pid, words[:60]) for pid, words in lines if any(victim in words for victim in VICTIMS)]

    def _lose_node(self, job: str) -> None:
        if node := self.run.node(job):
            self.run.slurm.vanish(node)
            self.run.say(f"{node} with a job of {job} has vanished")
            self._away = node


@pytest.mark.slow
def test_a_storm_over_a_run_on_slurm(tmp_path: Path) -> None:
    with SlurmLab(tmp_path) as slurm:
        run = SlurmRun(slurm, tmp_path / "project", steps=60 * BLOWS)
        run.submit("--engines", "2", "--actors", "2", "--engine-partition", "spot")
        storm = SlurmStorm(run, SEED)
        for _ in range(BLOWS):
            run.until_step(run.step() + storm.random.randrange(10, 40))
            storm.blow()
        run.until_step(run.step() + 10)
        storm.end()
        run.audited()
        assert slurm.programs() == []
