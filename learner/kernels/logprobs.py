"""Log-probs and entropies from hidden states and the output weight, without the logits of all tokens in memory.

Knows torch and a process group; of Megatron only that its data-parallel wrapper keeps a weight's gradient in
``main_grad``. Shape letters: T = tokens, H = hidden size, V = this rank's part of the vocabulary, C = columns of one
chunk of it, K = listed ids of each token, J = 1 + K: the target and the listed ids.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tidemill.learner.layout.parallel import Parallel, gather_parts
from tidemill.learner.layout.sizes import FUSED_CHUNKS, LOGITS_AT_ONCE


@torch.no_grad()
def logits_at(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    at_K: Tensor,
    ranks: Parallel,
    *,
    temperature: float | Tensor,
    scale: float = 1.0,
    cap: float = 0.0,
) -> Tensor:
    """Return the logits / temperature at the places ``at_K`` of the whole row, [K, V] float32, on all ranks of the row.

    Collective over the tensor- and context-parallel ranks, which have the same places. A temperature of 0 counts as 1.
    """
    local_K = at_K - ranks.cp_rank * len(hidden_CH)
    mine_K = (local_K >= 0) & (local_K < len(hidden_CH))
    at = local_K.clamp(0, len(hidden_CH) - 1)
    hidden_KH = torch.where(mine_K[:, None], hidden_CH[at], 0)
    divisor = temperature[at, None] if isinstance(temperature, Tensor) else temperature or 1.0
    logits_KV = _Bend(scale, cap).bent((hidden_KH @ weight_VH.t()).float()) / divisor
    if ranks.cp_size > 1:
        dist.all_reduce(logits_KV, group=ranks.cp_group)  # the ranks of other parts have 0 there
    return gather_parts(logits_KV.t(), ranks.tp_group).t() if ranks.tp_size > 1 else logits_KV


CHUNK_ELEMENTS = LOGITS_AT_ONCE
"""Number of logits in memory at once (32 MB in float32). A chunk has some columns for all tokens, so each row of the
weight's gradient comes from one chunk. Logits of one chunk are kept for the backward pass, others computed again.
"""


def log_probs_and_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    fused: bool = False,
    placeholder: bool = False,
    scale: float = 1.0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return ``log softmax(z / temperature)[target]`` and ``-sum p log p`` of the logits ``z = hidden @ weight.T``,
    both [T]. With ``scale`` and ``cap`` the logits are ``cap * tanh(scale * z / cap)``, or ``scale * z`` for cap 0.

    Both are differentiable, and float32 (float64 for float64). Matrix products are in the dtype of the inputs, as those
    of a linear layer; sums over chunks (the normaliser, the entropy, the gradient of the hidden states) are float32.
    Temperature 0 (greedy) leaves the logits unscaled, as the engines do. A tensor has the temperature of each token,
    [T], above 0: the hidden states are divided by it, in float32 at least, and rounded to their dtype.

    ``group``: the ranks with the other parts of the vocabulary, in order, equally long; None or a group of one = this
    rank has all. Its ranks have the same hidden states, and the gradients of these are summed over it here.

    ``fused``: between the products take the kernels of ``triton_kernels.py``, which have every dtype but
    float64, and no cap.

    Logits of one chunk (``CHUNK_ELEMENTS``; with ``fused`` ``FUSED_CHUNKS`` times as many) are kept for the backward
    pass. Of more, only the inputs and tensors of size T are kept, and the backward pass computes them again chunk by
    chunk (a fourth product beside the three of a linear layer). It adds the gradient of a weight that has ``main_grad``
    (Megatron's DistributedDataParallel) to that, in its dtype, and returns none for it. Megatron's hook adds the
    gradient of another use (the embedding of tied weights) as always.

    ``placeholder``: return a gradient without values instead of none, and tell Megatron's hook not to add it
    (``grad_added_to_main_grad``, as its own linear layers do). ``overlap_grad_reduce`` needs that for a weight that
    this rank uses nowhere else.
    Source: Milakov, Gimelshein 2018 (online normaliser); Shoeybi et al. 2019 (parallel cross entropy); dH/dz = -p (log
    p + H).
    """
    how = _How(fused, placeholder, scale, cap)
    log_probs_TJ, entropy_T = _log_probs(hidden_TH, weight_VH, targets_T[:, None], temperature, group, how)
    return log_probs_TJ[:, 0], entropy_T


