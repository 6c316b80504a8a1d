"""The passes of the trainer: log-probs and entropies of rows, sums over the replicas, and the loss of a row with the
sums that its metrics are made of.

    heads for further tokens: -log p(token i + k + 1) of each head k, where that token is a trained one
    -> mean over heads and tokens

Shape letters: T = tokens of a packed micro-batch, H = hidden size, N = targets, K = listed tokens, or places of logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learner.algorithms import diagnostics
from tidemill.learner.algorithms.aggregation import Denominators, Supervised
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.diagnostics import Sums
from tidemill.learner.algorithms.objective import Coupled, Objective, sequence_weight_sums
from tidemill.learner.algorithms.tokens import Tokens, log_ratio
from tidemill.learner.debug import collector
from tidemill.learner.debug.collector import LOGITS_POSITIONS, Collector
from tidemill.learner.kernels.logprobs import listed_log_probs, log_probs_and_entropy, logits_at, most_probable
from tidemill.learner.layout.parallel import gather_parts, of_last_stage, tensors_of_last_stage
from tidemill.learner.trainer.adaptive import Adaptive
from tidemill.learner.trainer.port import Policy
from tidemill.learner.trainer.rows import Row
from tidemill.learner.trainer.step_metrics import ValueRecord

Listed = tuple[Tensor | None, Tensor | None]
"""Most probable tokens, this context-parallel rank's part, and their log-probs, of the whole row; None = not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of the tokens of a row under one policy."""

    log_probs_T: Tensor
    entropy_T: Tensor
    listed: Listed  # on the last stage only


