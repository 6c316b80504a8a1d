"""`tidemill ray` in a cluster of this machine, whose processes, Ray actors and nodes are killed: 0 lost, 0 twice; and
the ranks of a learner as workers of Ray Train.
"""

import asyncio
import json
import os
import random
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.parts import PATIENCE_S, parts
from tests.deploy.ray_run import PROGRAM, QUIET, RayCluster, RayRun, ray_cluster
from tests.launched import run_tidemill
from tests.template import ROOT
from tests.waits import LIMIT_S
from tests.whole.prepared import made
from tests.whole.running import SMOKE

STEPS = 40
BLOWS, SEED = 10, 7


@pytest.fixture
def python(request: pytest.FixtureRequest) -> Path:
    path = request.config.getoption("--ray-python")
    if not path:
        pytest.skip("want --ray-python PYTHON, an interpreter that has Ray and Tidemill (make test-ray)")
    return Path(path).absolute()


@contextmanager
def started(cluster: RayCluster, directory: Path, *settings: str) -> Iterator[RayRun]:
    """Yield a run with two actors; its driver is killed at the end."""
    run = RayRun(cluster, directory, "learner.checkpoint_every=5", "up.actors=2", *settings)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait(LIMIT_S)


def check_accounting(run: RayRun, steps: int) -> None:
    """Wait for the end of the run, whose accounting must balance."""
    assert run.process.wait(LIMIT_S) == 0, run.logs()
    summary = json.loads((run.directory / "summary.json").read_text())
    assert (summary["samples_lost"], summary["samples_trained_twice"], summary["books_balance"]) == (0, 0, True)
    assert summary["steps"] == steps


def looked_at(run: RayRun) -> str:
    """Return the output of the command that the driver has printed."""
    (words,) = re.findall(r"look at it with: tidemill (.*)", run.log_file.read_text())
    done = run_tidemill(*shlex.split(words))
    assert done.returncode == 0, done.output
    return done.out


@pytest.mark.slow
def test_a_run_on_a_bus_with_users_survives_its_ray_actors(python: Path, tmp_path: Path) -> None:
    with ray_cluster(python, tmp_path, "2,1,2") as cluster:
        with started(cluster, tmp_path, f"learner.steps={STEPS}", "bus.auth=true") as run:
            for step, victim in ((5, "engine-0"), (10, "actor-1"), (15, "learner")):
                run.until_step(step)
                ended = run.kill_owner(victim)
                assert run.child(victim).pid != ended.pid
            assert "of 40 done" in looked_at(run)
            check_accounting(run, STEPS)
        assert (run.directory / "auth/engine-0.env").exists()


@pytest.mark.slow
def test_sigterm_of_the_driver_ends_all_processes(python: Path, tmp_path: Path) -> None:
    with ray_cluster(python, tmp_path, "2,1,2") as cluster:
        with started(cluster, tmp_path, f"learner.steps={STEPS}", "bus.insecure=true") as run:
            run.until_step(5)
            children = [run.child(name) for name in ("bus", "learner", "engine-0", "actor-0", "actor-1")]
            run.process.send_signal(signal.SIGTERM)
            assert run.process.wait(LIMIT_S) == 0, run.logs()
            for child in children:
                child.wait(LIMIT_S)


@pytest.mark.slow
def test_a_storm_over_a_run_on_ray_and_all_engines_preempted_at_once(python: Path, tmp_path: Path) -> None:
    """Each worker has a node of its own. At the end the run is drained, and continued for its accounting."""
    settings = ("bus.insecure=true", "up.engines=2", "up.restarts=100")
    with ray_cluster(python, tmp_path, "2,1,1,1,1") as cluster:
        with started(cluster, tmp_path, "learner.steps=1000000", *settings) as run:
            storm(run, cluster)
            lose_all_engines(run, cluster)
            run.process.send_signal(signal.SIGTERM)
            assert run.process.wait(LIMIT_S) == 0, run.logs()
        last = run.step() + 20
        with started(cluster, tmp_path, f"learner.steps={last}", *settings) as run:
            check_accounting(run, last)


def storm(run: RayRun, cluster: RayCluster) -> None:
    """Kill processes, Ray actors and nodes, each blow a random number of steps after the one before."""
    chosen, workers = random.Random(SEED), ("engine-0", "engine-1", "actor-0", "actor-1")
    for _ in range(BLOWS):
        run.until_step(run.step() + chosen.randrange(5, 15))
        blow = chosen.choice((run.kill, run.kill_owner, run.lose_node))
        blow(chosen.choice(workers if blow == run.lose_node else ("bus", "learner", *workers)))
        if blow == run.lose_node:
            cluster.boot(1)


def lose_all_engines(run: RayRun, cluster: RayCluster) -> None:
    """Lose the nodes of all engines, and wait until the steps are as fast as before."""
    run.until_step(run.step() + 10)
    engines, before_s = ("engine-0", "engine-1"), seconds_of_steps(run, 20)
    for engine in engines:
        run.lose_node(engine)
    for _ in engines:
        cluster.boot(1)
    for engine in engines:
        run.child(engine)
    run.say("both engines were started again")
    after_s = [seconds_of_steps(run, 20) for _ in range(5)]
    run.say(f"20 steps took {before_s:.1f} s before, and after it {', '.join(f'{s:.1f}' for s in after_s)} s")
    assert min(after_s) < 2 * before_s


def seconds_of_steps(run: RayRun, count: int) -> float:
    """Return the seconds in which the next steps are done."""
    began_s = time.monotonic()
    run.until_step(run.step() + count)
    return time.monotonic() - began_s


@pytest.mark.slow
def test_workers_of_ray_train_are_ranks_of_the_learner(python: Path, tmp_path: Path) -> None:
    """By the recipe of docs/launchers.md, on two nodes of two workers."""
    made(SMOKE)
    (recipe,) = re.findall(r"```python\n(# ranks\.py.*?)```", (ROOT / "docs/launchers.md").read_text(), re.DOTALL)
    (tmp_path / "ranks.py").write_text(recipe)
    settings = ("learner.steps=4", "learner.data_parallel=4", "learner.checkpoint.store=shared")
    with parts(tmp_path, *settings) as run, ray_cluster(python, tmp_path, "2,2") as cluster:
        asyncio.run(run.begin("engine", "actor"))
        learner = [str(PROGRAM), "learner", "--config", str(SMOKE), "--bus", run.url]
        learner += [word for setting in (f"directory={run.root}", *settings) for word in ("--set", setting)]
        done = subprocess.run(
            [python, tmp_path / "ranks.py", "4", *learner],
            env={**os.environ, **QUIET, "RAY_ADDRESS": cluster.address, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-3000:]
        assert run_tidemill("audit", "--bus", run.url).returncode == 0
