"""A run on a real cluster of three nodes, by the files of `tidemill slurm`: requeues, drained and lost nodes,
preemption, scancel. The first test is `make test-slurm`, all of them `make test-slurm-all`.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm_lab import SlurmLab, why_no_slurm
from tests.deploy.slurm_run import SlurmRun
from tests.waits import poll

pytestmark = pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())
WORKERS = ("--engines", "2", "--actors", "2", "--engine-partition", "spot")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with SlurmLab(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_run_learns_while_engine_and_learner_are_requeued(slurm: SlurmLab, tmp_path: Path) -> None:
    run = SlurmRun(slurm, tmp_path / "project", steps=300)
    run.submit("--engines", "1", "--actors", "2", "--per-job", "actors=2", "--engine-partition", "spot")
    run.until_step(60)
    assert "feeder" in run.tidemill("status", "--run-dir", "runs/smoke")
    run.requeue("engines", 0)
    run.until_step(run.step() + 60)
    run.requeue("head")
    summary = run.audited()
    assert summary["reward_last"] > summary["reward_first"]
    assert run.starts("head") == run.starts("engines") == 2
    assert slurm.idle() == set(slurm.nodes)
    assert slurm.programs() == []


@pytest.mark.slow
def test_every_job_is_requeued_and_nodes_are_drained_and_lost(slurm: SlurmLab, tmp_path: Path) -> None:
    run = SlurmRun(slurm, tmp_path / "project", steps=900)
    run.submit(*WORKERS)
    for name, task in (("engines", 0), ("actors", 1), ("head", None), ("engines", 1)):
        run.until_step(run.step() + 60)
        run.requeue(name, task)
    run.until_step(run.step() + 60)

    drained = run.node("engines")
    slurm("scontrol", "update", f"nodename={drained}", "state=drain", "reason=test")
    run.requeue("engines", 0)
    run.until(lambda: run.node("engines") not in ("", drained), f"the engine has left the drained node {drained}")
    slurm("scontrol", "update", f"nodename={drained}", "state=resume")
    run.until_step(run.step() + 60)

    lost, url = run.node("head"), run.bus_url()
    slurm.vanish(lost)
    run.say(f"node {lost} of the head has vanished")
    run.until(lambda: run.node("head") not in ("", lost) and run.bus_url() not in ("", url), "the head is elsewhere")
    run.until_step(run.step() + 60)
    slurm.boot(lost)
    run.audited()
    assert slurm.programs() == []


@pytest.mark.slow
def test_a_job_is_drained_before_its_time_limit_and_resumed(slurm: SlurmLab, tmp_path: Path) -> None:
    """Slurm's warning, a SIGTERM to the shell of the job alone, sent here by scancel."""
    run = SlurmRun(slurm, tmp_path / "project", steps=400)
    run.submit(*WORKERS)
    for name in ("engines", "head", "actors"):
        run.until_step(run.step() + 60)
        slurm("scancel", "--signal=TERM", "--batch", run.ids[name])
        run.say(f"{name}: warned")
    run.audited()
    assert [run.starts(name) for name in ("engines", "head", "actors")] == [2, 2, 2]


@pytest.mark.slow
def test_scancel_leaves_nothing_and_another_submit_resumes(slurm: SlurmLab, tmp_path: Path) -> None:
    """With a learner of two nodes."""
    run = SlurmRun(slurm, tmp_path / "project", steps=120)
    words = (*WORKERS, "--nodes", "2", "--set", "learner.data_parallel=2")
    run.submit(*words)
    run.until_step(40)
    slurm("scancel", *run.ids.values())
    run.tidemill("slurm", "smoke", *words)  # waits until Slurm has ended the jobs
    assert not slurm.jobs()
    poll(lambda: slurm.programs() == [], every_s=0.5)
    run.say("nothing is left")
    run.submit(*words)
    run.audited()


@pytest.mark.slow
def test_throughput_is_back_when_preempted_engines_have_loaded(slurm: SlurmLab, tmp_path: Path) -> None:
    """A job of a higher partition takes the processors of every engine."""
    run = SlurmRun(slurm, tmp_path / "project", steps=1000)
    nodes = {"head": "n1", "actors": "n2", "engines": "n3"}
    run.submit(*WORKERS, *(f"--sbatch={job}:--nodelist={node}" for job, node in nodes.items()))
    run.until_step(100)
    before = run.steps_per_s(10)
    slurm("sbatch", "--partition=main", "--nodelist=n3", "--cpus-per-task=8", "--output=/dev/null", "--wrap=sleep 15")
    run.until(lambda: not run.running("engines", 2), "the engines are preempted")
    run.until(lambda: run.running("engines", 2), "their jobs run again")
    began_s, step = time.monotonic(), run.step()
    run.until_step(step + 10)
    back_s = time.monotonic() - began_s
    after = run.steps_per_s(10)
    run.say(f"steps/s before {before:.2f} and after {after:.2f}; the next steps {back_s:.1f} s after the jobs' start")
    assert after > before / 3, (before, after)
    run.audited()
