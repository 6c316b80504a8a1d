"""Advantages from outcome rewards, by explicit group ids: groups may have any size and stand in any order.

Pure functions of torch tensors, float32 or float64: one advantage per sample, [N], in the dtype of the rewards. Shape
letters: T = tokens of a packed row, N = samples of the step, G = groups (in formulas, the size of one group).
``groups_N``: integer ids, equal within a group. Mean-centred estimators add the factor (G - 1) / G to the gradient.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.learner.algorithms.tokens import log_ratio

MOST_ROLES = 1024
"""Maximum number of baselines of a run: a key with a value for each prompt would make one for each sample."""


def roles_of(metadata: Sequence[Mapping[str, object]], key: str, *, num_samples: int) -> list[str]:
    """Return the role of each sample: its metadata at ``key`` as text, "" without it; all "" for an empty key.

    Raises ValueError if no sample has the key.
    """
    if not key:
        return [""] * num_samples
    if not any(key in entry for entry in metadata):
        keys = sorted({name for entry in metadata for name in entry})
        raise ValueError(
            f"algorithm.rae.role: want a key of the samples' metadata, got {key!r}; the samples of the step have {keys}"
        )
    return [str(entry.get(key, "")) for entry in metadata]


def over_baselines(
    rewards_N: Tensor, roles: Sequence[str], baselines: Mapping[str, float], *, decay: float
) -> tuple[Tensor, dict[str, float]]:
    """Return (``r_i - b_role``, the baselines after the step); a role has baseline 0 until its first reward.

    All samples of a step are compared with the baseline before it, which none of them has influenced. Then n rewards of
    a role move it to ``decay^n b + (1 - decay^n) mean``, in any order of the samples to the bit: one reward as in the
    source, and n equal ones as one after another there. A reward that is not finite, whose step is skipped, moves none.
    Raises ValueError for more than ``MOST_ROLES`` roles.
    Source: SPIRAL, Liu et al. 2025 (2506.24119), section on RAE, decay 0.95; each reward compared before it moves the
    baseline, as there.
    """
    before_N = torch.tensor([baselines.get(role, 0.0) for role in roles], dtype=torch.float64)
    by_role: dict[str, list[float]] = {}
    for role, reward in zip(roles, rewards_N.tolist(), strict=True):
        if math.isfinite(reward):
            by_role.setdefault(role, []).append(reward)
    after = dict(baselines)
    for role, rewards in by_role.items():
        kept = decay ** len(rewards)
        # fsum rounds once, so the order of the samples has no influence.
        after[role] = kept * after.get(role, 0.0) + (1 - kept) * math.fsum(rewards) / len(rewards)
    if len(after) > MOST_ROLES:
        raise ValueError(
            f"algorithm.rae.role: want at most {MOST_ROLES} roles in a run, got {len(after)}, such as {max(by_role)!r}"
        )
    return rewards_N - before_N.to(rewards_N.dtype), after


STD_EPSILON = 1e-6
"""Added to the standard deviation of a group. Source: common implementations of GRPO (DeepSeekMath, Shao et al. 2024).
"""
WHITEN_EPSILON = 1e-8
"""Added to the variance in whitening. Source: the masked whitening of verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMoments:
    """Sizes and moments of the groups' counted members, spread over all their samples."""

    sizes_N: Tensor
    mean_N: Tensor
    """Mean reward of the counted members; 0 in a group without any."""
    centered_N: Tensor
    """r_i less the mean of its group; exactly 0 where all its rewards are equal, and where not counted."""
    std_N: Tensor
    """Unbiased standard deviation (divides by size - 1); 0 in a group of one."""
    constant_N: Tensor
    """True where all rewards of the group are equal (a group of one or none included)."""


def group_moments(rewards_N: Tensor, groups_N: Tensor, counted_N: Tensor | None = None) -> GroupMoments:
    """Return the moments of every sample's group, over its ``counted_N`` members (None = all)."""
    if counted_N is None:
        counted_N = torch.ones_like(groups_N, dtype=torch.bool)
    _, place_N = torch.unique(groups_N, return_inverse=True)
    zeros_G = rewards_N.new_zeros(int(place_N.max()) + 1 if place_N.numel() else 0)
    sizes_G = zeros_G.index_add(0, place_N, counted_N.to(rewards_N.dtype))
    mean_G = zeros_G.index_add(0, place_N, torch.where(counted_N, rewards_N, 0.0)) / sizes_G.clamp(min=1)
    low_G = zeros_G.scatter_reduce(0, place_N, torch.where(counted_N, rewards_N, torch.inf), "amin", include_self=False)
    high_G = zeros_G.scatter_reduce(
        0, place_N, torch.where(counted_N, rewards_N, -torch.inf), "amax", include_self=False
    )
    # By comparison, not by the variance: rounding would leave a tiny variance, and tiny centred rewards divided by it
    # are not 0. A group without counted members has low = inf > high.
    constant_N = (low_G >= high_G)[place_N]
    centered_N = torch.where(constant_N | ~counted_N, 0.0, rewards_N - mean_G[place_N])
    variance_G = zeros_G.index_add(0, place_N, centered_N.square()) / (sizes_G - 1).clamp(min=1)
    return GroupMoments(
        sizes_N=sizes_G[place_N],
        mean_N=mean_G[place_N],
        centered_N=centered_N,
        std_N=variance_G.sqrt()[place_N],
        constant_N=constant_N,
    )


