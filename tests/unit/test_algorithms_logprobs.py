"""Log-probs and entropy from logits against torch's own, values and gradients."""

import pytest
import torch
from torch import Tensor

from learner import logprobs
from learner.logprobs import log_probs_and_entropy


def _reference(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("chunk", [7, 1 << 22])
def test_values_and_gradients(
    temperature: float, dtype: torch.dtype, tolerance: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(11, 13, generator=generator, dtype=dtype)).requires_grad_()
    targets = torch.randint(13, (11,), generator=generator)
    weights = torch.randn(2, 11, generator=generator, dtype=dtype)
    kept = logits.detach().clone()
    ours = log_probs_and_entropy(logits, targets, temperature=temperature)
    wanted = _reference(logits, targets, temperature)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance * 10, rtol=tolerance)
    for chosen in ((0,), (1,), (0, 1)):
        totals = [sum((values[i] * weights[i]).sum() for i in chosen) for values in (ours, wanted)]
        first, second = (torch.autograd.grad(total, logits, retain_graph=True)[0] for total in totals)
        torch.testing.assert_close(first, second, atol=tolerance * 10, rtol=tolerance)
    assert torch.equal(logits.detach(), kept)


def test_half_precision_logits_are_worked_on_in_float32() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, torch.arange(5))
    assert log_probs.dtype == entropy.dtype == torch.float32
    wanted, _ = _reference(logits.float(), torch.arange(5), 1.0)
    torch.testing.assert_close(log_probs, wanted)
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)
    assert gradient.dtype == torch.bfloat16


def test_greedy_temperature_leaves_the_logits_alone() -> None:
    logits = torch.randn(3, 4)
    assert torch.equal(
        log_probs_and_entropy(logits, torch.zeros(3, dtype=torch.long), temperature=0)[0],
        log_probs_and_entropy(logits, torch.zeros(3, dtype=torch.long), temperature=1)[0],
    )


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([0]))
    assert log_probs.item() == 0 and entropy.item() == pytest.approx(0)
    assert bool(torch.isfinite(torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)[0]).all())
