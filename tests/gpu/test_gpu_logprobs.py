"""Log-probs at a real vocabulary on the device: values against float64, and memory."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.skips import inapplicable
from tidemill.learner.kernels import logprobs
from tidemill.learner.kernels.logprobs import listed_log_probs, log_probs_and_entropy

pytestmark = pytest.mark.gpu

HIDDEN = 64
PEAK = 0.25
"""The most memory, in sizes of the logits, of which only chunks exist."""


def test_values_and_memory(
    device: torch.device, on_gpu: bool, peak: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, vocab = (8192, 151_936) if on_gpu else (64, 997)
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(tokens, HIDDEN, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight_VH = (0.3 * torch.randn(vocab, HIDDEN, generator=generator)).to(device, torch.bfloat16).requires_grad_()
    targets_T = torch.randint(vocab, (tokens,), generator=generator).to(device)
    log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, weight_VH, targets_T)
    (log_probs_T.sum() + 0.01 * entropy_T.sum()).backward()
    most = peak()
    assert log_probs_T.dtype == entropy_T.dtype == torch.float32
    rows = torch.linspace(0, tokens - 1, 16).long()
    # From the rounded logits, which are bfloat16 in the model, too.
    logits_RV = (hidden_TH.detach()[rows] @ weight_VH.detach().T).double()
    wanted = logits_RV.log_softmax(-1)
    picked_R = wanted.gather(1, targets_T[rows, None])[:, 0]
    # A matrix product of other shapes may round a logit differently: 2^-8 of logits around 10.
    torch.testing.assert_close(log_probs_T.detach()[rows].double(), picked_R, atol=0.1, rtol=0)
    torch.testing.assert_close(entropy_T.detach()[rows].double(), -(wanted.exp() * wanted).sum(1), atol=0.1, rtol=0)
    assert hidden_TH.grad is not None and bool(torch.isfinite(hidden_TH.grad).all()) and bool(hidden_TH.grad.any())
    if on_gpu:
        size = tokens * vocab * 2
        fused, separate = (_milliseconds(hidden_TH, weight_VH, targets_T, fused=kind) for kind in (True, False))
        with capsys.disabled():
            print(
                f"\nlog-probs [{tokens}, {vocab}] bfloat16, both ways: fused {fused:.1f} ms, separate "
                f"operations {separate:.1f} ms"
            )
            print(f"peak of the separate operations {most / size:.2f} of the logits")
        assert most < PEAK * size


@pytest.fixture
def kernels(on_gpu: bool) -> None:
    """Skips without Triton's kernels. Its interpreter (TRITON_INTERPRET=1, with the package triton) runs them on a
    CPU.
    """
    if not on_gpu and not os.environ.get("TRITON_INTERPRET"):
        inapplicable("kernels of Triton")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("columns", [1 << 13, 37], ids=["one chunk", "many"])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("listed", [0, 3])
def test_the_fused_kernels_are_exact(
    device: torch.device,
    on_gpu: bool,
    columns: int,
    with_entropy: bool,
    temperature: float,
    listed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32 within rounding of float64, and the same bits twice."""
    tokens, vocab = (33, 5001) if on_gpu else (4, 203)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", tokens * columns)
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(size, 24, generator=generator).double() for size in (tokens, vocab)]
    targets_T = torch.randint(vocab, (tokens,), generator=generator)
    listed_TK = torch.cat([targets_T[:, None], torch.randint(vocab, (tokens, 2), generator=generator)], dim=1)[
        :, :listed
    ]
    weights = [torch.randn(shape, generator=generator).double() for shape in ((tokens,), (tokens,), (tokens, listed))]

    def values(inputs: list[Tensor], fused: bool) -> list[Tensor]:
        ids_T, ids_TK = targets_T.to(inputs[0].device), listed_TK.to(inputs[0].device)
        if listed:
            return list(listed_log_probs(*inputs, ids_T, ids_TK, temperature=temperature, fused=fused))
        return list(log_probs_and_entropy(*inputs, ids_T, temperature=temperature, fused=fused))

    def gradients(found: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        terms = [(each * weight.to(each)).sum() for each, weight in zip(found, weights, strict=False)]
        return list(torch.autograd.grad(terms[0] + (terms[1] if with_entropy else 0) + sum(terms[2:]), inputs))

    ours = [each.to(device, torch.float32).requires_grad_() for each in exact]
    others = [each.requires_grad_() for each in exact]
    found, wanted = values(ours, True), values(others, False)
    both, of_wanted = [*found, *gradients(found, ours)], [*wanted, *gradients(wanted, others)]
    for one, other in zip(both, of_wanted, strict=True):
        torch.testing.assert_close(one.detach().cpu().double(), other.detach(), atol=5e-5, rtol=5e-5)
    again = values(ours, True)
    assert all(map(torch.equal, [*again, *gradients(again, ours)], both))


@pytest.mark.usefixtures("kernels")
def test_the_fused_kernels_are_as_near_in_bfloat16_as_the_separate_operations(
    device: torch.device, on_gpu: bool
) -> None:
    """The interpreter rounds to bfloat16 in its own way."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(size, 32, generator=generator).bfloat16() for size in (64 if on_gpu else 8, 700)]
    targets_T = torch.randint(700, (len(exact[0]),), generator=generator)

    def all_of(inputs: list[Tensor], fused: bool) -> list[Tensor]:
        inputs = [each.requires_grad_() for each in inputs]
        found = log_probs_and_entropy(inputs[0], inputs[1], targets_T.to(inputs[0].device), fused=fused)
        return [*found, *torch.autograd.grad(found[0].sum() + 0.1 * found[1].sum(), inputs)]

    wanted = all_of([each.double() for each in exact], False)
    fused, separate = (all_of([each.to(device, copy=True) for each in exact], kind) for kind in (True, False))
    for one, other, right in zip(fused, separate, wanted, strict=True):
        error, bound = ((each.detach().cpu().double() - right.detach()).norm() for each in (one, other))
        assert 0 < error <= (1.05 if on_gpu else 1.5) * bound


def test_exact_logits(device: torch.device) -> None:
    """In float32, values and the gradient of the hidden states are those of float64."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(33, 24, generator=generator).double(), torch.randn(701, 24, generator=generator).double()]
    targets_T = torch.randint(701, (33,), generator=generator)
    hidden_TH, weight_VH = (each.to(device, torch.float32).requires_grad_() for each in exact)
    log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, weight_VH, targets_T.to(device))
    (log_probs_T.sum() + 0.01 * entropy_T.sum()).backward()
    wide_TH = exact[0].requires_grad_()
    wanted = (wide_TH @ exact[1].T).log_softmax(-1)
    picked_T, spread_T = wanted.gather(1, targets_T[:, None])[:, 0], -(wanted.exp() * wanted).sum(1)
    (picked_T.sum() + 0.01 * spread_T.sum()).backward()
    assert hidden_TH.grad is not None and wide_TH.grad is not None
    for one, other in ((log_probs_T, picked_T), (entropy_T, spread_T), (hidden_TH.grad, wide_TH.grad)):
        torch.testing.assert_close(one.detach().cpu().double(), other.detach(), atol=1e-4, rtol=1e-4)


def _milliseconds(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *, fused: bool) -> float:
    """Return the median time of forward and backward in milliseconds."""
    times = []
    for _ in range(5):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        log_probs_T, _ = log_probs_and_entropy(hidden_TH, weight_VH, targets_T, fused=fused)
        log_probs_T.sum().backward()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return sorted(times)[2]
