"""Every algorithm for two steps on the device, with deterministic kernels, against the CPU."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.algorithm_cases import CASES
from tests.gpu.conftest import Child
from tests.integration.megatron_layouts import Layout, train
from tidemill.learner.layout.parallel import Parallel

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-4
"""Relative and absolute, of float32 sums in another order."""
LOOSER = {"offpolicy/entropy_gap": 1e-3, "offpolicy/entropy_gap_sigmas": 1e-2}
"""A small mean of larger numbers, and that by its standard error: both magnify the rounding."""
TIMES = {"train/step_seconds", "train/tokens_per_second"}


@pytest.fixture(scope="module")
def wanted(child: Child, model_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = child("algorithms", model_dir, list(CASES), "cpu")
    return found


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", CASES)
def test_the_metrics_are_those_of_the_cpu(case: str, rank: Parallel, model_dir: Path, wanted: dict[str, Any]) -> None:
    """A kernel that has no deterministic form on CUDA raises here, which the CPU never shows."""
    steps: Any = train(model_dir, rank, case, Layout())["metrics"]
    assert len(steps) == len(wanted[case]) == 2
    for step, other in zip(steps, wanted[case], strict=True):
        assert step.keys() == other.keys()
        wrong = {}
        for name in step.keys() - TIMES:
            tolerance = LOOSER.get(name, TOLERANCE)
            if not math.isclose(step[name], other[name], rel_tol=tolerance, abs_tol=tolerance):
                wrong[name] = step[name], other[name]
        assert not wrong, wrong
    assert (steps[1]["train/grad_norm"] > 0) == (case != "geo_mask"), "this one rejects every sequence of random data"
