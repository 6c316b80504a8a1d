"""The choice of kernels by device, dtype, torch and model; flash attention's arguments, against attention in
float64.
"""

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from tests.cuda_kernels import RaisingOnCuda
from tests.refusals import refusal
from tidemill.learner.backends.fsdp.attention import CurrentRow, attend
from tidemill.learner.backends.megatron.layers.attention import (
    CORE_ATTENTION,
    CudnnCoreAttention,
    PackedParams,
    SDPACoreAttention,
)
from tidemill.learner.backends.megatron.layers.kernels import (
    Kernels,
    Wanted,
    choose_fused_activation,
    choose_grouped_experts,
    chosen,
)
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels import choices, packed_rows
from tidemill.learner.kernels.choices import (
    CUDNN,
    LONG_SEQUENCE,
    SDPA,
    VARLEN,
    Site,
    choose_attention,
    choose_own_kernels,
    varlen_operator,
)
from tidemill.learner.kernels.packed_rows import PackedRow, Piece, attend_varlen, packed_row, padded_length
from tidemill.learner.settings.config import LearnerConfig

HOPPER = Site(
    device="cuda",
    dtype=torch.bfloat16,
    head_size=128,
    capability=(9, 0),
    varlen=frozenset({"query", "window_size", "scale", "enable_gqa"}),
    deterministic=True,
    compiler="",
    cudnn=91900,
)
FAST = dataclasses.replace(HOPPER, deterministic=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu"}, "the device is cpu"),
        ({"varlen": frozenset()}, "has no torch.nn.attention.varlen"),
        ({"varlen": frozenset({"query", "is_causal"})}, "no scale and no window_size"),  # torch 2.10
        ({"dtype": torch.float32}, "no kernel for float32"),
        ({"capability": (7, 5)}, "capability 7.5 is below 8.0"),
        ({"head_size": 288}, "heads of size 288"),
        ({"head_size": 100}, "heads of size 100"),
    ],
)
def test_sdpa_is_chosen_where_flash_attention_cannot_work(change: dict[str, Any], reason: str) -> None:
    site = dataclasses.replace(HOPPER, **change)
    kernel, why = choose_attention("auto", site)
    assert kernel == SDPA
    assert reason in why
    with refusal(ConfigRefused, field="learner.attention") as refused:
        choose_attention("varlen", site)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float16},
        {"capability": (8, 0)},
        {"capability": (10, 0)},
        {"head_size": 256},
        {"head_size": 8},
        {"varlen": HOPPER.varlen - {"enable_gqa"}},  # torch 2.11
    ],
)
def test_varlen_is_chosen_where_it_works(change: dict[str, Any]) -> None:
    site = dataclasses.replace(HOPPER, **change)
    assert choose_attention("auto", site).kernel == VARLEN == choose_attention("varlen", site).kernel
    assert choose_attention("sdpa", site).kernel == SDPA
    assert "not deterministic" not in choose_attention("auto", site).reason
    assert "not deterministic" in choose_attention("auto", dataclasses.replace(site, deterministic=False)).reason


def test_cudnn_is_chosen_for_long_sequences_where_it_has_been_checked() -> None:
    kernel, why = choose_attention("auto", FAST)
    assert kernel == CUDNN == choose_attention("cudnn", FAST).kernel
    assert why.startswith(f"cuDNN for sequences of {LONG_SEQUENCE} tokens and more, else flash attention")
    assert choose_attention("varlen", FAST).kernel == VARLEN
    for change, obstacle in (
        ({"deterministic": True}, "its gradients are not the same bits"),
        ({"capability": (10, 0)}, "capability 9.0 alone, and this is 10.0"),
        ({"cudnn": 0}, "from cuDNN 91900 on, and this is 0"),
        ({"head_size": 256}, "heads of size 256"),
    ):
        site = dataclasses.replace(FAST, **change)  # type: ignore[arg-type]
        assert choose_attention("auto", site).kernel == VARLEN
        with refusal(
            ConfigRefused, field="learner.attention", want="varlen or auto", got=re.compile(f"^cudnn: .*{obstacle}")
        ):
            choose_attention("cudnn", site)
    with refusal(ConfigRefused, field="learner.attention", want="sdpa or auto", got=re.compile(r"^cudnn: .*\bcpu\b")):
        choose_attention("cudnn", dataclasses.replace(FAST, device="cpu"))


