"""A run on a real cluster of three nodes, by the files of `tidemill slurm`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm_lab import SlurmLab, why_no_slurm
from tests.deploy.slurm_run import SlurmRun

pytestmark = pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    directory = tmp_path_factory.mktemp("cluster")
    for above in (directory, directory.parent):
        above.chmod(0o755)  # munge refuses a socket that not every user reaches
    with SlurmLab(directory) as cluster:
        yield cluster


def test_a_run_learns_while_engine_and_learner_are_requeued(slurm: SlurmLab, tmp_path: Path) -> None:
    run = SlurmRun(slurm, tmp_path / "project", steps=400)
    run.submit("--engines", "1", "--actors", "2", "--per-job", "actors=2", "--engine-partition", "spot")
    run.until_step(60)
    assert "learner" in run.tidemill("status", "--run-dir", "runs/smoke")
    run.requeue("engines", 0)
    run.until(lambda: run.running("engines"), "the engine runs again")
    run.until_step(60)
    run.requeue("head")
    run.until_step(90)
    summary = run.audited()
    assert summary["reward_last"] > summary["reward_first"]
    assert slurm.idle() == set(slurm.nodes)
