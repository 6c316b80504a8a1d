"""Kernels in Triton: sums over logits and their gradient, RMSNorm of the heads of queries and keys, rotary positions.

Each reads its input once, where torch's operations take a dozen passes. A row belongs to one program, and parts of a
sum are added up in a fixed order, so the results are the same bits each time. Import this module only where Triton is
installed; ``choices.py`` decides.
Shape letters: T = tokens, C = columns of a chunk of logits, J = listed ids of each token, n = heads, d = head size,
F = rotated pairs of a head.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, empty, float32
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from triton.language import constexpr

_CHUNK = {"BLOCK": 2048, "num_warps": 8}  # columns of logits that a program takes at a time, and its warps


def add_statistics(
    logits_TC: Tensor,
    scale: float,
    highest_T: Tensor,
    sum_T: Tensor,
    moment_T: Tensor,
    *,
    start: int,
    ids_TJ: Tensor,
    picked_TJ: Tensor,
) -> None:
    """Add a chunk's logits z, times ``scale``, to ``m = max z``, ``sum e^(z - m)``, ``sum (z - m) e^(z - m)``.

    All are float32, and changed in place. z of the ids in the chunk, whose first column is ``start``, is written into
    ``picked_TJ``. Source: Milakov, Gimelshein 2018 (online normaliser).
    """
    num_tokens, width = logits_TC.shape
    assert logits_TC.is_contiguous() and ids_TJ.is_contiguous() and picked_TJ.is_contiguous()
    _add_statistics[(num_tokens,)](
        logits_TC, highest_T, sum_T, moment_T, ids_TJ, picked_TJ, width, start, ids_TJ.shape[1], scale, **_CHUNK
    )


def logits_gradient(
    logits_TC: Tensor,
    out_TC: Tensor,
    scale: float,
    *,
    start: int,
    ids_TJ: Tensor,
    normalizer_T: Tensor,
    entropy_T: Tensor,
    grad_log_probs_TJ: Tensor,
    grad_entropy_T: Tensor | None,
) -> None:
    """Write the gradient by the logits into ``out_TC``, which may be ``logits_TC``.

    ``start``: id of the first column; ids outside of the chunk count as none. ``grad_entropy_T``: None = all 0.
    """
    num_tokens, width = logits_TC.shape
    assert logits_TC.is_contiguous() and out_TC.is_contiguous() and ids_TJ.is_contiguous()
    grad_TJ = grad_log_probs_TJ.contiguous()
    with_entropy = grad_entropy_T is not None
    # Without an entropy gradient any pointer will do: the kernel does not read it.
    grad_entropy_T = entropy_T if grad_entropy_T is None else grad_entropy_T.contiguous()
    tensors = (logits_TC, out_TC, ids_TJ, grad_TJ, grad_TJ.sum(1), normalizer_T, entropy_T, grad_entropy_T)
    _logits_gradient[(num_tokens, triton.cdiv(width, _CHUNK["BLOCK"]))](
        *tensors, width, start, ids_TJ.shape[1], scale, WITH_ENTROPY=with_entropy, **_CHUNK
    )


@triton.jit  # type: ignore[misc]
def _add_statistics(  # type: ignore[no-untyped-def]
    logits, highest, sums, moments, ids, picked, width, start, num_ids, scale, BLOCK: constexpr
):
    row = tl.program_id(0).to(tl.int64)
    top, total, moment = tl.load(highest + row), tl.load(sums + row), tl.load(moments + row)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        z = tl.load(logits + row * width + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        higher = tl.maximum(top, tl.max(z, 0))
        drop = top - higher
        shrink = tl.exp(drop)
        below = z - higher
        p = tl.exp(below)
        moment = (moment + drop * total) * shrink + tl.sum(tl.where(inside, p * below, 0.0), 0)
        total = total * shrink + tl.sum(p, 0)
        top = higher
    tl.store(highest + row, top)
    tl.store(sums + row, total)
    tl.store(moments + row, moment)
    for place in range(num_ids):
        here = tl.load(ids + row * num_ids + place) - start
        inside = (here >= 0) & (here < width)
        z = tl.load(logits + row * width + here, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(picked + row * num_ids + place, z, mask=inside)


@triton.jit  # type: ignore[misc]
def _logits_gradient(  # type: ignore[no-untyped-def]
    logits,
    out,
    ids,
    grads,
    grad_sums,
    normalizers,
    entropies,
    grad_entropies,
    width,
    start,
    num_ids,
    scale,
    WITH_ENTROPY: constexpr,
    BLOCK: constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    z = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32) * scale
    log_p = z - tl.load(normalizers + row)
    weight = tl.load(grad_sums + row)
    if WITH_ENTROPY:
        weight = weight + tl.load(grad_entropies + row) * (log_p + tl.load(entropies + row))
    gradient = -tl.exp(log_p) * weight
    for place in range(num_ids):
        here = tl.load(ids + row * num_ids + place) - start
        gradient += tl.where(column == here, tl.load(grads + row * num_ids + place), 0.0)
    tl.store(out + row * width + column, (gradient * scale).to(out.dtype.element_ty), mask=inside)


TILE = 2048  # elements of a program's tile at a time
PARTS = 512
"""Programs of the norm's backward pass, each with a part of the weight's gradient: four a multiprocessor of an H100."""


def rotated(q: Tensor, k: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate the first ``2 F`` elements of each head of q and k, [T, n, d] each, by the angles of cosines and sines.

    ``interleaved``: a pair is two neighbours; else its elements are ``F`` apart. Computed in float32 and rounded once.
    Source: Su et al. 2021 (RoFormer), equation 34.
    """
    rotated_pair: tuple[Tensor, Tensor] = _Rotated.apply(q, k, cos_TF, sin_TF, interleaved)
    return rotated_pair


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, as ``rms_norm``, rounded once."""
    normed: Tensor = _HeadNorm.apply(x.flatten(0, -3), weight, eps)
    return normed.view(x.shape)


class _Rotated(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos_TF: Tensor, sin_TF: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_TF, sin_TF)
        ctx.interleaved = interleaved
        return _turn(q, k, cos_TF, sin_TF, 1.0, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        cos_TF, sin_TF = ctx.saved_tensors
        return *_turn(grad_q, grad_k, cos_TF, sin_TF, -1.0, ctx.interleaved), None, None, None


def _turn(
    q: Tensor, k: Tensor, cos_TF: Tensor, sin_TF: Tensor, sign: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    q, k = _dense(q), _dense(k)
    out_q, out_k = (empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    heads, size = max(q.shape[1], k.shape[1]), q.shape[2]
    sizes, strides = (q.shape[1], k.shape[1], size, cos_TF.shape[1]), (*q.stride()[:2], *k.stride()[:2])
    tile = {"PAIRED": interleaved, "HEADS": triton.next_power_of_2(heads), "SIZE": triton.next_power_of_2(size)}
    warps = 4 if heads <= 16 else 8
    _rotate[(len(q), 2)](q, k, out_q, out_k, cos_TF, sin_TF, *sizes, *strides, sign, **tile, num_warps=warps)
    return out_q, out_k


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _HeadNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _dense(x)
        tokens, heads, size = x.shape
        out = empty(x.shape, dtype=x.dtype, device=x.device)
        scales = empty(tokens * heads, dtype=float32, device=x.device)
        rows, width = _tile(size)
        sizes, tile = (tokens * heads, heads, size, *x.stride()[:2]), {"ROWS": rows, "SIZE": width, "num_warps": 4}
        _norm[(triton.cdiv(tokens * heads, rows),)](x, weight, out, scales, *sizes, eps, **tile)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        grad = grad.contiguous()
        tokens, heads, size = x.shape
        grad_x = empty(x.shape, dtype=x.dtype, device=x.device)
        rows, width = _tile(size)
        parts = min(PARTS, triton.cdiv(tokens * heads, rows))
        grad_weight = empty(parts, size, dtype=float32, device=x.device)
        sizes, tile = (tokens * heads, heads, size, *x.stride()[:2]), {"ROWS": rows, "SIZE": width, "num_warps": 4}
        tiles = triton.cdiv(triton.cdiv(tokens * heads, rows), parts)
        _norm_gradient[(parts,)](x, weight, scales, grad, grad_x, grad_weight, *sizes, tiles, **tile)
        return grad_x, grad_weight.sum(0).to(weight.dtype), None


def _tile(size: int) -> tuple[int, int]:
    width = triton.next_power_of_2(size)
    return max(1, TILE // width), width


@triton.jit  # type: ignore[misc]
def _rotate(  # type: ignore[no-untyped-def]
    q,
    k,
    out_q,
    out_k,
    cosines,
    sines,
    q_heads,
    k_heads,
    size,
    pairs,
    q_token,
    q_head,
    k_token,
    k_head,
    sign,
    PAIRED: constexpr,
    HEADS: constexpr,
    SIZE: constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cosines, sines = cosines + token * pairs, sines + token * pairs
    # One launch for both: a small model waits for the host's launches, not for the kernels (docs/decisions/047).
    if tl.program_id(1) == 0:
        from_q, to_q = q + token * q_token, out_q + token * q_heads * size
        _rotate_heads(from_q, to_q, q_head, q_heads, size, cosines, sines, pairs, sign, PAIRED, HEADS, SIZE)
    else:
        from_k, to_k = k + token * k_token, out_k + token * k_heads * size
        _rotate_heads(from_k, to_k, k_head, k_heads, size, cosines, sines, pairs, sign, PAIRED, HEADS, SIZE)


@triton.jit  # type: ignore[misc]
def _rotate_heads(  # type: ignore[no-untyped-def]
    x, out, stride, heads, size, cosines, sines, pairs, sign, PAIRED: constexpr, HEADS: constexpr, SIZE: constexpr
):
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside, turns = (head < heads) & (column < size), column < 2 * pairs
    if PAIRED:
        is_first, partner, angle = column % 2 == 0, column ^ 1, column // 2
    else:
        is_first = column < pairs
        partner, angle = tl.where(is_first, column + pairs, column - pairs), tl.where(is_first, column, column - pairs)
    own = tl.load(x + head * stride + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + head * stride + partner, mask=inside & turns, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + angle, mask=turns, other=1.0)
    sine = tl.load(sines + angle, mask=turns, other=0.0) * tl.where(is_first, -sign, sign)
    tl.store(out + head * size + column, (own * cosine + other * sine).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[misc]
def _norm(  # type: ignore[no-untyped-def]
    x, weights, out, scales, num_rows, heads, size, token_stride, head_stride, eps, ROWS: constexpr, SIZE: constexpr
):
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)[None, :]
    inside = (row < num_rows)[:, None] & (column < size)
    start = (row // heads) * token_stride + (row % heads) * head_stride
    value = tl.load(x + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / size + eps)
    weight = tl.load(weights + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(scales + row, scale, mask=row < num_rows)
    tl.store(
        out + row[:, None] * size + column, (value * scale[:, None] * weight).to(out.dtype.element_ty), mask=inside
    )


@triton.jit  # type: ignore[misc]
def _norm_gradient(  # type: ignore[no-untyped-def]
    x,
    weights,
    scales,
    grad,
    grad_x,
    grad_weight,
    num_rows,
    heads,
    size,
    token_stride,
    head_stride,
    tiles,
    ROWS: constexpr,
    SIZE: constexpr,
):
    """Gradients of rows ``x s w``, s = 1 / sqrt(mean(x^2) + eps): dx = s (w g - x s mean(w g x s)), dw = sum g x s."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)[None, :]
    weight = tl.load(weights + column, mask=column < size, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for tile in range(tiles):
        row = (part * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < size)
        start = (row // heads) * token_stride + (row % heads) * head_stride
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)[:, None]
        normed = tl.load(x + start[:, None] + column, mask=inside, other=0.0).to(tl.float32) * scale
        incoming = tl.load(grad + row[:, None] * size + column, mask=inside, other=0.0).to(tl.float32)
        weighted = incoming * weight
        mean = tl.sum(weighted * normed, 1)[:, None] / size
        gradient = scale * (weighted - normed * mean)
        tl.store(grad_x + row[:, None] * size + column, gradient.to(grad_x.dtype.element_ty), mask=inside)
        total += incoming * normed
    tl.store(grad_weight + part * size + tl.arange(0, SIZE), tl.sum(total, 0), mask=tl.arange(0, SIZE) < size)