def test_the_activation_is_fused_only_where_the_same_bits_are_not_asked_for() -> None:
    fast = dataclasses.replace(HOPPER, deterministic=False)
    assert choose_fused_activation("auto", fast).kernel == "fused"
    assert choose_fused_activation("auto", HOPPER).kernel == "separate"
    assert choose_fused_activation("always", HOPPER).kernel == "fused"
    assert choose_fused_activation("never", fast).kernel == "separate"
    for site in (
        dataclasses.replace(fast, device="cpu"),
        dataclasses.replace(fast, compiler="triton needs a C compiler"),
    ):
        assert choose_fused_activation("auto", site).kernel == "separate"
        with refusal(ConfigRefused, field="learner.fused_activation", got=re.compile(r"^always: .*\b(cpu|triton)\b")):
            choose_fused_activation("always", site)


def test_kernels_of_our_own_are_chosen_wherever_triton_runs() -> None:
    choose = functools.partial(choose_own_kernels, "learner.fused_rotary")
    for site in (HOPPER, dataclasses.replace(HOPPER, dtype=torch.float32, deterministic=False)):
        assert choose("auto", site).kernel == "fused" == choose("always", site).kernel
        assert choose("never", site) == ("separate", "learner.fused_rotary: never")
    for site in (
        dataclasses.replace(HOPPER, device="cpu"),
        dataclasses.replace(HOPPER, compiler="the package triton is not installed"),
    ):
        assert choose("auto", site).kernel == "separate"
        with refusal(ConfigRefused, field="learner.fused_rotary", got=re.compile(r"^always: .*\b(cpu|triton)\b")):
            choose("always", site)


def test_experts_are_grouped_where_torch_has_a_product_for_them() -> None:
    site = dataclasses.replace(HOPPER, expert_sizes=(64, 32))
    for good in (site, dataclasses.replace(site, device="cpu", dtype=torch.float32, expert_sizes=(33, 7))):
        assert choose_grouped_experts("auto", good).kernel == "grouped" == choose_grouped_experts("always", good).kernel
        assert choose_grouped_experts("never", good).kernel == "sequential"
    for change, obstacle in (
        ({"dtype": torch.float32}, "needs bfloat16"),
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"expert_sizes": (64, 28)}, "wants multiples of 8"),
        ({"grouped": False}, "has no grouped_mm"),
    ):
        bad = dataclasses.replace(site, **change)
        assert choose_grouped_experts("auto", bad).kernel == "sequential"
        with refusal(ConfigRefused, field="learner.grouped_experts", got=re.compile(f"^always: .*{obstacle}")):
            choose_grouped_experts("always", bad)


def test_the_defaults_are_those_of_the_configuration() -> None:
    assert Wanted.of(LearnerConfig()) == Wanted()
    settings = {
        "attention": "sdpa",
        "recompute": "full",
        "fused_activation": "never",
        "grouped_experts": "never",
        "fused_log_probs": "never",
        "fused_rotary": "never",
        "megatron": {"deallocate_pipeline_outputs": True},
    }
    assert dataclasses.asdict(Wanted.of(LearnerConfig(**settings))) == settings  # type: ignore[arg-type]


