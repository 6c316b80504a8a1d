"""The forward pass of Qwen3, Qwen2, Llama, Mistral, GLM-4 and Qwen3-MoE over one set of weights; pure, without cache,
sampling or versions.

It replaces transformers' forward, because a decoding step of a small model is all overhead (2 layers, 32 rows, one
core: 0.3 ms here, 0.6 ms there; ``tests/bench/engine.py`` prints the ratio over whole responses), and because weights
as plain fused tensors make a version flip one assignment. ``tests/contract/test_engine_decoder.py`` holds it to
transformers within 1e-5.

Shape letters: B = rows, T = tokens per row, E = hidden size, A = heads of query, key and value, H = query heads, K =
key/value heads, D = head size, P = positions, V = vocabulary; N = tokens of all rows, X = experts, J = experts of a
token.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tidemill.actors.serving.builtin import lora
from tidemill.actors.serving.builtin.lora import AdapterRows
from tidemill.actors.serving.builtin.shape import HALVES, ExpertSizes, Rope
from tidemill.actors.serving.builtin.weights import LayerWeights, Weights

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of attention on CUDA: not cuDNN's, which torch prefers in half precision. They are planned anew for each
length, so for every decoding step: 30 ms a token on an H200.
"""


class Attention(Protocol):
    """Storage of keys and values, and the mask of each token."""

    def __call__(self, layer: int, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor) -> Tensor:
        """Store key and value, and attend with query. Returns [B, T, H * D]."""
        ...


