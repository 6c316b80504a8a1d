"""Gradients of whole weights at any layout: the change that one step of Adam with a huge epsilon makes, as the export
has it.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tidemill.learner.settings.config import OptimizerConfig

PLAIN = OptimizerConfig(lr=1e9, eps=1e6, clip_grad=0.0)
"""A step is lr / eps times the gradient: a thousand times, so that the rounding of a weight is small beside its change.
(Megatron's distributed optimizer takes no SGD.)
"""
NO_PARAMETER = "e_score_correction_bias"
"""End of the names of the biases of routers, which have no gradient."""
RELATIVE = 1e-5
"""Of the largest element of a tensor."""
Gradients = dict[str, Tensor]


def taken(
    export: Callable[[], Iterator[tuple[str, Tensor]]], train: Callable[[], dict[str, float]]
) -> tuple[Gradients, dict[str, float]]:
    """Return the gradient of each exported weight in a step with ``PLAIN``, and the step's metrics. Collective."""
    before = {name: tensor.clone() for name, tensor in export()}
    metrics = train()
    after = {name: tensor for name, tensor in export() if not name.endswith(NO_PARAMETER)}
    return {name: (before[name] - tensor) * (PLAIN.eps / PLAIN.lr) for name, tensor in after.items()}, metrics


def save(out: Path, name: str, gradients: Gradients, metrics: dict[str, float]) -> None:
    """Write the results of a step for ``load``, one file for each rank."""
    whole = {weight: tensor.contiguous() for weight, tensor in gradients.items()}
    save_file(whole, out / f"{name}-{os.environ['RANK']}.safetensors", metadata={"metrics": json.dumps(metrics)})


def load(out: Path, name: str, rank: int) -> tuple[Gradients, dict[str, float]]:
    with safe_open(out / f"{name}-{rank}.safetensors", framework="pt") as file:
        return {weight: file.get_tensor(weight) for weight in file.keys()}, json.loads(file.metadata()["metrics"])  # noqa: SIM118


def differing(ours: Gradients, wanted: Gradients) -> dict[str, float]:
    """Return the weights with gradients that differ by more than ``RELATIVE``, and by how much. Fails for one without a
    gradient.
    """
    assert ours.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not tensor.abs().max() > 0] == []
    gaps = {name: float((ours[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in wanted.items()}
    return {name: gap for name, gap in gaps.items() if not gap <= RELATIVE}
