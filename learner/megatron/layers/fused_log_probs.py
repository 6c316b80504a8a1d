"""Two kernels over a chunk of logits, in Triton: the sums behind log-probs and entropies, and the gradient of the
logits.

Each reads a chunk once and keeps nothing of its size, where the same formulas in torch's operations take a dozen passes
(``learner/megatron/logprobs.py`` has both, and the formulas). A row of the chunk belongs to one program, so the results
are the same bits each time. Import this module only where Triton is installed; ``layers/kernels.py`` decides.

Shape letters: T = tokens, C = columns of the chunk, J = listed ids of each token.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Columns at a time."""
WARPS = 8


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
    """Add a chunk's logits z, times ``scale``, to ``m = max z``, ``sum e^(z - m)`` and ``sum (z - m) e^(z - m)``, all
    float32, in place.

    z of those ids (int64) that are in the chunk, whose first column is ``start``, is written into ``picked_TJ``,
    float32.
    Source: Milakov, Gimelshein 2018 (online normaliser).
    """
    num_tokens, width = logits_TC.shape
    assert logits_TC.is_contiguous() and ids_TJ.is_contiguous() and picked_TJ.is_contiguous()
    _add_statistics[(num_tokens,)](
        logits_TC,
        highest_T,
        sum_T,
        moment_T,
        ids_TJ,
        picked_TJ,
        width,
        start,
        ids_TJ.shape[1],
        scale,
        BLOCK=BLOCK,
        num_warps=WARPS,
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

    ``start``: the id of the first column. ``ids_TJ``: those of the picked log-probs, int64; ids outside of the chunk
    count as none.
    ``grad_entropy_T``: None = all 0.
    """
    num_tokens, width = logits_TC.shape
    assert logits_TC.is_contiguous() and out_TC.is_contiguous() and ids_TJ.is_contiguous()
    grad_TJ = grad_log_probs_TJ.contiguous()
    _logits_gradient[(num_tokens, triton.cdiv(width, BLOCK))](
        logits_TC,
        out_TC,
        ids_TJ,
        grad_TJ,
        grad_TJ.sum(1),
        normalizer_T,
        entropy_T,
        entropy_T if grad_entropy_T is None else grad_entropy_T.contiguous(),
        width,
        start,
        ids_TJ.shape[1],
        scale,
        WITH_ENTROPY=grad_entropy_T is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@triton.jit  # type: ignore[misc]
def _add_statistics(  # type: ignore[no-untyped-def]
    logits, highest, sums, moments, ids, picked, width, start, num_ids, scale, BLOCK: tl.constexpr
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
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
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