Advantage = Callable[..., Tensor]
"""``(rewards_N, groups_N) -> advantages_N``; opo takes each sample's trainable tokens, too, and pass_at_k its k."""


def grpo(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return ``(r_i - mean) / (std + 1e-6)`` within each group; 0 where all rewards are equal, and in a group of one.

    Source: DeepSeekMath, Shao et al. 2024.
    """
    moments = group_moments(rewards_N, groups_N)
    return moments.centered_N / (moments.std_N + STD_EPSILON)


def grpo_no_std(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return ``r_i - mean`` within each group; 0 where all rewards are equal, and in a group of one.

    The baseline includes the sample's own reward, so the mean gradient is (G - 1) / G of the true one. Source: Dr.
    GRPO, Liu et al. 2025.
    """
    return group_moments(rewards_N, groups_N).centered_N


def batch_std(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return ``(r_i - mean of the group) / (std of all rewards of the step + 1e-6)``; 0 where all rewards of the group
    are equal.

    Unlike in ``grpo``, all groups of a step share one scale, so a group with nearly equal rewards is not amplified.
    Source: Liu et al. 2025 (2508.08221).
    """
    everything = group_moments(rewards_N, torch.zeros_like(groups_N))
    return group_moments(rewards_N, groups_N).centered_N / (everything.std_N + STD_EPSILON)


def rloo(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return ``r_i - mean of the others = G / (G - 1) (r_i - mean)``; 0 in a group of one, and where all rewards are
    equal.

    The mean gradient is the true one. Source: Ahmadian et al. 2024, Kool et al. 2019.
    """
    moments = group_moments(rewards_N, groups_N)
    return moments.centered_N * moments.sizes_N / (moments.sizes_N - 1).clamp(min=1)


def reinforce(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return ``r_i``: no baseline, so the true gradient with the largest variance. Source: Williams 1992."""
    return rewards_N


def none(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return 0 for every sample: rewards are measured, and nothing is learnt from them (distillation alone)."""
    return torch.zeros_like(rewards_N)


def opo(rewards_N: Tensor, groups_N: Tensor, trainable_N: Tensor) -> Tensor:
    """Return ``r_i - sum_j L_j r_j / sum_j L_j`` with L the trainable tokens; 0 where all rewards are equal.

    This is the baseline of least variance if the squared norm of a response's score grows with its length; it includes
    the sample's own reward. It is the mean of the group where no member has a token. Source: OPO, Hao et al. 2025.
    """
    centered_N = group_moments(rewards_N, groups_N).centered_N
    lengths_N = trainable_N.to(rewards_N.dtype)
    # Two means over the same samples: their quotient is that of the sums. Centred rewards, so that equal ones give
    # exactly 0.
    total_N = group_moments(lengths_N, groups_N).mean_N
    product_N = group_moments(lengths_N * centered_N, groups_N).mean_N
    return centered_N - product_N / torch.where(total_N > 0, total_N, torch.inf)


def maxrl(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return ``(r_i - mean) / mean`` within each group, for rewards >= 0; 0 where the mean is not above 1e-6 std or all
    rewards are equal.

    K successes of reward 1 and failures of 0: (G - K) / K and -1. With p the probability of success the mean gradient
    is ``(1 - (1 - p)^(G - 1)) grad log p``: likelihood rather than ``grad p``, as far as G samples can see it. Rewards
    of both signs can have a mean near 0 and advantages of about 1e6. Source: MaxRL 2602.02710.
    """
    moments = group_moments(rewards_N, groups_N)
    positive_N = moments.mean_N > STD_EPSILON * moments.std_N
    return moments.centered_N / torch.where(positive_N, moments.mean_N, torch.inf)


def pass_at_k(rewards_N: Tensor, groups_N: Tensor, *, k: int) -> Tensor:
    """Return the mean of ``(R - mean R) / std R`` over the sets of k samples of the group that include the sample.

    R of a set is 1 if any of its rewards is above 0, else 0; mean and std are over all sets. So one success in k is
    enough, and a group with fewer than k failures teaches nothing: its advantages are 0, as in a group of fewer than k.
    k = 1 is ``grpo`` of successes with the standard deviation ÷ G. Source: pass@k training, Chen et al. 2025
    (2508.10751), the analytical form.
    """
    failed_N = group_moments((rewards_N <= 0).to(rewards_N.dtype), groups_N)
    sizes_N, failures_N = failed_N.sizes_N, (failed_N.mean_N * failed_N.sizes_N).round()
    all_fail_N, others_fail_N = torch.ones_like(rewards_N), torch.ones_like(rewards_N)
    for drawn in range(k):
        all_fail_N = all_fail_N * (failures_N - drawn).clamp(min=0) / (sizes_N - drawn).clamp(min=1)
        if drawn:
            others_fail_N = others_fail_N * (failures_N - drawn).clamp(min=0) / (sizes_N - drawn).clamp(min=1)
    deviation_N = (all_fail_N * (1 - all_fail_N)).sqrt()
    gain_N = torch.where(rewards_N > 0, all_fail_N, all_fail_N - others_fail_N)
    usable_N = (deviation_N > 0) & (sizes_N >= k)
    return torch.where(usable_N, gain_N / torch.where(usable_N, deviation_N, 1.0), 0.0)


def gdpo(rewards_NK: Tensor, groups_N: Tensor, weights_K: Tensor) -> Tensor:
    """Return ``sum_k weight_k grpo(reward_k)`` for K rewards of every sample, [N]: each reward is normalised by itself
    within its group.

    The scale of a reward has no influence, and samples with equal sums of different parts keep different advantages.
    NaN: the sample has no such reward, which is then 0 for it and not in the statistics of its group. The method
    whitens the result over the step (``whitened``; over tokens here, over samples there). Source: GDPO 2601.05242.
    """
    parts = [group_moments(part_N, groups_N, ~part_N.isnan()) for part_N in rewards_NK.unbind(1)]
    parts_KN = torch.stack([part.centered_N / (part.std_N + STD_EPSILON) for part in parts])
    return (weights_K.to(parts_KN.dtype)[:, None] * parts_KN).sum(0)


ADVANTAGES: Mapping[str, Advantage] = {
    "grpo": grpo,
    "grpo_no_std": grpo_no_std,
    "batch_std": batch_std,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce,
    "reinforce_pp_baseline": grpo_no_std,
    "opo": opo,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "gdpo": grpo,
    "none": none,
}
"""Estimators by the name in ``AlgorithmConfig.advantage``; ``gdpo`` of a reward without parts, as its only part."""
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gdpo")
"""Estimators whose advantages are whitened over the trainable tokens of the step, unless the config says otherwise.

Source of reinforce_pp and its baseline: REINFORCE++, Hu et al. 2025.
"""


# ---- whitening


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``(number, sum, sum of squares)`` of the unmasked values, float64 [3]; add them over rows and ranks, then
    call ``whitened``.

    ``mask``: bool, or the multiplicity of each value (tokens of a sample). The variance computed from the sums has a
    relative error of about 1e-16 mean^2 / variance. The mean of the variances of the ranks would be a different number.
    """
    counts, kept = mask.double(), torch.where(mask != 0, values, 0.0).double()
    return torch.stack([counts.sum(), (counts * kept).sum(), (counts * kept.square()).sum()])


def whitened(values: Tensor, mask: Tensor, moments: Tensor | None = None) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + 1e-8)``; 0 where masked (counted 0 times).

    ``moments``: those of all values of the step, over rows and ranks; None = ``values`` are all of them. The variance
    divides by their number (not by one less): one value, or equal values, give 0 up to rounding.
    """
    number, total, squares = (masked_moments(values, mask) if moments is None else moments).unbind()
    mean = total / number.clamp(min=1)
    variance = (squares / number.clamp(min=1) - mean.square()).clamp(min=0)
    scaled = (torch.where(mask != 0, values, 0.0).double() - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return torch.where(mask != 0, scaled, 0.0).to(values.dtype)


def whitened_rows(
    values: Sequence[Tensor], masks: Sequence[Tensor], summed: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return the values of this rank's rows, whitened over all rows and ranks. Collective through ``summed``."""
    moments = summed(torch.stack([masked_moments(*row) for row in zip(values, masks, strict=True)]).sum(0))
    return [whitened(*row, moments) for row in zip(values, masks, strict=True)]


# ---- penalties and distillation


def overlong_penalty(lengths_N: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Return ``clamp((max_tokens - buffer - length) / buffer, -1, 0)``, float64 [N], which the caller adds to the
    reward.

    It is 0 up to ``max_tokens - buffer`` response tokens, falls linearly to -1 at ``max_tokens``, and is -1 beyond.
    Source: soft overlong punishment, DAPO 2503.14476 (max_tokens
    20480, buffer 4096).
    """
    return ((max_tokens - buffer - lengths_N.double()) / buffer).clamp(-1, 0)


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
