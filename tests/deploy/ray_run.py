"""A Ray cluster of this machine, and `tidemill ray` in it, whose processes, Ray actors and nodes are killed."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.template import ROOT
from tests.waits import LIMIT_S, poll
from tidemill.bus.system.processes import die_with_parent

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "CUDA_VISIBLE_DEVICES": ""}
PROGRAM = ROOT / ".venv/bin/tidemill"


class RayCluster:
    """A running cluster, from ``ray_cluster``."""

    def __init__(self, python: Path, nodes: "subprocess.Popen[str]", address: str) -> None:
        self.python, self.address, self._nodes = python, address, nodes

    def boot(self, cpus: int) -> None:
        """Let a further node join."""
        self._say("boot", cpus)

    def lose(self, raylet: int) -> None:
        """Kill everything of the node with a raylet of this process id."""
        self._say("lose", raylet)

    def _say(self, verb: str, number: int) -> None:
        assert self._nodes.stdin is not None
        print(verb, number, file=self._nodes.stdin, flush=True)


@contextmanager
def ray_cluster(python: Path, directory: Path, cpus: str) -> Iterator[RayCluster]:
    """Yield a cluster with a node for each number of ``cpus``, which ends with its standard input."""
    log_file = directory / "cluster.log"
    with log_file.open("wb") as log:
        nodes = subprocess.Popen(
            [python, Path(__file__).with_name("ray_nodes.py"), cpus],
            env={**os.environ, **QUIET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=die_with_parent(),
        )
    assert nodes.stdin is not None and nodes.stdout is not None
    with nodes.stdin, nodes.stdout:
        address = nodes.stdout.readline().strip()
        assert address, log_file.read_text()
        yield RayCluster(python, nodes, address)
    assert nodes.wait(LIMIT_S) == 0, log_file.read_text()


class RayRun:
    """A running `tidemill ray` of the smoke run."""

    def __init__(self, cluster: RayCluster, directory: Path, *settings: str) -> None:
        self.directory, self.log_file, self._cluster = directory / "run", directory / "ray.log", cluster
        self._began_s = time.monotonic()
        words = ["ray", "smoke", "--address", cluster.address, "--program", PROGRAM]
        for setting in (f"directory={self.directory}", *settings):
            words += ["--set", setting]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [cluster.python.with_name("tidemill"), *words],
                env={**os.environ, **QUIET},
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )

    def child(self, name: str) -> psutil.Process:
        """Return the process of this name, once it runs: the one whose log this is."""
        log = str(self.directory / "logs" / f"{name}.log")
        processes: list[psutil.Process] = []

        def runs() -> bool:
            assert self.process.poll() is None, self.logs()
            processes[:] = [process for process in psutil.process_iter() if _writes(process, log)]
            return bool(processes)

        poll(runs, every_s=0.2, timeout_s=LIMIT_S)
        return min(processes, key=lambda process: process.create_time())

    def kill(self, name: str) -> psutil.Process:
        """Kill a process of the run; return it."""
        child = self.child(name)
        child.kill()
        return self._ended(name, child)

    def kill_owner(self, name: str) -> psutil.Process:
        """Kill the worker process of a Ray actor; return the process that it owned, which has ended with it."""
        child = self.child(name)
        _owner(child).kill()
        return self._ended(name, child)

    def lose_node(self, name: str) -> psutil.Process:
        """Let the node of a process vanish, with all that runs there. Returns the process."""
        child = self.child(name)
        raylet = _owner(child).parent()
        assert raylet is not None and "raylet" in raylet.name(), raylet
        self._cluster.lose(raylet.pid)
        return self._ended(name, child)

    def _ended(self, name: str, child: psutil.Process) -> psutil.Process:
        child.wait(LIMIT_S)
        self.say(f"{name} has ended")
        return child

    def step(self) -> int:
        """Return the step of the newest checkpoint."""
        return max((int(path.name.split("-")[1]) for path in self.directory.glob("checkpoints/step-*")), default=0)

    def until_step(self, step: int) -> None:
        def has_step() -> bool:
            assert self.process.poll() is None, self.logs()
            return self.step() >= step

        poll(has_step, every_s=0.2, timeout_s=LIMIT_S)
        self.say(f"step {step}")

    def say(self, what: str) -> None:
        """Print a line with the seconds since the start (pytest -s)."""
        print(f"{time.monotonic() - self._began_s:6.1f} s  {what}", file=sys.stderr)

    def logs(self) -> str:
        files = [self.log_file, *self.directory.glob("logs/*.log")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


def _owner(child: psutil.Process) -> psutil.Process:
    owner = child.parent()
    assert owner is not None and "ray::" in " ".join(owner.cmdline()), owner
    return owner


def _writes(process: psutil.Process, log: str) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/2") == log
    except OSError:
        return False
