"""Norms and rotary positions of queries and keys by kernels: values and gradients against float64, the same bits twice,
and time.
"""

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests import heads_by_formula
from tests.skips import inapplicable

pytestmark = pytest.mark.gpu

SIZES = [(37, 4, 2, 16, 8), (5, 3, 1, 24, 6), (64, 6, 6, 40, 20)]
"""Tokens, heads of queries and of keys, head size, rotated pairs: the numbers of heads and the sizes are no powers of
two.
"""
EPS = 1e-6
Values = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


@pytest.fixture(scope="module", autouse=True)
def kernels(on_gpu: bool) -> None:
    """Skips without Triton's kernels. Its interpreter (TRITON_INTERPRET=1, with the package triton) runs them on a
    CPU.
    """
    if not on_gpu and not os.environ.get("TRITON_INTERPRET"):
        inapplicable("kernels of Triton")


def with_gradients(values: Values, exact: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return values and gradients of a function of inputs, which it gets in ``dtype``."""
    inputs = [each.to(device, dtype).requires_grad_() for each in exact]
    found = values(inputs)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in found]
    total = sum((each * weight.to(device, dtype)).sum() for each, weight in zip(found, weights, strict=True))
    assert isinstance(total, Tensor)
    return [each.detach() for each in (*found, *torch.autograd.grad(total, inputs))]


def inputs_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def compare(ours: Values, formula: Values, exact: Sequence[Tensor], device: torch.device, on_gpu: bool) -> None:
    wanted = with_gradients(formula, exact, torch.float64, torch.device("cpu"))
    found = with_gradients(ours, exact, torch.float32, device)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, atol=2e-5, rtol=2e-5)
    assert all(map(torch.equal, found, with_gradients(ours, exact, torch.float32, device)))
    rounded = [each.bfloat16().double() for each in exact]
    wanted = with_gradients(formula, rounded, torch.float64, torch.device("cpu"))
    for one, other in zip(with_gradients(ours, rounded, torch.bfloat16, device), wanted, strict=True):
        # Rounded once, and the gradient of a product has rounded weights; the interpreter rounds to bfloat16 in its own
        # way.
        assert (one.cpu().double() - other).norm() <= (4e-3 if on_gpu else 8e-3) * other.norm()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "groups", "size", "pairs"), SIZES)
def test_rotary_positions_are_exact(
    device: torch.device, on_gpu: bool, tokens: int, heads: int, groups: int, size: int, pairs: int, interleaved: bool
) -> None:
    """Queries and keys are views of a joint projection, as in a model without norms for them."""
    angles_TF = 5 * torch.randn(tokens, pairs, generator=torch.Generator().manual_seed(2))

    def parts(joint: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = joint.split([heads, groups, groups], 1)
        return q, k

    def ours(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        from tidemill.learner.kernels.triton_kernels import rotated

        return rotated(
            *parts(inputs[0]), angles_TF.cos().to(device), angles_TF.sin().to(device), interleaved=interleaved
        )

    def formula(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
        return heads_by_formula.rotated(*parts(inputs[0]), cos_TF, sin_TF, interleaved=interleaved)

    compare(ours, formula, inputs_of((tokens, heads + 2 * groups, size)), device, on_gpu)


@pytest.mark.parametrize(("tokens", "heads", "groups", "size", "pairs"), [*SIZES, (3000, 2, 1, 16, 8)])
def test_norms_of_heads_are_exact(
    device: torch.device, on_gpu: bool, tokens: int, heads: int, groups: int, size: int, pairs: int
) -> None:
    """The norm of keys, which are a view; the last case has more rows than one tile of each program."""

    def ours(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        from tidemill.learner.kernels.triton_kernels import head_norm

        return (head_norm(inputs[0][:, :, groups:], inputs[1], EPS),)

    def formula(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (heads_by_formula.head_norm(inputs[0][:, :, groups:], inputs[1], EPS),)

    compare(ours, formula, inputs_of((tokens, 1, heads + groups, size), (size,)), device, on_gpu)


def test_they_are_faster_than_the_separate_operations(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """Norms and rotary positions of 8,192 tokens with 16 heads and 8 groups of 128, in bfloat16, forward and
    backward.
    """
    from tidemill.learner.kernels import triton_kernels

    joint = torch.randn(8192, 1, 32, 128, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.ones(128, device=cuda, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    angles_TF = torch.randn(8192, 64, device=cuda)

    def milliseconds(kind: "type[heads_by_formula] | object") -> float:
        times = []
        for _ in range(7):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            q, k, _ = joint.split([16, 8, 8], 2)
            q, k = (kind.head_norm(x, weight, EPS)[:, 0] for x, weight in zip((q, k), weights, strict=True))  # type: ignore[attr-defined]
            q, k = kind.rotated(q, k, angles_TF.cos(), angles_TF.sin(), interleaved=False)  # type: ignore[attr-defined]
            torch.autograd.backward([q, k], [q.detach(), k.detach()])
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended))
        return sorted(times)[3]

    fused, separate = milliseconds(triton_kernels), milliseconds(heads_by_formula)
    with capsys.disabled():
        print(
            f"\nnorms and rotary positions of a layer, both ways: fused {fused:.2f} ms, separate operations "
            f"{separate:.2f} ms"
        )
    assert fused < separate