class Passes:
    """The passes of a policy over rows. All methods are collective; call them inside ``Policy.ready``."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def scores(self, rows: list[Row], *, list_most: int = 0) -> list[Scores]:
        """Return the scores of each row without gradient, on all ranks. ``list_most``: most probable tokens to list."""
        ranks = self._policy.parallel

        def collect(row: Row, hidden_TH: Tensor) -> tuple[Tensor, tuple[Tensor, Listed]]:
            ids_TK, head = None, self._policy.head()
            if list_most:
                ids_TK = row.spread(most_probable(row.read(hidden_TH), head.weight_VH, list_most, group=head.group))
            *scores, listed_TK = self.read(replace(row, listed_TK=ids_TK), hidden_TH, listed=True)
            return scores[0].sum(), (torch.stack(scores, dim=1), (ids_TK, listed_TK))

        results = self._policy.run(rows, collect, forward_only=True)
        lengths = [len(row.seen.mask_T) for row in rows]
        scores_of_last = None if results is None else [both_T2 for both_T2, _ in results]
        both_TT2 = tensors_of_last_stage(scores_of_last, lengths, 2, ranks)
        listed: list[Listed] = [(None, None)] * len(rows) if results is None else [listed for _, listed in results]
        return [
            Scores(log_probs_T=both_T2[:, 0], entropy_T=both_T2[:, 1], listed=row_listed)
            for both_T2, row_listed in zip(both_TT2, listed, strict=True)
        ]

    def gradients(
        self, rows: list[Row], loss: Callable[[Row, Tensor], tuple[Tensor, Sums]], *, forward_only: bool = False
    ) -> Sums:
        """Add up the gradients of ``loss`` over the rows of a minibatch. Returns its sums, on all stages."""
        with self._policy.routing.replaying():
            return self._sums(self._policy.run(rows, loss, forward_only=forward_only))

    def _sums(self, parts: list[Sums] | None) -> Sums:
        """Return the sums over the rows on all stages. ``parts``: of the rows on the last stage, elsewhere None."""
        ranks = self._policy.parallel
        merged = None if parts is None else diagnostics.merged(parts)
        if merged is not None and ranks.pp_size == 1:
            return merged
        return of_last_stage(None if merged is None else merged.to("cpu"), ranks).to(ranks.device)

    def read(self, row: Row, hidden_TH: Tensor, *, listed: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs, entropies, and with ``listed`` the log-probs of the teacher's tokens, of the whole row."""
        ranks, head, temperature = self._policy.parallel, self._policy.head(), row.temperature
        inputs = (row.read(hidden_TH), head.weight_VH, row.read_row(row.targets_T))
        if isinstance(temperature, Tensor):
            temperature = row.read_row(temperature)
        options: dict[str, Any] = {
            "temperature": temperature,
            "group": head.group,
            "fused": head.fused,
            "placeholder": head.placeholder,
            "scale": head.scale,
            "cap": head.cap,
        }
        if listed and row.listed_TK is not None:
            *scores, listed_TK = listed_log_probs(*inputs, row.read_row(row.listed_TK), **options)
            columns = torch.cat([torch.stack(scores, dim=1), listed_TK], dim=1)
        else:
            columns = torch.stack(log_probs_and_entropy(*inputs, **options), dim=1)
        columns = row.spread(columns)
        if ranks.cp_size > 1:
            columns = gather_parts(columns, ranks.cp_group)
        return columns[:, 0], columns[:, 1], columns[:, 2:] if columns.shape[1] > 2 else None

    def logits(self, row: Row, hidden_TH: Tensor, at_K: Tensor) -> Tensor:
        """Return the logits at places of the whole row, [K, V], on all ranks of the row."""
        head, ranks, temperature = self._policy.head(), self._policy.parallel, row.temperature
        place = (hidden_TH, head.weight_VH, at_K, ranks)
        return logits_at(*place, temperature=temperature, scale=head.scale, cap=head.cap)

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over the data-parallel ranks, on the device of ``values``."""
        group = self._policy.parallel.dp_group
        if dist.get_world_size(group) > 1:
            moved = values.to(self._policy.parallel.device)
            dist.all_reduce(moved, group=group)
            values = moved.to(values.device)
        return values

    def gathered(self, values_M: Tensor) -> Tensor:
        """Return the concatenation of the data-parallel ranks' tensors, which differ in length."""
        group = self._policy.parallel.dp_group
        world = dist.get_world_size(group)
        if world == 1:
            return values_M
        lengths = [torch.zeros(1, dtype=torch.int64, device=values_M.device) for _ in range(world)]
        dist.all_gather(lengths, torch.tensor([len(values_M)], device=values_M.device), group=group)
        sizes = [int(length) for length in lengths]
        # all_gather wants tensors of one size.
        padded = torch.nn.functional.pad(values_M, (0, max(sizes) - len(values_M)))
        parts = [torch.zeros_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Quantities of a whole minibatch that the loss of each of its rows needs."""

    denominators: Denominators
    """Of the samples of policies."""
    supervised: Supervised | None = None
    """Term of the demonstrations; None = the step has none."""
    coupled: Coupled = field(default_factory=Coupled)
    further_tokens: int | None = None
    """Trained tokens of the minibatch, for heads for further tokens; None = they are not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """The loss under the settings of a step. Its value is a sum over tokens, with denominators of the minibatch."""

    objective: Objective
    algorithm: AlgorithmConfig
    adaptive: Adaptive
    policy: Policy
    passes: Passes
    record: ValueRecord
    collector: Collector | None
    lag_buckets: int
    mtp_factor: float
    """Of the loss of heads for further tokens."""

    def __call__(self, row: Row, hidden_TH: Tensor, *, terms: Terms) -> tuple[Tensor, Sums]:
        """Return the loss of a row and its sums. Inside ``finish``."""
        total, sums = self._of_policy(row, hidden_TH, terms)
        if terms.further_tokens is None:
            return total, sums
        further, further_sums = further_loss(self.policy, row, hidden_TH, tokens=terms.further_tokens)
        return total + self.mtp_factor * further, Sums(totals={**sums.totals, **further_sums}, maxima=sums.maxima)

    def _of_policy(self, row: Row, hidden_TH: Tensor, terms: Terms) -> tuple[Tensor, Sums]:
        log_probs_T, entropy_T, listed_TK = self.passes.read(row, hidden_TH, listed=self.objective.by_listed)
        tokens = self.objective.advised(row.seen, log_probs_T)
        total, loss, divergence_T = self.objective.total(
            log_probs_T,
            entropy_T,
            tokens,
            terms.denominators,
            terms.coupled,
            kl_scale=self.adaptive.kl_scale,
            entropy_coef=self.adaptive.entropy_coef,
            listed_TK=listed_TK,
        )
        if self.collector is not None:
            anchor = str(self.algorithm.anchor)
            self.collector.row(collector.of_policy(tokens, log_probs_T, entropy_T, loss, anchor=anchor))
            self._record_logits(self.collector, row, hidden_TH, tokens)
        self.record.row(tokens, log_probs_T, entropy_T, loss)
        sums = diagnostics.token_sums(
            tokens,
            log_probs_T=log_probs_T,
            entropy_T=entropy_T,
            position_T=row.position_T,
            loss=loss,
            lag_buckets=self.lag_buckets,
        )
        totals: dict[str, Tensor] = {}
        if terms.supervised is not None:
            term, totals = terms.supervised.term(log_probs_T, row.demonstrated_T, row.seen.sample_T)
            total = total + term
        totals["loss"] = total.detach().double()
        totals["shared_tokens"] = total.detach().new_tensor(len(row.targets_T) - len(row.tokens_T)).double()
        if divergence_T is not None:
            totals["kl_reference"] = torch.where(tokens.mask_T, divergence_T, 0.0).sum().double()
        if self.algorithm.needs_teacher and tokens.teacher_T is not None:
            totals["teacher_kl"] = log_ratio(log_probs_T.detach(), tokens.teacher_T, tokens.mask_T).sum().double()
        if listed_TK is not None:
            totals["teacher_top_kl"] = self.objective.listed_divergence(tokens, listed_TK.detach()).sum().double()
        if self.algorithm.ess_lr:
            totals["ess"] = sequence_weight_sums(log_probs_T, tokens)
        return total, Sums(totals={**sums.totals, **totals}, maxima=sums.maxima)

    def _record_logits(self, record: Collector, row: Row, hidden_TH: Tensor, tokens: Tokens) -> None:
        at_K = tokens.mask_T.nonzero()[:LOGITS_POSITIONS, 0]
        if len(at_K):
            record.logits(self.passes.logits(row, hidden_TH, at_K), at_K)


def further_loss(policy: Policy, row: Row, hidden_TH: Tensor, *, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the row's part of the mean over heads and ``tokens`` (trained ones of the minibatch), and its sums.

    Inside ``finish``. Its gradient is that of the heads alone.
    Source: DeepSeek-V3 (arXiv 2412.19437), equations 24 and 25.
    """
    trained_T = row.seen.mask_T | row.demonstrated_T
    assert row.seen.sequence_T is not None
    losses, counts = [], []
    predicts = partial(_predicts, trained_T, row.seen.sequence_T)
    for depth, log_probs_N in enumerate(policy.further_log_probs(row, hidden_TH, predicts), 1):
        losses.append(-log_probs_N.sum())
        counts.append(predicts(depth).sum())
    total = torch.stack(losses).sum()
    sums = {"mtp": total.detach().double(), "mtp_tokens": torch.stack(counts).sum().double()}
    return total / (len(losses) * max(1, tokens)), sums


def _predicts(trained_T: Tensor, sequence_T: Tensor, depth: int) -> Tensor:
    """Return where the token that a head predicts is a trained one of the same sequence."""
    later_T = trained_T.roll(-depth) & (sequence_T == sequence_T.roll(-depth))
    later_T[-depth:] = False
    return later_T
