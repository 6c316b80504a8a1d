"""Adapters, a critic and mixtures of experts for three steps on the device, with deterministic kernels, against the
CPU.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Child
from tests.integration import critic_ranks, expert_ranks, megatron_lora
from tests.tiny_models import write_tiny_model
from tidemill.learner.layout.parallel import Parallel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

MIXTURES = [
    *((family, "plain") for family in expert_ranks.EXPERTS),
    *(("qwen3_moe", way) for way in ("replayed", "balanced")),
    ("glm4_moe", "biased"),
]
ROLES = ["adapters", "critic", *(f"{family}, {way}" for family, way in MIXTURES)]
TOLERANCE = 2e-4
"""Relative and absolute, of float32 sums in another order, over three steps of Adam."""
LOOSER = {"offpolicy/entropy_gap": 2e-3, "offpolicy/entropy_gap_sigmas": 2e-2}
"""A small mean of larger numbers, and that by its standard error: both magnify the rounding."""
TIMES = ("step_seconds", "tokens_per_second")


def trained(role: str, model_dir: Path, directory: Path, here: Parallel) -> list[dict[str, float]]:
    """Train three steps of a role, and return their metrics."""
    ways: dict[str, Callable[[], Any]] = {
        "adapters": lambda: megatron_lora.trained(model_dir, here, megatron_lora.WAYS["plain"])["metrics"],
        "critic": lambda: critic_ranks.trained(model_dir, here)["metrics"],
    }
    if role in ways:
        found: list[dict[str, float]] = ways[role]()
        return found
    family, name = role.split(", ")
    way = expert_ranks.WAYS[name]
    mixture_dir = directory / family
    if not mixture_dir.exists():
        mixture_dir.mkdir()
        write_tiny_model(mixture_dir, family, vocab_size=expert_ranks.VOCAB)
    return expert_ranks.take(expert_ranks.learner(mixture_dir, here, way), expert_ranks.STEPS, here, way)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mixtures of both sides; the CPU writes them."""
    return tmp_path_factory.mktemp("mixtures")


@pytest.fixture(scope="module")
def wanted(child: Child, model_dir: Path, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = child("roles", model_dir, directory, ROLES)
    return found


@pytest.mark.parametrize("role", ROLES)
def test_the_metrics_are_those_of_the_cpu(
    role: str, rank: Parallel, model_dir: Path, directory: Path, wanted: dict[str, Any]
) -> None:
    steps = trained(role, model_dir, directory, rank)
    assert len(steps) == len(wanted[role]) >= 2
    for step, other in zip(steps, wanted[role], strict=True):
        assert step.keys() == other.keys()
        wrong = {}
        for name in step:
            tolerance = LOOSER.get(name, TOLERANCE)
            if not name.endswith(TIMES) and not math.isclose(
                step[name], other[name], rel_tol=tolerance, abs_tol=tolerance
            ):
                wrong[name] = step[name], other[name]
        assert not wrong, wrong
        assert step["train/grad_norm"] > 0