def test_each_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = chosen(Wanted(recompute="full"), dtype=torch.bfloat16, head_size=64)
    assert found == Kernels(attention=SDPA, recompute="full", fused_activation=False)
    assert [record.getMessage().split(" reason=")[0] for record in caplog.records] == [
        "kernel of=attention chosen=sdpa",
        "kernel of=activation chosen=separate",
        "kernel of=log-probs chosen=separate",
        "kernel of=rotary chosen=separate",
    ]
    assert CORE_ATTENTION.keys() == {SDPA, VARLEN, CUDNN}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "flash"}, {"place": "attention", "got": "'flash'"}),
        ({"recompute": "some"}, {"place": "recompute", "got": "'some'"}),
        ({"fused_activation": "yes"}, {"place": "fused_activation", "got": "'yes'"}),
        ({"fused_log_probs": "yes"}, {"place": "fused_log_probs", "got": "'yes'"}),
        (
            {"fused_log_probs": "always", "device": "cpu"},
            {"place": "fused_log_probs", "got": re.compile("^'always'")},
        ),
        ({"fused_rotary": "yes"}, {"place": "fused_rotary", "got": "'yes'"}),
        (
            {"fused_rotary": "always", "device": "cpu"},
            {"place": "fused_rotary", "got": re.compile("^'always'")},
        ),
        ({"grouped_experts": "yes"}, {"place": "grouped_experts", "got": "'yes'"}),
        ({"attention": "varlen", "device": "cpu"}, {"place": "attention"}),
        (
            {"fused_activation": "always", "device": "cpu"},
            {"place": "fused_activation", "got": re.compile("^'always'")},
        ),
        ({"attention": "varlen", "dtype": "float32"}, {"place": "attention"}),
        # The default, deterministic, refuses this kernel everywhere.
        ({"attention": "cudnn", "device": "cpu", "deterministic": False}, {"place": "attention"}),
        ({"attention": "cudnn", "dtype": "float32", "deterministic": False}, {"place": "attention"}),
        (
            {"attention": "cudnn"},
            {"place": "attention", "got": re.compile("^'cudnn'")},
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: dict[str, Any]) -> None:
    with refusal(ValueError, **message):
        LearnerConfig(**settings)


LENGTHS = (1, 5, 0, 33, 64, 7, 17)


def row_of(lengths: tuple[int, ...]) -> PackedRow:
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return packed_row(bounds, torch.cat([torch.arange(length) for length in lengths]))


def whole(row: PackedRow) -> Piece:
    return Piece(sum(LENGTHS), row.longest, row.bounds_S)


def by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the signature and the rules of ``varlen_attn`` (torch 2.13), sequence by sequence; refuses
    arguments with which a kernel would read out of bounds.
    """
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    starts = cu_seq_q.tolist()
    assert starts == cu_seq_k.tolist()
    assert starts[0] == 0
    assert starts[-1] == len(query) == len(key) == len(value)
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    assert max(lengths) == max_q == max_k
    assert enable_gqa or query.shape[1] == key.shape[1]
    repeats = query.shape[1] // key.shape[1]
    found = []
    for q_L, k_L, v_L in zip(*(each.split(lengths) for each in (query, key, value)), strict=True):
        k_L, v_L = (each.repeat_interleave(repeats, 1) for each in (k_L, v_L))
        scores = torch.einsum("qhd,khd->hqk", q_L, k_L) * (query.shape[-1] ** -0.5 if scale is None else scale)
        past, ahead = window_size
        distance = torch.arange(len(q_L))[None] - torch.arange(len(q_L))[:, None]  # key less query
        seen = ((past < 0) | (distance >= -past)) & ((ahead < 0) | (distance <= ahead))
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v_L))
    return torch.cat(found)


def of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The operator passes all heads on to the kernel, which takes fewer heads of keys and values."""
    return by_formula(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=True
    )


@pytest.mark.parametrize("operator", [by_formula, of_torch_2_11])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_row_by_flash_attentions_arguments_equals_sdpa(
    operator: Callable[..., Tensor], groups: int, scale: float | None
) -> None:
    """Values and gradients in float64; the values of attention are views of a joint projection, as in the model."""
    row = row_of(LENGTHS)
    tokens, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    joint = torch.randn(tokens, 4 + 2 * groups, 16, generator=generator, dtype=torch.float64)
    weights = torch.randn(tokens, 64, generator=generator, dtype=torch.float64)
    config = type("Config", (), {"context_parallel_size": 1, "attention_dropout": 0.0})()
    plain = SDPACoreAttention(config, 1, None, "self", softmax_scale=scale)

    def found(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = joint.clone().requires_grad_()
        out = attend(*leaf.split([4, groups, groups], 1))
        out.backward(weights)
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    with RaisingOnCuda() as seen:
        ours = found(lambda q, k, v: attend_varlen(q, k, v, whole(row), operator=operator, scale=scale).flatten(1))
    assert seen.found == []
    wanted = found(
        lambda q, k, v: plain(q[:, None], k[:, None], v[:, None], None, packed_seq_params=PackedParams.of(row))[:, 0]
    )
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [1, 3, 200])
def test_flash_attention_with_a_window_equals_the_buckets(window: int) -> None:
    row, generator = row_of(LENGTHS), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    ours = attend_varlen(q, k, v, whole(row), operator=by_formula, scale=None, window=window)
    current = CurrentRow()
    current.set(row)
    layer = SimpleNamespace(current_row=current)
    wanted, _ = attend(layer, *(x.transpose(0, 1)[None] for x in (q, k, v)), None, sliding_window=window)
    torch.testing.assert_close(ours, wanted[0], rtol=1e-10, atol=1e-12)


