"""Diagnostics of a step: mismatch, staleness, clipping, rejection, rewards. Pure functions of tensors.

Everything is returned as *sums* (numerators and denominators separately), so that adding them over micro-batches and
ranks and dividing once at the end is exact; a mean of means would not be. All statistics are of the trainable tokens
before any rejection. Names, units and healthy ranges: ``docs/metrics.md``. Source of the set: verl, slime, NeMo-RL,
prime-rl, AReaL; the entropy gap is our own. Shape letters: T = tokens of a micro-batch, M = trainable tokens in it, B =
buckets, N = samples of the step on all ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learner.algorithms.aggregation import TokenLoss
from tidemill.learner.algorithms.tokens import DELTA_BOUND, Tokens, log_ratio

MAX_LAG_BUCKETS = 16
"""Lags of this many steps or more share the bucket ``over``."""
OWN = "custom/"
"""Beginning of the names of metrics that a loss by import path reports."""
POSITIONS = (0, 1, 4, 16, 64, 256, 1024, 4096)
"""Lower edges of the buckets by position in the response (tokens)."""
PROBABILITIES = (0.0, 1e-3, 0.1, 0.9, 0.99)
"""Lower edges of the buckets by mu's probability."""
UNCERTAIN = 0.3
"""Least entropy (nats) of a token that takes part in the entropy gap. Where the policy is nearly certain, the variance
of the gap comes from tokens too rare to be in the sample, and its standard error is not meaningful.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Additive parts (float64 tensors of any shape) and maxima (float64 scalars) under fixed names."""

    totals: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]

    def to(self, device: torch.device | str) -> "Sums":
        """Return the sums on another device."""
        totals, maxima = (
            {name: value.to(device) for name, value in values.items()} for values in (self.totals, self.maxima)
        )
        return Sums(totals=totals, maxima=maxima)


def merged(parts: Iterable[Sums]) -> Sums:
    """Return the sums over several micro-batches: at least one, all with the same names."""
    first, *rest = parts
    totals, maxima = dict(first.totals), dict(first.maxima)
    for part in rest:
        if part.totals.keys() != totals.keys():
            raise ValueError(
                "loss: want the same metrics from every row, got "
                f"{sorted(part.totals.keys() ^ totals.keys())} from some only"
            )
        totals = {name: value + part.totals[name] for name, value in totals.items()}
        maxima = {name: torch.maximum(value, part.maxima[name]) for name, value in maxima.items()}
    return Sums(totals=totals, maxima=maxima)


def all_reduced(sums: Sums, group: dist.ProcessGroup | None) -> Sums:
    """Return the sums over the ranks of ``group`` (None = this rank alone), in two all-reduces."""
    if group is None or dist.get_world_size(group) == 1:
        return sums
    return Sums(
        totals=_reduce_flat(sums.totals, group, dist.ReduceOp.SUM),
        maxima=_reduce_flat(sums.maxima, group, dist.ReduceOp.MAX),
    )


def _reduce_flat(values: Mapping[str, Tensor], group: dist.ProcessGroup, operation: object) -> dict[str, Tensor]:
    # Every rank joins the values in the same order, whatever order its own rows had.
    names = sorted(values)
    flat = torch.cat([values[name].reshape(-1) for name in names])
    dist.all_reduce(flat, operation, group=group)
    pieces = flat.split([values[name].numel() for name in names])
    return {name: piece.view(values[name].shape) for name, piece in zip(names, pieces, strict=True)}


def num_lag_buckets(max_lag: int) -> int:
    """Return the number of buckets: 0 .. max_lag (at most 16 of them) and ``over``."""
    return min(max_lag + 1, MAX_LAG_BUCKETS) + 1


@dataclass(frozen=True, slots=True)
class _Trainable:
    """Trainable tokens of a micro-batch, [M], float64; ``w = e^d`` is of the policy that the update starts from."""

    at_M: Tensor
    """Their places in the row."""
    pi_M: Tensor
    mu_M: Tensor
    log_pi_M: Tensor
    log_mu_M: Tensor
    log_theta_M: Tensor
    delta_M: Tensor
    w_M: Tensor
    k3_M: Tensor
    entropy_M: Tensor
    lag_M: Tensor
    sequence_M: Tensor

    @classmethod
    def of(cls, tokens: Tokens, log_probs_T: Tensor, entropy_T: Tensor) -> "_Trainable":
        """Gather the trainable tokens of a row."""
        at_M = tokens.mask_T.nonzero()[:, 0]
        start_T = log_probs_T if tokens.old_T is None else tokens.old_T
        delta_M = log_ratio(start_T, tokens.rollout_T, tokens.mask_T)[at_M].double()
        log_pi_M, log_mu_M, w_M = start_T[at_M].double(), tokens.rollout_T[at_M].double(), delta_M.exp()
        return cls(
            at_M=at_M,
            pi_M=log_pi_M.exp(),
            mu_M=log_mu_M.exp(),
            log_pi_M=log_pi_M,
            log_mu_M=log_mu_M,
            log_theta_M=log_probs_T[at_M].double(),
            delta_M=delta_M,
            w_M=w_M,
            k3_M=w_M - 1 - delta_M,
            entropy_M=entropy_T[at_M].double(),
            lag_M=tokens.lag_T[at_M],
            sequence_M=tokens.by_sequence[0][at_M],
        )


