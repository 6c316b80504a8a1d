"""`tidemill up` with a teacher that it starts: a larger model, from random weights; the student's own scores get closer
to it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.whole.running import assert_books_balance, up
from tidemill.launch.settings.prepare import PrepareConfig, prepare

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
TEACHER = PrepareConfig(task="copy", seed=5, model={**SIZES, "initializer_range": 0.3})


@pytest.mark.slow
def test_a_student_approaches_a_larger_teacher_that_is_started_beside_it(tmp_path: Path) -> None:
    teacher = prepare(TEACHER, tmp_path / "teacher").model
    settings = (
        "learner.steps=16",
        "learner.optimizer.lr=1e-2",
        "learner.algorithm.advantage=none",
        "learner.algorithm.distill.coef=1",
        "learner.algorithm.distill.loss=reverse_kl",
        "learner.algorithm.distill.top_k=4",
        f"actor.teachers={{big: {{model: {teacher}}}}}",
        "sampling.temperature=0.8",
    )
    with up(tmp_path, *settings) as run:
        assert run.wait() == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert (run.summary["steps"], run.summary["tasks_given_up"]) == (16, {})
    for name in ("train/teacher_kl", "train/teacher_top_kl"):
        values = [line[name] for line in run.metrics]
        assert sum(values[-3:]) < 0.7 * sum(values[:3]), (name, values)
    log = (run.directory / "logs" / "teacher-big.log").read_text()
    assert f"teacher {teacher} at http://127.0.0.1:" in log, log
    assert json.loads((run.directory / "summary.json").read_text())["restarts"] == {}
