"""Reward shaping before advantages are computed: penalties, constant groups, distillation. Pure functions; T = tokens, N = samples."""

from torch import Tensor

from tidemill.learner.algorithms.advantages import group_moments
from tidemill.learner.algorithms.ratios import log_ratio


def overlong_penalty(lengths_N: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Return ``clamp((max_tokens - buffer - length) / buffer, -1, 0)``, float64 [N], which the caller adds to the reward.

    It is 0 up to ``max_tokens - buffer`` response tokens, falls linearly to -1 at ``max_tokens``, and is -1 beyond. Raises ValueError
    unless 0 < buffer <= max_tokens. Source: soft overlong punishment, DAPO 2503.14476 (max_tokens 20480, buffer 4096).
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer: want 1..max_tokens = {max_tokens}, got {buffer}")
    return ((max_tokens - buffer - lengths_N.double()) / buffer).clamp(-1, 0)


def zero_variance_groups(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return a mask of the samples in groups with equal rewards (a group of one included), bool [N].

    They have no gradient under a group baseline, but count in the denominators. The comparison is exact: pass the rewards before a term
    that depends on length or log-probs is added. Source: dynamic sampling, DAPO 2503.14476.
    """
    return group_moments(rewards_N, groups_N).constant_N


def distillation_advantages(log_probs_T: Tensor, teacher_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return ``log pi_teacher - log pi_student`` of the sampled tokens (nats, clamped to +-20), detached, [T]; 0 where masked.

    The policy gradient ``-A grad log pi`` on tokens of the student is the gradient of KL(student || teacher) of each next token given its
    sampled prefix. (``returns_to_go`` of it with gamma = 1 has the gradient of the KL of whole responses.)
    Both log-probs must be at the sampling temperature: a teacher at another temperature pulls towards a flatter or sharper policy, which
    no diagnostic shows. Source: on-policy distillation, Agarwal et al. 2024; as an advantage, Lu et al. 2025.
    """
    return log_ratio(teacher_T, log_probs_T, mask_T).detach()


def kl_in_reward(rewards_N: Tensor, kl_sums_N: Tensor, coef: float) -> Tensor:
    """Return ``r - coef KL``, [N], detached; KL is a sample's summed divergence (nats; the sum of k1 over its trainable tokens).

    Source: Ziegler et al. 2019.
    """
    return rewards_N - coef * kl_sums_N.detach()
