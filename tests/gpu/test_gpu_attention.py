"""Attention of packed rows on the device: values and gradients against float64, its kernels, and its memory."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.skips import inapplicable
from tidemill.learner.backends.megatron.layers.attention import CORE_ATTENTION, PackedParams, SDPACoreAttention
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.kernels.choices import CUDNN, CUDNN_CAPABILITY, LONG_SEQUENCE, SDPA, VARLEN
from tidemill.learner.kernels.packed_rows import packed_row
from tidemill.learner.layout.parallel import Parallel

pytestmark = pytest.mark.gpu

LENGTHS = (1, 5, 33, 64, 7, 17)
"""Tokens of the sequences of a row: several buckets, one of them full."""
GB = 1e9


def attention(kernel: str = SDPA) -> SDPACoreAttention:
    return CORE_ATTENTION[kernel](SimpleNamespace(context_parallel_size=1, attention_dropout=0.0), 1, None, "self")


def row_of(lengths: tuple[int, ...], device: torch.device) -> Any:
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return PackedParams.of(packed_row(bounds, positions))


def made_inputs(
    tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(tokens, 1, number, size, generator=generator) for number in (heads, groups, groups)]
    return [each.to(device, dtype).requires_grad_() for each in made]


def reference(inputs: list[Tensor], lengths: tuple[int, ...]) -> Tensor:
    """Attend sequence by sequence, by the formula."""
    q, k, v = (each.squeeze(1) for each in inputs)
    repeats = q.shape[1] // k.shape[1]
    found = []
    for q_L, k_L, v_L in zip(*(each.split(lengths) for each in (q, k, v)), strict=True):
        k_L, v_L = (each.repeat_interleave(repeats, 1) for each in (k_L, v_L))
        scores = torch.einsum("qhd,khd->hqk", q_L, k_L) / q.shape[-1] ** 0.5
        mask = torch.ones_like(scores[0], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, v_L).flatten(1))
    return torch.cat(found)[:, None]


@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [(SDPA, torch.float32, 2e-5), (SDPA, torch.bfloat16, 3e-2), (VARLEN, torch.bfloat16, 3e-2)],
)
@pytest.mark.parametrize("groups", [2, 4])
def test_values_and_gradients(
    device: torch.device, kernel: str, dtype: torch.dtype, tolerance: float, groups: int
) -> None:
    if kernel == VARLEN and device.type != "cuda":
        inapplicable("flash attention needs CUDA; tests/unit/test_kernels.py compares its arguments with SDPA")
    ours = made_inputs(sum(LENGTHS), 4, groups, 16, dtype, device)
    exact = [each.detach().cpu().double().requires_grad_() for each in ours]
    out = attention(kernel)(*ours, None, packed_seq_params=row_of(LENGTHS, device))
    wanted = reference(exact, LENGTHS)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).double()
    out.backward(weights.to(device, dtype))
    wanted.backward(weights.to(dtype).double())
    for one, other in zip([out, *(each.grad for each in ours)], [wanted, *(each.grad for each in exact)], strict=True):
        assert one is not None and other is not None
        # Against the largest value: single elements of bfloat16 lose all their digits in a sum.
        assert (one.detach().cpu().double() - other.detach()).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("kernel", [SDPA, VARLEN])
def test_bfloat16_runs_on_flash_kernels(cuda: torch.device, kernel: str) -> None:
    ours, row = made_inputs(2048, 16, 8, 128, torch.bfloat16, cuda), row_of((1024, 24, 1000), cuda)
    attention(kernel)(*ours, None, packed_seq_params=row).sum().backward()  # loads the kernels
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attention(kernel)(*ours, None, packed_seq_params=row).sum().backward()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any(("flash" in name and "fwd" in name) or (kernel == SDPA and "cudnn" in name) for name in names), names


@pytest.mark.parametrize(
    "lengths", [(LONG_SEQUENCE,), (5, LONG_SEQUENCE + 30, 700, 5, LONG_SEQUENCE + 600)], ids=["alone", "among others"]
)
@pytest.mark.parametrize(("heads", "groups", "size"), [(16, 8, 128), (8, 2, 64), (4, 4, 96)])
def test_long_sequences_by_cudnn(
    hopper: torch.device, lengths: tuple[int, ...], heads: int, groups: int, size: int
) -> None:
    """Values and gradients as near to float64 as flash attention's; the kernels are cuDNN's."""
    found = {}
    for kernel in (CUDNN, VARLEN, "float64"):
        dtype = torch.float64 if kernel == "float64" else torch.bfloat16
        inputs = [
            each.detach().to(torch.bfloat16).to(dtype).requires_grad_()
            for each in made_inputs(sum(lengths), heads, groups, size, torch.bfloat16, hopper)
        ]
        out = attention(SDPA if kernel == "float64" else kernel)(
            *inputs, None, packed_seq_params=row_of(lengths, hopper)
        )
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(hopper, torch.bfloat16)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            out.backward(weights.to(dtype))
            torch.cuda.synchronize()
        assert any("cudnn" in event.key.lower() for event in profile.key_averages()) == (kernel == CUDNN)
        found[kernel] = [out.detach().double(), *(each.grad.double() for each in inputs if each.grad is not None)]
    for ours, flash, exact in zip(*found.values(), strict=True):
        wanted = (flash - exact).square().mean().sqrt()
        assert (ours - exact).square().mean().sqrt() <= 1.2 * wanted
        assert wanted < 0.01 * exact.square().mean().sqrt()


@pytest.mark.usefixtures("deterministic")
def test_flash_attentions_gradients_are_the_same_bits_twice(cuda: torch.device) -> None:
    """Long sequences, for which many blocks add to one gradient."""
    lengths, gradients = (3000, 40, 5000), []
    for _ in range(3):
        ours = made_inputs(sum(lengths), 16, 8, 128, torch.bfloat16, cuda)
        attention(VARLEN)(*ours, None, packed_seq_params=row_of(lengths, cuda)).float().square().sum().backward()
        gradients.append([each.grad for each in ours])
    for again in gradients[1:]:
        for one, other in zip(gradients[0], again, strict=True):
            assert one is not None and other is not None
            assert torch.equal(one, other)


def test_a_model_in_bfloat16_takes_flash_attention(rank: Parallel, model_dir: Path, on_gpu: bool) -> None:
    """With cuDNN's for long sequences on Hopper: the rank need not be deterministic."""
    hopper = on_gpu and torch.cuda.get_device_capability() == CUDNN_CAPABILITY
    wanted = CUDNN if hopper else VARLEN if on_gpu else SDPA
    assert build_policy(model_dir, dtype="bfloat16", parallel=rank).bridge.kernels.attention == wanted
    assert build_policy(model_dir, dtype="float32", parallel=rank).bridge.kernels.attention == SDPA


@pytest.mark.parametrize("kernel", [SDPA, VARLEN, CUDNN])
@pytest.mark.parametrize("lengths", [(8192,), (2048,) * 4], ids=["one of 8k", "four of 2k"])
def test_eight_thousand_tokens_take_less_than_a_gigabyte(
    cuda: torch.device, kernel: str, lengths: tuple[int, ...], peak: Callable[[], int], request: pytest.FixtureRequest
) -> None:
    """16 heads of 128 in bfloat16, forward and backward, inputs and gradients included. Scores of all pairs would take
    2 GB each.
    """
    if kernel == CUDNN:
        request.getfixturevalue("hopper")
    ours, row = made_inputs(sum(lengths), 16, 8, 128, torch.bfloat16, cuda), row_of(lengths, cuda)
    attention(kernel)(*ours, None, packed_seq_params=row).sum().backward()
    torch.cuda.synchronize()
    assert peak() < GB
