"""Whole runs whose learner is FSDP2: the steps of Megatron, and a family that Megatron lacks."""

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.whole.running import Up, assert_books_balance, up

STEPS = 3
SYNCHRONOUS = ("staleness.max_lag=0", f"learner.steps={STEPS}", "up.require_reward=-1e30")
OF_ONE_RUN = ("seconds", "per_second", "per_s/", "wait_share", "tflops", "bytes", "version", "report_look")
"""Parts of the names of metrics that differ from run to run."""


def trained(tmp_path: Path, *settings: str) -> Up:
    tmp_path.mkdir(exist_ok=True)
    with up(tmp_path, *SYNCHRONOUS, *settings) as run:
        assert run.wait() == 0, run.log[-4000:]
    return run


def of_steps(run: Up) -> list[dict[str, Any]]:
    """Return the numbers of each step that are the same in every run of the same samples."""
    return [
        {name: value for name, value in line.items() if not any(part in name for part in OF_ONE_RUN)}
        for line in run.metrics
    ]


@pytest.mark.slow
def test_fsdp_takes_the_steps_of_megatron(tmp_path: Path) -> None:
    """Two ranks by one, from the same random weights: samples, gradients and updates are the same."""
    runs = {
        "megatron": trained(tmp_path / "megatron"),
        "fsdp": trained(tmp_path / "fsdp", "learner.backend=fsdp", "learner.data_parallel=2"),
    }
    logs = {name: "".join(path.read_text() for path in run.directory.glob("logs/*")) for name, run in runs.items()}
    assert all(f"backend={name} reason=" in log for name, log in logs.items())
    megatrons, fsdps = (of_steps(runs[name]) for name in ("megatron", "fsdp"))
    assert len(megatrons) == len(fsdps) == STEPS
    for wanted, found in zip(megatrons[:2], fsdps[:2], strict=True):
        assert wanted.keys() == found.keys() and wanted["train/grad_norm"] > 0
        far = {
            name: (value, found[name])
            for name, value in wanted.items()
            if not math.isclose(value, found[name], rel_tol=1e-5, abs_tol=1e-5)
        }
        assert far == {}
    for run in runs.values():
        assert_books_balance(run.summary, max_lag=0)
    names = [set(safe_open(run.directory / "final/model.safetensors", "pt").keys()) for run in runs.values()]
    assert names[0] == names[1]
