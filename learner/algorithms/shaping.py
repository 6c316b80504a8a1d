"""Losses and rewards beside the policy gradient: supervised, distilled from a teacher, penalties of length.

Pure functions; T = tokens, N = samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.learner.algorithms.advantages import group_moments
from tidemill.learner.algorithms.aggregation import Denominators, Reducer, aggregate
from tidemill.learner.algorithms.ratios import log_ratio


def sft_loss(log_probs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the cross-entropy ``-log pi_theta`` of every token (nats), [T]; exactly 0 with exactly 0 gradient where
    masked.
    """
    return torch.where(mask_T, -log_probs_T, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """The term of the demonstrations in the number that an update minimises: ``coef`` times their aggregated
    cross-entropy.

    Demonstrations have no log-probs of a policy that sampled them, so they are in no ratio, no baseline and no
    diagnostic of the others, and the two terms have denominators of their own.
    """

    coef: float
    mode: str | Reducer
    """Aggregation mode, as in ``Objective.mode``."""
    denominators: Denominators
    """Denominators of the update's demonstrations; with ``loss: sft`` of all its samples, which then have one loss."""

    def term(self, log_probs_T: Tensor, mask_T: Tensor, sample_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a row's part of the term, and its sums for ``train/sft_loss``. ``mask_T``: trainable tokens of
        demonstrations.
        """
        loss_T = sft_loss(log_probs_T, mask_T)
        total = self.coef * aggregate(loss_T, mask_T, sample_T, self.denominators, mode=self.mode)
        return total, {"sft_tokens": mask_T.sum().double(), "sft_loss": loss_T.detach().sum().double()}


LEAST_REST = 1e-6
"""Smallest probability of the tokens that are not listed: float32 sums of probabilities are about as exact."""


def top_k_divergence(student_TK: Tensor, teacher_TK: Tensor, mask_T: Tensor, *, kind: str) -> Tensor:
    """Return the KL of each position over the K listed tokens and one more outcome, any other token (nats), [T]; 0
    where masked.

    ``student_TK``, ``teacher_TK``: log-probs of the listed tokens at the sampling temperature; the gradient is that of
    the student.
    ``kind``: ``forward_kl``, KL(teacher || student), or ``reverse_kl``, KL(student || teacher). Joining outcomes never
    raises a KL, so the value lies between 0 and the KL over the whole vocabulary, and is that for K = V. Raises
    ValueError for another kind.
    Sources: Agarwal et al. 2024 (GKD, on-policy forward and reverse KL); the joined outcome, Csiszar's data-processing
    inequality.
    """
    if kind not in ("forward_kl", "reverse_kl"):
        raise ValueError(f"kind: want forward_kl or reverse_kl, got {kind!r}")
    student, teacher = _with_rest(student_TK, mask_T), _with_rest(teacher_TK.detach(), mask_T)
    first, second = (teacher, student) if kind == "forward_kl" else (student, teacher)
    return torch.where(mask_T, (first.exp() * (first - second)).sum(1), 0.0)


def _with_rest(log_probs_TK: Tensor, mask_T: Tensor) -> Tensor:
    """Return the log-probs with that of any other token behind them, [T, K + 1]; those of masked positions are uniform
    and constant.
    """
    num_listed = log_probs_TK.shape[1]
    log_probs_TK = torch.where(
        mask_T[:, None], log_probs_TK, -torch.log(torch.tensor(num_listed + 1.0, dtype=log_probs_TK.dtype))
    )
    rest_T = (1 - log_probs_TK.exp().sum(1)).clamp(min=LEAST_REST).log()
    return torch.cat([log_probs_TK, rest_T[:, None]], dim=1)


def overlong_penalty(lengths_N: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Return ``clamp((max_tokens - buffer - length) / buffer, -1, 0)``, float64 [N], which the caller adds to the
    reward.

    It is 0 up to ``max_tokens - buffer`` response tokens, falls linearly to -1 at ``max_tokens``, and is -1 beyond.
    Raises ValueError unless 0 < buffer <= max_tokens. Source: soft overlong punishment, DAPO 2503.14476 (max_tokens
    20480, buffer 4096).
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer: want 1..max_tokens = {max_tokens}, got {buffer}")
    return ((max_tokens - buffer - lengths_N.double()) / buffer).clamp(-1, 0)


def zero_variance_groups(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return a mask of the samples in groups with equal rewards (a group of one included), bool [N].

    They have no gradient under a group baseline, but count in the denominators. The comparison is exact: pass the
    rewards before a term that depends on length or log-probs is added. Source: dynamic sampling, DAPO 2503.14476.
    """
    return group_moments(rewards_N, groups_N).constant_N


def distillation_advantages(log_probs_T: Tensor, teacher_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return ``log pi_teacher - log pi_student`` of the sampled tokens (nats, clamped to +-20), detached, [T]; 0 where
    masked.

    The policy gradient ``-A grad log pi`` on tokens of the student is the gradient of KL(student || teacher) of each
    next token given its sampled prefix. (``returns_to_go`` of it with gamma = 1 has the gradient of the KL of whole
    responses.) Both log-probs must be at the sampling temperature: a teacher at another temperature pulls towards a
    flatter or sharper policy, which no diagnostic shows. Source: on-policy distillation, Agarwal et al. 2024; as an
    advantage, Lu et al. 2025.
    """
    return log_ratio(teacher_T, log_probs_T, mask_T).detach()


def kl_in_reward(rewards_N: Tensor, kl_sums_N: Tensor, coef: float) -> Tensor:
    """Return ``r - coef KL``, [N], detached; KL is a sample's summed divergence (nats; the sum of k1 over its trainable
    tokens).

    Source: Ziegler et al. 2019.
    """
    return rewards_N - coef * kl_sums_N.detach()
