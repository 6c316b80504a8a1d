"""Parts of the optimizer on FSDP2 that need no ranks."""

import pytest
import torch

from tidemill.learner.backends.fsdp.optimizer import SUMMED, blocks, decays, sum_of_squares


@pytest.mark.parametrize("size", [0, 1, SUMMED - 1, SUMMED, 3 * SUMMED + 5, 5_000_000])
def test_squares_are_summed_exactly(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)) + 0.5
    assert float(sum_of_squares(values)) == pytest.approx(float(values.double().square().sum()), rel=5e-7)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_sum_with_a_value_that_is_not_finite_is_not_finite(wrong: float) -> None:
    values = torch.ones(2 * SUMMED + 3)
    values[SUMMED + 1] = wrong
    assert not torch.isfinite(sum_of_squares(values))


def test_blocks_have_at_most_their_size_or_one_weight() -> None:
    weights = {name: torch.empty(size) for name, size in {"a": 5, "b": 4, "c": 20, "d": 1, "e": 9}.items()}
    assert blocks(weights, 10) == [["a", "b"], ["c"], ["d", "e"]]


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.0.mlp.up_proj.weight", (4, 2), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 4, 2), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (3, 4), False),
        ("model.norm.weight", (4,), False),
        ("model.layers.0.self_attn.sinks", (4,), False),
    ],
)
def test_weight_decay_is_of_matrices_alone(name: str, shape: tuple[int, ...], wanted: bool) -> None:
    assert decays(name, torch.empty(shape)) is wanted