def listed_log_probs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    listed_TK: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    fused: bool = False,
    placeholder: bool = False,
    scale: float = 1.0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return as ``log_probs_and_entropy``, and log-probs of the listed ids (twice or the target, too), [T, K]."""
    ids_TJ = torch.cat([targets_T[:, None], listed_TK], dim=1)
    how = _How(fused, placeholder, scale, cap)
    log_probs_TJ, entropy_T = _log_probs(hidden_TH, weight_VH, ids_TJ, temperature, group, how)
    return log_probs_TJ[:, 0], entropy_T, log_probs_TJ[:, 1:]


@torch.no_grad()
def most_probable(
    hidden_TH: Tensor, weight_VH: Tensor, count: int, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the ids of the ``count`` largest logits of each token, largest first, [T, K], the same on all ranks."""
    best_TK = torch.empty(
        len(hidden_TH), 0, dtype=torch.promote_types(weight_VH.dtype, torch.float32), device=hidden_TH.device
    )
    ids_TK = torch.empty(best_TK.shape, dtype=torch.int64, device=hidden_TH.device)
    for start, z_TC in _Logits(hidden_TH, weight_VH, _Bend(1.0)).chunks():
        found_TK, column_TK = z_TC.topk(min(count, z_TC.shape[1]), dim=1)
        best_TK, ids_TK = _largest(
            count, torch.cat([best_TK, found_TK], dim=1), torch.cat([ids_TK, column_TK + start], dim=1)
        )
    if group is None or dist.get_world_size(group) == 1:
        return ids_TK
    ids_TK += dist.get_rank(group) * len(weight_VH)
    return _largest(count, _side_by_side(best_TK, group), _side_by_side(ids_TK, group))[1]