@torch.no_grad()
def token_sums(
    tokens: Tokens, *, log_probs_T: Tensor, entropy_T: Tensor, position_T: Tensor, loss: TokenLoss, lag_buckets: int
) -> Sums:
    """Return the sums over the trainable tokens of one micro-batch; masked tokens enter none of them.

    ``position_T``: index of the token in its response region, from 0. No sequence may be split over micro-batches:
    statistics of "samples" are by sequence, which is the unit of ratios.
    """
    row, num_sequences = _Trainable.of(tokens, log_probs_T, entropy_T), tokens.by_sequence[1]
    ones_M, abs_M = torch.ones_like(row.w_M), row.delta_M.abs()
    counts_N = torch.zeros(num_sequences, dtype=torch.float64, device=abs_M.device).index_add(0, row.sequence_M, ones_M)
    oldest_N = row.lag_M.new_zeros(num_sequences).scatter_reduce(0, row.sequence_M, row.lag_M, "amax")
    # Samples that are not in this row keep the two initial values; ``_sample_sums`` leaves them out.
    newest_N = row.lag_M.new_full((num_sequences,), torch.iinfo(row.lag_M.dtype).max)
    newest_N = newest_N.scatter_reduce(0, row.sequence_M, row.lag_M, "amin")
    # Of the trained policy: in later minibatches it is no longer the policy that the update starts from.
    now_M = log_ratio(log_probs_T, tokens.rollout_T, tokens.mask_T)[row.at_M].double().exp()
    columns = {
        **_mismatch(row),
        **_surprise(row, now_M),
        **_fresh(row, (oldest_N[row.sequence_M] == 0).double()),
        **_trust_region(row, loss, tokens.advantages_T[row.at_M]),
        **_rejections(loss, row.at_M),
        **({} if loss.left_out_T is None else {"left_out": loss.left_out_T[row.at_M].double()}),
        **_weighting(loss, row.at_M),
        **{f"{OWN}{name}": value_T.detach()[row.at_M].double() for name, value_T in loss.metrics.items()},
    }
    # One reduction for all columns: there are more than thirty.
    totals = dict(zip(columns, torch.stack(list(columns.values())).sum(-1), strict=True))
    coupled_MC = torch.stack([ones_M, abs_M, row.delta_M, row.k3_M, row.w_M], -1)
    totals |= {
        "by_lag_BC": _by(row.lag_M.clamp(max=lag_buckets - 1).long(), coupled_MC, lag_buckets),
        "by_position_BC": _by(_bucket(position_T[row.at_M], POSITIONS), coupled_MC, len(POSITIONS)),
        "by_probability_BC": _by(_bucket(row.mu_M, PROBABILITIES), coupled_MC, len(PROBABILITIES)),
    }
    samples, longest = _sample_sums(
        row, counts_N, oldest_N - newest_N, loss.rejected_T[row.at_M] if loss.rejected else None
    )
    gap_p_M = (row.pi_M - row.mu_M).abs()
    maxima = {"abs_delta": _largest(abs_M), "lag": _largest(row.lag_M), "prob_diff": _largest(gap_p_M), "span": longest}
    return Sums(totals=totals | samples, maxima=maxima)


def _mismatch(row: _Trainable) -> dict[str, Tensor]:
    """Columns that compare pi with mu, token by token."""
    pi_M, mu_M, w_M, abs_M = row.pi_M, row.mu_M, row.w_M, row.delta_M.abs()
    gap_p_M, middle_M = (pi_M - mu_M).abs(), (pi_M + mu_M) / 2
    # Jensen-Shannon divergence (KL(mu || m) + KL(pi || m)) / 2 with m = (pi + mu) / 2, each KL by the k3 estimator. The
    # tokens are those of mu, so the second one is weighted by pi / mu.
    to_middle_M, from_middle_M = (middle_M / mu_M).log(), (middle_M / pi_M).log()
    return {
        "tokens": torch.ones_like(w_M),
        "delta": row.delta_M,
        "abs_delta": abs_M,
        "k2": row.delta_M.square() / 2,
        "k3": row.k3_M,
        "w": w_M,
        "w_squared": w_M.square(),
        "prob_error": abs_M.exp(),
        "prob_diff": gap_p_M,
        "prob_diff_squared": gap_p_M.square(),
        "js": (to_middle_M.exp() - 1 - to_middle_M + w_M * (from_middle_M.exp() - 1 - from_middle_M)) / 2,
        "pi": pi_M,
        "mu": mu_M,
        "pi_squared": pi_M.square(),
        "mu_squared": mu_M.square(),
        "pi_mu": pi_M * mu_M,
        "lag": row.lag_M.double(),
    }


