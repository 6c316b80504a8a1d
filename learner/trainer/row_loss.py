"""The loss of a row within the pass of its model, with the sums that its metrics are made of, and its records.

Shape letters: T = tokens of a packed micro-batch, H = hidden size, K = listed tokens, or places of logits.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tidemill.learner.algorithms import diagnostics
from tidemill.learner.algorithms.aggregation import Denominators, Supervised
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.diagnostics import Sums
from tidemill.learner.algorithms.objective import Coupled, Objective, sequence_weight_sums
from tidemill.learner.algorithms.ratios import log_ratio
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.debug import collector
from tidemill.learner.debug.collector import LOGITS_POSITIONS, Collector
from tidemill.learner.trainer.adaptive import Adaptive
from tidemill.learner.trainer.backend import Policy
from tidemill.learner.trainer.further import further_loss
from tidemill.learner.trainer.passes import Passes
from tidemill.learner.trainer.rows import Row
from tidemill.learner.trainer.trained_values import ValueRecord


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
