"""The TrainJob of Kubeflow's trainer, by its own types; tests/deploy/test_rank_parents.py executes its command."""

from pathlib import Path

import pytest

from tests.kubernetes.charts import KUBERNETES, run

TRAIN_JOB = KUBERNETES / "trainjob.yaml"
READER = Path(__file__).with_name("train_job.py")


def test_the_train_job_fits_kubeflows_types() -> None:
    done = run("python", READER, TRAIN_JOB)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("right", "wrong"), [("numNodes: 2", "numNodes: two"), ("numNodes", "numberOfNodes")])
def test_the_types_refuse_wrong_values_and_unknown_fields(right: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(TRAIN_JOB.read_text().replace(right, wrong))
    assert run("python", READER, tmp_path / "wrong.yaml").returncode == 1
