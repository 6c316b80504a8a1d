"""Log-probs at a real vocabulary on the device: values against float64, and memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from learner.megatron.logprobs import log_probs_and_entropy

pytestmark = pytest.mark.gpu

HIDDEN = 64
PEAK = 0.25
"""The most memory, in sizes of the logits, of which only chunks exist."""


def test_values_and_memory(device: torch.device, on_gpu: bool, peak: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> None:
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
        times = _milliseconds(hidden_TH, weight_VH, targets_T)
        with capsys.disabled():
            print(f"\nlog-probs [{tokens}, {vocab}] bfloat16, both ways: {times:.1f} ms, peak {most / size:.2f} of the logits")
        assert most < PEAK * size


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


def _milliseconds(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> float:
    """Return the median time of forward and backward in milliseconds."""
    times = []
    for _ in range(5):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        log_probs_T, _ = log_probs_and_entropy(hidden_TH, weight_VH, targets_T)
        log_probs_T.sum().backward()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return sorted(times)[2]