class OnTheCpu(CudnnCoreAttention):
    """With the formula for flash attention, and torch's own attention for cuDNN's."""

    _backend = SDPBackend.MATH

    def _attend_sequences(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> Tensor:
        return attend_varlen(q, k, v, piece, operator=by_formula, scale=self.softmax_scale)


@pytest.mark.parametrize("lengths", [(150,), (5, 150, 3, 0, 7, 128, 200, 1), (128, 1, 2), (1, 2), (129, 130)])
def test_long_sequences_apart_equal_the_whole_row(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients in float64: a row cut into pieces, its long sequences padded, against sequence by
    sequence.
    """
    monkeypatch.setattr(packed_rows, "LONG_SEQUENCE", 128)
    row = row_of(lengths)
    assert sum(piece.tokens for piece in row.pieces) in (0, sum(lengths))
    assert [piece.tokens for piece in row.pieces if piece.bounds_S is None] == [
        length for length in lengths if length >= 128
    ]
    config = type("Config", (), {"context_parallel_size": 1, "attention_dropout": 0.0})()
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(sum(lengths), 1, 8, 16, generator=generator, dtype=torch.float64)
    weights = torch.randn(sum(lengths), 1, 64, generator=generator, dtype=torch.float64)
    found = []
    for attention in (
        OnTheCpu(config, 1, None, "self", softmax_scale=0.3),
        SDPACoreAttention(config, 1, None, "self", softmax_scale=0.3),
    ):
        leaf = joint.clone().requires_grad_()
        out = attention(*leaf.split([4, 2, 2], 2), None, packed_seq_params=PackedParams.of(row))
        out.backward(weights)
        found.append((out.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_long_sequences_have_few_lengths_for_which_cudnn_makes_plans() -> None:
    padded = {length: padded_length(length) for length in range(LONG_SEQUENCE, 4 * LONG_SEQUENCE + 1)}
    assert all(length <= found <= length * 17 / 16 and found % 128 == 0 for length, found in padded.items())
    assert len(set(padded.values())) == 2 * 16 + 1


def test_torchs_operator_takes_the_arguments_and_gives_the_shape() -> None:
    """In FakeTensor mode, which knows the operator's shapes and computes nothing."""
    operator = varlen_operator()
    assert operator is not None
    row = row_of(LENGTHS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = (torch.empty(sum(LENGTHS), heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
        out = attend_varlen(q, k, k, whole(row), operator=operator, scale=None)
        assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
        out.sum().backward()
        assert q.grad is not None
        assert k.grad is not None
        assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)


def test_the_operator_beneath_varlen_attn_is_taken_while_it_is_the_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.varlen import varlen_attn

    try:
        varlen_operator.cache_clear()
        assert varlen_operator() is choices.flash_attention
        monkeypatch.setattr(choices, "FLASH_ARGUMENTS", choices.FLASH_ARGUMENTS[:-1])
        varlen_operator.cache_clear()
        assert varlen_operator() is varlen_attn
    finally:
        varlen_operator.cache_clear()


def test_it_takes_grouped_heads_and_a_window() -> None:
    """With the shapes of torch's own function, in FakeTensor mode."""
    with FakeTensorMode():
        bounds = torch.zeros(3, dtype=torch.int32)
        q, k = (torch.empty(20, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
        out = choices.flash_attention(q, k, k, bounds, bounds, 10, 10, scale=0.5, window_size=(-1, 0))
        out.sum().backward()
        assert q.grad is not None and k.grad is not None
        assert (out.shape, q.grad.shape, k.grad.shape) == (q.shape, q.shape, k.shape)