class RopeTable:
    """Cosines and signed sines for positions below ``length``; 1 and 0 for elements without positions."""

    def __init__(self, weights: Weights, length: int) -> None:
        rope, head_dim, dtype, device = weights.shape.rope, weights.shape.head_dim, weights.dtype, weights.device
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(rope, rope.size(head_dim))
        self.length = length
        # Elements that turn together are exchanged and the first of them negated: the sign is put into the table.
        cos, sin = (_paired(rope, *pair) for pair in ((angles.cos(), angles.cos()), (-angles.sin(), angles.sin())))
        without = (0, head_dim - rope.size(head_dim))
        self._cos_P1D = functional.pad(cos, without, value=1.0)[:, None].to(dtype).to(device)
        self._sin_P1D = functional.pad(sin, without)[:, None].to(dtype).to(device)

    def at(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines at these positions, each [B, T, 1, D]."""
        return self._cos_P1D[positions_BT], self._sin_P1D[positions_BT]


def _paired(rope: Rope, first: Tensor, second: Tensor) -> Tensor:
    """Return the values [P, elements] at the places of the first and of the second element of each pair."""
    return torch.cat((first, second), -1) if rope.pairs == HALVES else torch.stack((first, second), -1).flatten(-2)


def inverse_frequencies(rope: Rope, rotated: int) -> Tensor:
    """Return radians per position of the elements of a head that have positions, fp32 as trainers compute them,
    [rotated / 2].

    llama3: wavelengths beyond the original context are slowed down by ``factor``, short ones kept, those between
    interpolated. Source: Llama 3.1 release, `apply_scaling`.
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_context * frequencies / (2 * math.pi)
        kept = ((turns - rope.low_turns) / (rope.high_turns - rope.low_turns)).clamp(0.0, 1.0)
        return frequencies * (kept + (1 - kept) / rope.factor)
    return frequencies


def forward(
    weights: Weights,
    tokens_BT: Tensor,
    rope: tuple[Tensor, Tensor],
    attention: Attention,
    chosen: list[Tensor] | None = None,
    adapters: Sequence[AdapterRows] = (),
) -> Tensor:
    """Return the hidden state before the last norm, [B, T, E]. ``chosen`` gets the experts of each layer, [B, T, J].
    ``adapters``: of the rows that have one.
    """
    x_BTE = functional.embedding(tokens_BT, weights.embedding_VE)
    with sdpa_kernel(KERNELS) if x_BTE.is_cuda else contextlib.nullcontext():
        for index, layer in enumerate(weights.layers):
            attended_BTE = _attend(weights, layer, index, x_BTE, rope, attention, adapters)
            x_BTE = x_BTE + _after(weights, layer.attention_post_norm, attended_BTE)
            x_BTE = x_BTE + _after(weights, layer.mlp_post_norm, _mlp(weights, layer, index, x_BTE, chosen, adapters))
    return x_BTE


def causal_attention(query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor) -> Tensor:
    """Attend causally within each row. Returns [B, T, H * D]."""
    query_BHTD, key_BKTD, value_BKTD = (heads.transpose(1, 2) for heads in (query_BTHD, key_BTKD, value_BTKD))
    attended_BHTD = functional.scaled_dot_product_attention(
        query_BHTD, key_BKTD, value_BKTD, is_causal=True, enable_gqa=True
    )
    return attended_BHTD.transpose(1, 2).flatten(2)


def logits(weights: Weights, x_BE: Tensor) -> Tensor:
    """Return the scores of the next token, fp32, [B, V]."""
    normed_BE = functional.rms_norm(x_BE, (weights.shape.hidden,), weights.norm, weights.shape.norm_eps)
    return functional.linear(normed_BE, weights.head_VE).float()


def _after(weights: Weights, norm: Tensor | None, x_BTE: Tensor) -> Tensor:
    """Return the output of a sublayer, through the norm behind it if there is one."""
    return x_BTE if norm is None else functional.rms_norm(x_BTE, (weights.shape.hidden,), norm, weights.shape.norm_eps)


def _attend(
    weights: Weights,
    layer: LayerWeights,
    index: int,
    x_BTE: Tensor,
    rope: tuple[Tensor, Tensor],
    attention: Attention,
    adapters: Sequence[AdapterRows],
) -> Tensor:
    shape = weights.shape
    normed_BTE = functional.rms_norm(x_BTE, (shape.hidden,), layer.input_norm, shape.norm_eps)
    qkv_BTQ = functional.linear(normed_BTE, layer.qkv_QE, layer.qkv_bias)
    heads_BTAD = lora.add(qkv_BTQ, normed_BTE, adapters, index, lora.QKV).unflatten(-1, (-1, shape.head_dim))
    rotated, value_BTKD = heads_BTAD.split((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=2)
    if layer.head_norm_HD is not None:
        rotated = functional.rms_norm(rotated, (shape.head_dim,), None, shape.norm_eps) * layer.head_norm_HD
    cos, sin = rope
    rotated = torch.addcmul(rotated * cos, _exchanged(rotated, shape.rope), sin)
    query_BTHD, key_BTKD = rotated.split((shape.num_heads, shape.num_kv_heads), dim=2)
    attended = attention(index, query_BTHD, key_BTKD, value_BTKD)
    out_BTE = functional.linear(attended, layer.output, layer.output_bias)
    return lora.add(out_BTE, attended, adapters, index, lora.OUTPUT)


def _exchanged(heads_BTAD: Tensor, rope: Rope) -> Tensor:
    """Exchange the two elements of each pair. Elements without positions get any value, as their sine is 0."""
    if rope.pairs == HALVES:
        assert rope.share == 1, "only neighbours in a part of each head"
        return heads_BTAD.roll(heads_BTAD.shape[-1] // 2, -1)
    return heads_BTAD.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _mlp(
    weights: Weights,
    layer: LayerWeights,
    index: int,
    x_BTE: Tensor,
    chosen: list[Tensor] | None,
    adapters: Sequence[AdapterRows],
) -> Tensor:
    normed_BTE = functional.rms_norm(x_BTE, (weights.shape.hidden,), layer.mlp_norm, weights.shape.norm_eps)
    if layer.router_XE is not None:
        out_NE, chosen_NJ = _experts(weights.shape.experts, layer, normed_BTE.flatten(0, 1))
        if chosen is not None:
            chosen.append(chosen_NJ.unflatten(0, normed_BTE.shape[:2]))
        return out_NE.view_as(normed_BTE)
    halves = functional.linear(normed_BTE, layer.gate_up, layer.gate_up_bias)
    gate, up = lora.add(halves, normed_BTE, adapters, index, lora.GATE_UP).chunk(2, dim=-1)
    inner = functional.silu(gate) * up
    return lora.add(functional.linear(inner, layer.down, layer.down_bias), inner, adapters, index, lora.DOWN)


def _experts(sizes: ExpertSizes | None, layer: LayerWeights, x_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each token's experts, and their ids, by one product per expert that has tokens."""
    assert sizes is not None and layer.router_XE is not None
    # In float32, as the learner has them.
    scores_NX = functional.linear(x_NE.float(), layer.router_XE.float()).softmax(-1)
    shares_NJ, chosen_NJ = scores_NX.topk(sizes.per_token, -1)
    if sizes.normalised:
        shares_NJ = shares_NJ / shares_NJ.sum(-1, keepdim=True)
    shares_NJ = shares_NJ.to(x_NE.dtype)
    # The (token, place) pairs of an expert lie side by side after the sort.
    order = chosen_NJ.flatten().argsort(stable=True)
    counts = chosen_NJ.flatten().bincount(minlength=sizes.count).tolist()
    out_NE = torch.zeros_like(x_NE)
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            tokens = pairs // sizes.per_token
            gate, up = functional.linear(x_NE[tokens], layer.gate_up[expert]).chunk(2, dim=-1)
            output = functional.linear(functional.silu(gate) * up, layer.down[expert])
            out_NE.index_add_(0, tokens, output * shares_NJ.flatten()[pairs, None])
    return out_NE, chosen_NJ
