"""`tidemill ray` in a cluster of three nodes, some of whose Ray actors are killed: 0 lost, 0 twice."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.template import ROOT
from tests.waits import LIMIT_S, poll
from tidemill.bus.system.processes import die_with_parent

pytestmark = pytest.mark.slow
STEPS = 40
CPUS = "2,1,2"
"""CPUs of the three nodes: the first is full with bus and learner, an engine and two actors fill the others."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def python(request: pytest.FixtureRequest) -> Path:
    path = request.config.getoption("--ray-python")
    if not path:
        pytest.skip("want --ray-python PYTHON, an interpreter that has Ray and Tidemill (make test-ray)")
    return Path(path).absolute()


@pytest.fixture
def cluster(python: Path, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a cluster, which ends with its standard input."""
    with (tmp_path / "cluster.log").open("wb") as log:
        nodes = subprocess.Popen(
            [python, Path(__file__).with_name("ray_nodes.py"), CPUS],
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
        assert address, (tmp_path / "cluster.log").read_text()
        yield address
    assert nodes.wait(LIMIT_S) == 0


class Driver:
    """A running `tidemill ray` of the smoke run."""

    def __init__(self, python: Path, address: str, directory: Path, *settings: str) -> None:
        self.directory, self.log_file = directory / "run", directory / "ray.log"
        program = ROOT / ".venv/bin/tidemill"
        words = ["ray", "smoke", "--address", address, "--program", program]
        for setting in (f"directory={self.directory}", "bus.insecure=true", *settings):
            words += ["--set", setting]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [python.with_name("tidemill"), *words],
                env={**os.environ, **QUIET},
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )

    def child(self, name: str) -> psutil.Process:
        """Return the process of this name, once it runs: the one whose log this is."""
        log = str(self.directory / "logs" / f"{name}.log")
        found: list[psutil.Process] = []

        def runs() -> bool:
            found[:] = [process for process in psutil.process_iter() if _writes(process, log)]
            return bool(found)

        poll(runs, every_s=0.2, timeout_s=LIMIT_S)
        return min(found, key=lambda process: process.create_time())

    def kill_owner(self, name: str) -> psutil.Process:
        """Kill the worker process of a Ray actor; return the child that it owned, which has ended with it."""
        child = self.child(name)
        owner = child.parent()
        assert owner is not None and "ray::" in " ".join(owner.cmdline()), owner
        owner.kill()
        child.wait(LIMIT_S)
        return child

    def until_step(self, step: int) -> None:
        def has_step() -> bool:
            assert self.process.poll() is None, self.logs()
            return any(int(path.name.split("-")[1]) >= step for path in self.directory.glob("checkpoints/step-*"))

        poll(has_step, every_s=0.2, timeout_s=LIMIT_S)

    def logs(self) -> str:
        files = [self.log_file, *self.directory.glob("logs/*.log")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


def _writes(process: psutil.Process, log: str) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/2") == log
    except OSError:
        return False


@pytest.fixture
def driver(python: Path, cluster: str, tmp_path: Path) -> Iterator[Driver]:
    settings = (f"learner.steps={STEPS}", "learner.checkpoint_every=5", "up.actors=2")
    driver = Driver(python, cluster, tmp_path, *settings)
    yield driver
    if driver.process.poll() is None:
        driver.process.kill()
        driver.process.wait(LIMIT_S)


def test_a_run_survives_its_ray_actors(driver: Driver) -> None:
    for step, victim in ((5, "engine-0"), (10, "actor-1"), (15, "learner")):
        driver.until_step(step)
        ended = driver.kill_owner(victim)
        assert driver.child(victim).pid != ended.pid
    assert driver.process.wait(LIMIT_S) == 0, driver.logs()
    summary = json.loads((driver.directory / "summary.json").read_text())
    assert (summary["samples_lost"], summary["samples_trained_twice"], summary["books_balance"]) == (0, 0, True)
    assert summary["steps"] == STEPS


def test_sigterm_of_the_driver_ends_all_processes(driver: Driver) -> None:
    driver.until_step(5)
    children = [driver.child(name) for name in ("bus", "learner", "engine-0", "actor-0", "actor-1")]
    driver.process.send_signal(signal.SIGTERM)
    assert driver.process.wait(LIMIT_S) == 0, driver.logs()
    for child in children:
        child.wait(LIMIT_S)