def _largest(count: int, values_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest values of each token, largest first, and their ids."""
    found_TK, place_TK = values_TK.topk(min(count, values_TK.shape[1]), dim=1)
    return found_TK, ids_TK.gather(1, place_TK)


def _side_by_side(own_TK: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(own_TK) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own_TK.contiguous(), group=group)
    return torch.cat(parts, dim=1)


class _How(NamedTuple):
    fused: bool
    placeholder: bool
    scale: float
    cap: float


def _log_probs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    ids_TJ: Tensor,
    temperature: float | Tensor,
    group: dist.ProcessGroup | None,
    how: _How,
) -> tuple[Tensor, Tensor]:
    if isinstance(temperature, Tensor) and not how.cap:
        hidden_TH, temperature = (hidden_TH / temperature[:, None]).to(hidden_TH.dtype), 1.0
    if isinstance(temperature, Tensor):
        bend = _Bend(how.scale, how.cap, 1.0 / temperature[:, None])
    else:
        after = 1.0 if temperature == 0 else 1.0 / temperature
        bend = _Bend(how.scale, how.cap, after) if how.cap else _Bend(how.scale * after)
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    how = how._replace(fused=how.fused and weight_VH.dtype != torch.float64 and not how.cap)
    log_probs_TJ, entropy_T = _LogProbsAndEntropy.apply(hidden_TH, weight_VH, ids_TJ, bend, group, how)
    return log_probs_TJ, entropy_T


class _Bend(NamedTuple):
    """The logits from the products: ``scale * z``, or ``after * cap * tanh(scale * z / cap)``."""

    scale: float
    cap: float = 0.0
    after: float | Tensor = 1.0
    """Of all tokens, or of each, [T, 1]."""

    def bent(self, z_TC: Tensor) -> Tensor:
        """Return the logits, in place."""
        if self.cap:
            return z_TC.mul_(self.scale / self.cap).tanh_().mul_(self.after).mul_(self.cap)
        return z_TC if self.scale == 1 else z_TC.mul_(self.scale)

    def slope(self, logits_TC: Tensor) -> Tensor | None:
        """Return their derivative by the products; None = ``scale`` everywhere."""
        if not self.cap:
            return None
        return (logits_TC / self.after / self.cap).square_().neg_().add_(1.0).mul_(self.after).mul_(self.scale)


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        ids_TJ: Tensor,
        bend: _Bend,
        group: dist.ProcessGroup | None,
        how: _How,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs, [T, J], and entropies, [T]."""
        local_TJ, mine_TJ = _local_ids(ids_TJ, len(weight_VH), group)
        logits = _Logits(hidden_TH, weight_VH, bend, fused=how.fused)
        highest_T = torch.full(
            ids_TJ.shape[:1], torch.finfo(logits.dtype).min, dtype=logits.dtype, device=hidden_TH.device
        )
        sums = _Sums(highest_T, torch.zeros_like(highest_T), torch.zeros_like(highest_T))
        picked_TJ = torch.zeros(ids_TJ.shape, dtype=logits.dtype, device=hidden_TH.device)
        for start, z_TC in logits.chunks():
            if how.fused:
                _add_fused(sums, picked_TJ, z_TC, bend.scale, start, local_TJ)
                continue
            column_TJ, inside_TJ = _columns(local_TJ, mine_TJ, start, z_TC.shape[1])
            picked_TJ = torch.where(inside_TJ, z_TC.gather(1, column_TJ), picked_TJ)
            sums = _add(sums, z_TC, logits.spare(z_TC))
        highest_T, sum_T, moment_T = sums
        if group is not None:
            top_T = _all_reduced(highest_T.clone(), group, dist.ReduceOp.MAX)
            sum_T, moment_T = _relative(sum_T, moment_T, highest_T - top_T)
            highest_T = top_T
        picked_TJ = torch.where(mine_TJ, picked_TJ - highest_T[:, None], 0.0)
        *picked_JT, sum_T, moment_T = _all_reduced(
            torch.stack([*picked_TJ.unbind(1), sum_T, moment_T]), group, dist.ReduceOp.SUM
        )
        # log p = (z - m) - log Z and H = log Z - sum((z - m) e^(z - m)) / Z with Z = sum(e^(z - m)).
        log_sum_T = sum_T.log()
        entropy_T = log_sum_T - moment_T / sum_T
        ctx.save_for_backward(hidden_TH, weight_VH, local_TJ, mine_TJ, highest_T + log_sum_T, entropy_T, logits.kept)
        ctx.bend, ctx.group, ctx.how = bend, group, how
        return torch.stack([picked_T - log_sum_T for picked_T in picked_JT], dim=1), entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs_TJ: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states and weight; of one with ``main_grad`` None or a placeholder."""
        hidden_TH, weight_VH, local_TJ, mine_TJ, normalizer_T, entropy_T, kept_TV = ctx.saved_tensors
        logits = _Logits(hidden_TH, weight_VH, ctx.bend, kept_TV, fused=ctx.how.fused)
        totals = _Gradients(hidden_TH, weight_VH, in_one_chunk=kept_TV is not None, frozen=not ctx.needs_input_grad[1])
        with_entropy = bool((grad_entropy_T != 0).any())  # without an entropy bonus its term costs nothing
        saved = _Given(
            ids_TJ=local_TJ,
            mine_TJ=mine_TJ,
            normalizer_T=normalizer_T,
            entropy_T=entropy_T,
            grad_log_probs_TJ=grad_log_probs_TJ,
            grad_entropy_T=grad_entropy_T if with_entropy else None,
        )
        for start, z_TC in logits.chunks():
            grad_TC = (
                _fused_gradient(saved, start, z_TC, logits) if ctx.how.fused else _gradient(saved, start, z_TC, logits)
            )
            totals.add(start, grad_TC.to(weight_VH.dtype))
        grad_TH = _all_reduced(totals.hidden_TH, ctx.group, dist.ReduceOp.SUM).to(hidden_TH.dtype)
        return grad_TH, totals.of_weight(placeholder=ctx.how.placeholder), None, None, None, None


class _Sums(NamedTuple):
    """Sums over the logits so far, [T]: highest m, sum(e^(z - m)), and for the entropy sum((z - m) e^(z - m))."""

    highest_T: Tensor
    sum_T: Tensor
    moment_T: Tensor


def _add(sums: _Sums, z_TC: Tensor, spare_TC: Tensor) -> _Sums:
    """Add a chunk, which is overwritten."""
    top_T = torch.maximum(sums.highest_T, z_TC.amax(1))
    sum_T, moment_T = _relative(sums.sum_T, sums.moment_T, sums.highest_T - top_T)
    z_TC -= top_T[:, None]  # the largest logit becomes 0, so that no exponential overflows
    p_TC = torch.exp(z_TC, out=spare_TC)
    return _Sums(top_T, sum_T + p_TC.sum(1), moment_T + p_TC.mul_(z_TC).sum(1))


def _add_fused(sums: _Sums, picked_TJ: Tensor, z_TC: Tensor, scale: float, start: int, local_TJ: Tensor) -> None:
    """Add an unscaled chunk in place, and write its logits of the ids, scaled, into ``picked_TJ``."""
    from tidemill.learner.kernels.triton_kernels import add_statistics

    add_statistics(z_TC, scale, *sums, start=start, ids_TJ=local_TJ, picked_TJ=picked_TJ)


class _Given(NamedTuple):
    """Inputs of the gradient of the logits, beside the logits."""

    ids_TJ: Tensor  # columns of this rank's part of the vocabulary
    mine_TJ: Tensor  # mask of the ids that are in it
    normalizer_T: Tensor
    entropy_T: Tensor
    grad_log_probs_TJ: Tensor
    grad_entropy_T: Tensor | None  # 0 for all tokens if None


def _gradient(saved: _Given, start: int, z_TC: Tensor, logits: "_Logits") -> Tensor:
    """Return the gradient: sum_J g (1[id] - p) - h p (log p + H), g = that by the log-probs, h = by the entropy."""
    column_TJ, inside_TJ = _columns(saved.ids_TJ, saved.mine_TJ, start, z_TC.shape[1])
    slope_TC = logits.bend.slope(z_TC)
    grad_T1 = saved.grad_log_probs_TJ.sum(1, keepdim=True)
    log_p_TC = z_TC.sub_(saved.normalizer_T[:, None])
    if saved.grad_entropy_T is not None:
        p_TC = torch.exp(log_p_TC, out=logits.spare(z_TC))
        grad_TC = log_p_TC.add_(saved.entropy_T[:, None]).mul_(-saved.grad_entropy_T[:, None]).sub_(grad_T1).mul_(p_TC)
    else:
        grad_TC = log_p_TC.exp_().mul_(-grad_T1)
    grad_TC.scatter_add_(1, column_TJ, torch.where(inside_TJ, saved.grad_log_probs_TJ, 0.0))
    if slope_TC is not None:
        return grad_TC.mul_(slope_TC)
    return logits.bend.bent(grad_TC)


def _fused_gradient(saved: _Given, start: int, z_TC: Tensor, logits: "_Logits") -> Tensor:
    from tidemill.learner.kernels.triton_kernels import logits_gradient

    out_TC = torch.empty_like(z_TC) if logits.kept is not None else z_TC
    logits_gradient(
        z_TC,
        out_TC,
        logits.bend.scale,
        start=start,
        ids_TJ=saved.ids_TJ,
        normalizer_T=saved.normalizer_T,
        entropy_T=saved.entropy_T,
        grad_log_probs_TJ=saved.grad_log_probs_TJ,
        grad_entropy_T=saved.grad_entropy_T,
    )
    return out_TC


class _Logits:
    """Logits in chunks of columns, all in the same memory: a chunk is valid until the next one."""

    def __init__(
        self, hidden_TH: Tensor, weight_VH: Tensor, bend: _Bend, kept_TV: Tensor | None = None, *, fused: bool = False
    ) -> None:
        """``kept_TV``: products that were kept. ``fused``: chunks are unscaled, in the dtype of the weight."""
        self._hidden_TH, self._weight_VH, self.bend, self._fused = hidden_TH, weight_VH, bend, fused
        self.dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        self._width = max(1, CHUNK_ELEMENTS * (FUSED_CHUNKS if fused else 1) // max(1, len(hidden_TH)))
        self.kept = kept_TV
        """The unscaled logits, [T, V], where they are one chunk and ``chunks`` has computed them."""
        self._memory: dict[str, Tensor] = {}

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first column, logits [T, C]), which may be overwritten unless they are ``kept`` and ``fused``."""
        if self.kept is None and len(self._weight_VH) <= self._width:
            self.kept = self._hidden_TH @ self._weight_VH.t()
        if self.kept is not None:
            yield 0, self.kept if self._fused else self.bend.bent(self.kept.to(self.dtype, copy=True))
            return
        for start in range(0, len(self._weight_VH), self._width):
            weight_CH = self._weight_VH[start : start + self._width]
            product_TC = torch.mm(
                self._hidden_TH, weight_CH.t(), out=self._part("product", len(weight_CH), weight_CH.dtype)
            )
            if self._fused:
                yield start, product_TC
                continue
            if weight_CH.dtype != self.dtype:
                product_TC = self._part("logits", len(weight_CH), self.dtype).copy_(product_TC)
            yield start, self.bend.bent(product_TC)

    def spare(self, z_TC: Tensor) -> Tensor:
        return self._part("spare", z_TC.shape[1], self.dtype)

    def _part(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        # Memory of these sizes is unmapped when it is freed, and mapping it again for each chunk would cost more than
        # the arithmetic in it.
        num_tokens = len(self._hidden_TH)
        if name not in self._memory:
            widest = min(self._width, len(self._weight_VH))
            self._memory[name] = torch.empty(num_tokens * widest, dtype=dtype, device=self._hidden_TH.device)
        return self._memory[name][: num_tokens * width].view(num_tokens, width)


class _Gradients:
    """Gradients of hidden states and weight, from the gradients of the logits chunk by chunk."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, *, in_one_chunk: bool, frozen: bool) -> None:
        """``frozen``: the weight needs no gradient; ``weight_VH`` is None then."""
        self._hidden_TH, self._weight_VH, self._in_one_chunk, self._frozen = hidden_TH, weight_VH, in_one_chunk, frozen
        self.weight_VH: Tensor | None = None
        self.in_main_grad = not frozen and not in_one_chunk and getattr(weight_VH, "main_grad", None) is not None
        """True if ``weight_VH`` is the weight's ``main_grad``."""
        if not in_one_chunk:
            self.hidden_TH = torch.zeros_like(hidden_TH, dtype=torch.promote_types(hidden_TH.dtype, torch.float32))
            if not frozen:
                self.weight_VH = weight_VH.main_grad if self.in_main_grad else torch.empty_like(weight_VH)  # type: ignore[attr-defined]

    def of_weight(self, *, placeholder: bool) -> Tensor | None:
        """Return the gradient of the weight for autograd: none or a placeholder where it was added to ``main_grad``."""
        if placeholder and not self._frozen:  # each time: another micro-batch may have left the mark
            self._weight_VH.grad_added_to_main_grad = self.in_main_grad  # type: ignore[attr-defined]
        if self.in_main_grad:
            return torch.empty_like(self._weight_VH) if placeholder else None
        return self.weight_VH

    def add(self, start: int, grad_TC: Tensor) -> None:
        if self._in_one_chunk:
            self.hidden_TH = grad_TC @ self._weight_VH
            self.weight_VH = None if self._frozen else grad_TC.t() @ self._hidden_TH
            return
        rows = slice(start, start + grad_TC.shape[1])
        _add_product(self.hidden_TH, grad_TC, self._weight_VH[rows])
        if self.weight_VH is None:
            return
        if self.in_main_grad:
            _add_product(self.weight_VH[rows], grad_TC.t(), self._hidden_TH)
        else:
            torch.mm(grad_TC.t(), self._hidden_TH, out=self.weight_VH[rows])


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add ``first @ second`` to ``total``, which may have a wider dtype."""
    if total.dtype == first.dtype:
        total.addmm_(first, second)
    else:
        total += first @ second


def _local_ids(ids_TJ: Tensor, num_local: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the ids as columns of this rank's part, and a mask of the ids that are in it."""
    local_TJ = ids_TJ - (0 if group is None else dist.get_rank(group) * num_local)
    return local_TJ, (local_TJ >= 0) & (local_TJ < num_local)


def _columns(local_TJ: Tensor, mine_TJ: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the ids as columns of the chunk at ``start`` (any column for others), and a mask of those in it."""
    column_TJ = local_TJ - start
    return column_TJ.clamp(0, width - 1), mine_TJ & (column_TJ >= 0) & (column_TJ < width)


def _relative(sum_T: Tensor, moment_T: Tensor, drop_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum and moment relative to a new m: ``drop`` = old m - new m."""
    factor_T = drop_T.exp()
    return sum_T * factor_T, (moment_T + drop_T * sum_T) * factor_T


def _all_reduced(values: Tensor, group: dist.ProcessGroup | None, operation: Any) -> Tensor:
    if group is not None:
        dist.all_reduce(values, operation, group=group)
    return values
