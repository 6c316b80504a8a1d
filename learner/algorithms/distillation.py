"""Divergence between a student and a teacher of which only the most probable tokens are known. Pure functions.

Shape letters: T = tokens of a packed row, K = tokens that the teacher listed at each position.
"""

import torch
from torch import Tensor

LEAST_REST = 1e-6
"""Smallest probability of the tokens that are not listed: float32 sums of probabilities are about as exact."""


def top_k_divergence(student_TK: Tensor, teacher_TK: Tensor, mask_T: Tensor, *, kind: str) -> Tensor:
    """Return the KL of each position over the K listed tokens and one more outcome, any other token (nats), [T]; 0 where masked.

    ``student_TK``, ``teacher_TK``: log-probs of the listed tokens at the sampling temperature; the gradient is that of the student.
    ``kind``: ``forward_kl``, KL(teacher || student), or ``reverse_kl``, KL(student || teacher). Joining outcomes never raises a KL, so the
    value lies between 0 and the KL over the whole vocabulary, and is that for K = V. Raises ValueError for another kind.
    Sources: Agarwal et al. 2024 (GKD, on-policy forward and reverse KL); the joined outcome, Csiszar's data-processing inequality.
    """
    if kind not in ("forward_kl", "reverse_kl"):
        raise ValueError(f"kind: want forward_kl or reverse_kl, got {kind!r}")
    student, teacher = _with_rest(student_TK, mask_T), _with_rest(teacher_TK.detach(), mask_T)
    first, second = (teacher, student) if kind == "forward_kl" else (student, teacher)
    return torch.where(mask_T, (first.exp() * (first - second)).sum(1), 0.0)


def _with_rest(log_probs_TK: Tensor, mask_T: Tensor) -> Tensor:
    """Return the log-probs with that of any other token behind them, [T, K + 1]; those of masked positions are uniform and constant."""
    num_listed = log_probs_TK.shape[1]
    log_probs_TK = torch.where(mask_T[:, None], log_probs_TK, -torch.log(torch.tensor(num_listed + 1.0, dtype=log_probs_TK.dtype)))
    rest_T = (1 - log_probs_TK.exp().sum(1)).clamp(min=LEAST_REST).log()
    return torch.cat([log_probs_TK, rest_T[:, None]], dim=1)