def _surprise(row: _Trainable, now_M: Tensor) -> dict[str, Tensor]:
    """Entropy, and how far the tokens drawn are from it. ``now_M``: pi_theta / mu."""
    unsure_M = (row.entropy_M >= UNCERTAIN).double()
    # The mean of H + log pi is 0 under pi; the factor pi / mu makes it 0 under mu, for data of any age
    # (docs/decisions/007-the-entropy-gap-is-weighted.md).
    surprise_M = now_M * (row.entropy_M + row.log_theta_M) * unsure_M
    return {"entropy": row.entropy_M, "unsure": unsure_M, "gap": surprise_M, "gap_squared": surprise_M.square()}


def _fresh(row: _Trainable, fresh_M: Tensor) -> dict[str, Tensor]:
    """Mismatch of samples without a token older than the policy: only the engines' numerics are in it."""
    abs_M = row.delta_M.abs()
    return {
        "fresh": fresh_M,
        "fresh_abs_delta": fresh_M * abs_M,
        "fresh_k3": fresh_M * row.k3_M,
        "fresh_prob_error": fresh_M * abs_M.exp(),
    }


def _trust_region(row: _Trainable, loss: TokenLoss, advantages_M: Tensor) -> dict[str, Tensor]:
    clipped_M, up_M, down_M = (
        loss.clipped_T[row.at_M].double(),
        (advantages_M > 0).double(),
        (advantages_M < 0).double(),
    )
    return {
        "clipped": clipped_M,
        "up": up_M,
        "down": down_M,
        "clipped_up": clipped_M * up_M,
        "clipped_down": clipped_M * down_M,
        "moved": row.log_pi_M - row.log_theta_M,
    }


def _weighting(loss: TokenLoss, at_M: Tensor) -> dict[str, Tensor]:
    if loss.weights is None:
        return {}
    return {
        "weight": loss.weights.weight_T[at_M].double(),
        "too_high": loss.weights.too_high_T[at_M].double(),
        "too_low": loss.weights.too_low_T[at_M].double(),
    }


def _rejections(loss: TokenLoss, at_M: Tensor) -> dict[str, Tensor]:
    if not loss.rejected:
        return {}
    by_rule = {f"rejected/{rule}": rejected_T[at_M].double() for rule, rejected_T in loss.rejected.items()}
    return {"rejected": loss.rejected_T[at_M].double(), **by_rule}


def _bucket(values_M: Tensor, begins: tuple[float, ...]) -> Tensor:
    edges = torch.tensor(begins[1:], dtype=values_M.dtype, device=values_M.device)
    # right: a value equal to an edge belongs to the bucket that begins there.
    return torch.bucketize(values_M, edges, right=True)


def _by(bucket_M: Tensor, values_MC: Tensor, num_buckets: int) -> Tensor:
    return values_MC.new_zeros(num_buckets, values_MC.shape[1]).index_add(0, bucket_M, values_MC)


def _sample_sums(
    row: _Trainable, counts_N: Tensor, span_N: Tensor, rejected_M: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the sums over the samples with a trainable token in this micro-batch, and the longest version span."""
    here_S = counts_N.nonzero()[:, 0]
    counts_S = counts_N[here_S]

    def per_sample(values_M: Tensor) -> Tensor:
        """Return the sum of the values of each sample that is here, [S]."""
        return torch.zeros_like(counts_N).index_add(0, row.sequence_M, values_M)[here_S]

    delta_S = per_sample(row.delta_M)
    w_S = delta_S.clamp(-DELTA_BOUND, DELTA_BOUND).exp()
    log_ppl_diff_S = -delta_S / counts_S
    span_S = span_N[here_S].double()
    columns = {
        "samples": torch.ones_like(counts_S),
        "sequence_w": w_S,
        "sequence_w_squared": w_S.square(),
        "ppl_train": (-per_sample(row.log_pi_M) / counts_S).exp(),
        "ppl_rollout": (-per_sample(row.log_mu_M) / counts_S).exp(),
        "ppl_ratio": log_ppl_diff_S.exp(),
        "log_ppl_diff": log_ppl_diff_S,
        "log_ppl_diff_abs": log_ppl_diff_S.abs(),
        "span": span_S,
        "mixed": (span_S > 0).double(),
    }
    if rejected_M is not None:
        rejected_S = per_sample(rejected_M.double())
        columns["rejected_samples"] = (rejected_S == counts_S).double()
        columns["touched_samples"] = (rejected_S > 0).double()
    return dict(zip(columns, torch.stack(list(columns.values())).sum(-1), strict=True)), _largest(span_S)


def _largest(values: Tensor) -> Tensor:
    return values.max().double() if values.numel() else torch.zeros((), dtype=torch.float64, device=values.device)
