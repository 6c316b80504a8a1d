"""Advantages from outcome rewards, by explicit group ids: groups may have any size and stand in any order.

Pure functions of torch tensors, float32 or float64. Shape letters: T = tokens of a packed row, N = samples of the step,
G = groups (in formulas, the size of one group). All estimators have the same signature::

    advantages_N = grpo(rewards_N, groups_N, lengths_N=None, valid_N=None, members="count")

``lengths_N``: trainable tokens (only ``opo`` uses them). ``valid_N`` False: the sample failed, was aborted or has no
response; its advantage is 0. ``members`` chooses its effect on the other samples of its group:

    count      its reward (0 for a failure) is in every statistic of the group
    leave_out  the group consists of the valid samples; its reward is ignored, NaN included

The right choice depends on why samples are missing. Let P be the probability that a response is valid and R its mean
reward if it is; the mean gradients of ``rloo`` over the valid samples are

    missing independently of the response (a crash)    both: P grad J. leave_out has the smaller variance
    missing because of the response (a time-out on long ones), failures worth 0, J = P R, grad J = P grad R + R grad P:
        leave_out    P grad R: the reward of the valid responses; the gradient ignores that fewer of them are valid
        count        P grad R + (1 - P) R grad P: part of the gradient away from failing
        valid, reward 0, trained    P grad R + R grad P: the whole gradient: train on the partial responses

(leave_out: given at least two valid samples; their number in the group is a factor). Mean-centred estimators add the
factor (G - 1) / G with G the counted members, which differs between groups with missing samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tidemill.learner.algorithms.gae_vtrace import gae

MOST_ROLES = 1024
"""Most baselines that a run may have. A key with a value for each prompt would have a new baseline, of 0, for each
sample.
"""


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
MEMBERS = ("count", "leave_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMoments:
    """Sizes and moments of the groups' counted members, spread over all their samples."""

    sizes_N: Tensor
    mean_N: Tensor
    """Mean reward of the counted members; 0 in a group without any."""
    centered_N: Tensor
    """r_i less the mean of its group; exactly 0 where all rewards of the group are equal, and for samples that are not
    counted.
    """
    std_N: Tensor
    """Unbiased standard deviation (divides by size - 1); 0 in a group of one."""
    constant_N: Tensor
    """True where all rewards of the group are equal (a group of one or none included)."""


def group_moments(rewards_N: Tensor, groups_N: Tensor, counted_N: Tensor | None = None) -> GroupMoments:
    """Return the moments of every sample's group. ``groups_N``: integer ids, equal within a group; ``counted_N``: None
    = all.
    """
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


class Advantage(Protocol):
    """An advantage estimator: returns one advantage per sample, [N], in the dtype of the rewards."""

    def __call__(
        self,
        rewards_N: Tensor,
        groups_N: Tensor,
        *,
        lengths_N: Tensor | None = None,
        valid_N: Tensor | None = None,
        members: str = "count",
    ) -> Tensor: ...


def grpo(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    members: str = "count",
) -> Tensor:
    """Return ``(r_i - mean) / (std + 1e-6)`` within each group; 0 where all rewards are equal, and in a group of one.

    Source: DeepSeekMath, Shao et al. 2024.
    """
    moments = group_moments(rewards_N, groups_N, _counted(valid_N, members))
    return _own(moments.centered_N / (moments.std_N + STD_EPSILON), valid_N)


def grpo_no_std(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    members: str = "count",
) -> Tensor:
    """Return ``r_i - mean`` within each group; 0 where all rewards are equal, and in a group of one.

    The baseline includes the sample's own reward, so the mean gradient is (G - 1) / G of the true one. Source: Dr.
    GRPO, Liu et al. 2025.
    """
    return _own(group_moments(rewards_N, groups_N, _counted(valid_N, members)).centered_N, valid_N)


def batch_std(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    members: str = "count",
) -> Tensor:
    """Return ``(r_i - mean of the group) / (std of all rewards of the step + 1e-6)``; 0 where all rewards of the group
    are equal.

    Unlike in ``grpo``, all groups of a step share one scale, so a group with nearly equal rewards is not amplified.
    Source: Liu et al. 2025 (2508.08221).
    """
    counted_N = _counted(valid_N, members)
    everything = group_moments(rewards_N, torch.zeros_like(groups_N), counted_N)
    centered_N = group_moments(rewards_N, groups_N, counted_N).centered_N
    return _own(centered_N / (everything.std_N + STD_EPSILON), valid_N)


def rloo(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    members: str = "count",
) -> Tensor:
    """Return ``r_i - mean of the others = G / (G - 1) (r_i - mean)``; 0 in a group of one, and where all rewards are
    equal.

    The mean gradient is the true one. Source: Ahmadian et al. 2024, Kool et al. 2019.
    """
    moments = group_moments(rewards_N, groups_N, _counted(valid_N, members))
    return _own(moments.centered_N * moments.sizes_N / (moments.sizes_N - 1).clamp(min=1), valid_N)


def reinforce(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    members: str = "count",
) -> Tensor:
    """Return ``r_i``, independent of the group: no baseline, so the true gradient with the largest variance. Source:
    Williams 1992.
    """
    _counted(valid_N, members)
    return _own(rewards_N, valid_N)


def none(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    members: str = "count",
) -> Tensor:
    """Return 0 for every sample: rewards are measured, and nothing is learnt from them (distillation alone)."""
    _counted(valid_N, members)
    return torch.zeros_like(rewards_N)


def opo(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    members: str = "count",
) -> Tensor:
    """Return ``r_i - sum_j L_j r_j / sum_j L_j`` with L the trainable tokens; 0 where all rewards are equal, and in a
    group of one.

    This is the baseline of least variance if the squared norm of a response's score grows with its length; it includes
    the sample's own reward. It is the mean of the group where no counted member has a token; otherwise a member without
    tokens (a failure) has weight 0 under either ``members``. Raises ValueError without ``lengths_N``. Source: OPO, Hao
    et al. 2025.
    """
    if lengths_N is None:
        raise ValueError("lengths_N: opo weighs rewards by trainable tokens, got None")
    counted_N = _counted(valid_N, members)
    centered_N = group_moments(rewards_N, groups_N, counted_N).centered_N
    lengths_N = lengths_N.to(rewards_N.dtype)
    weights_N = lengths_N if counted_N is None else torch.where(counted_N, lengths_N, 0.0)
    # Two means over the same samples: their quotient is that of the sums. Centred rewards, so that equal ones give
    # exactly 0.
    total_N = group_moments(weights_N, groups_N).mean_N
    product_N = group_moments(weights_N * centered_N, groups_N).mean_N
    offset_N = product_N / torch.where(total_N > 0, total_N, torch.inf)
    return _own(centered_N - offset_N, valid_N)


def maxrl(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    members: str = "count",
) -> Tensor:
    """Return ``(r_i - mean) / mean`` within each group, for rewards >= 0; 0 where the mean is not above 1e-6 std or all
    rewards are equal.

    K successes of reward 1 and failures of 0: (G - K) / K and -1. With p the probability of success the mean gradient
    is ``(1 - (1 - p)^(G - 1)) grad log p``: likelihood rather than ``grad p``, as far as G samples can see it. Rewards
    of both signs can have a mean near 0 and advantages of about 1e6. Source: MaxRL 2602.02710.
    """
    moments = group_moments(rewards_N, groups_N, _counted(valid_N, members))
    positive_N = moments.mean_N > STD_EPSILON * moments.std_N
    return _own(moments.centered_N / torch.where(positive_N, moments.mean_N, torch.inf), valid_N)


def pass_at_k(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    members: str = "count",
    k: int = 2,
) -> Tensor:
    """Return the mean of ``(R - mean R) / std R`` over the sets of k samples of the group that include the sample.

    R of a set is 1 if any of its rewards is above 0, else 0; mean and std are over all sets. So one success in k is
    enough, and a group with fewer than k failures teaches nothing: its advantages are 0, as in a group of fewer than k.
    k = 1 is ``grpo`` of successes with the standard deviation ÷ G. Source: pass@k training, Chen et al. 2025
    (2508.10751), the analytical form.
    """
    counted_N = _counted(valid_N, members)
    failed_N = group_moments((rewards_N <= 0).to(rewards_N.dtype), groups_N, counted_N)
    sizes_N, failures_N = failed_N.sizes_N, (failed_N.mean_N * failed_N.sizes_N).round()
    all_fail_N, others_fail_N = torch.ones_like(rewards_N), torch.ones_like(rewards_N)
    for drawn in range(k):
        all_fail_N = all_fail_N * (failures_N - drawn).clamp(min=0) / (sizes_N - drawn).clamp(min=1)
        if drawn:
            others_fail_N = others_fail_N * (failures_N - drawn).clamp(min=0) / (sizes_N - drawn).clamp(min=1)
    deviation_N = (all_fail_N * (1 - all_fail_N)).sqrt()
    gain_N = torch.where(rewards_N > 0, all_fail_N, all_fail_N - others_fail_N)
    usable_N = (deviation_N > 0) & (sizes_N >= k)
    if counted_N is not None:
        usable_N = usable_N & counted_N
    return _own(torch.where(usable_N, gain_N / torch.where(usable_N, deviation_N, 1.0), 0.0), valid_N)


def gdpo(rewards_NK: Tensor, groups_N: Tensor, weights_K: Tensor) -> Tensor:
    """Return ``sum_k weight_k grpo(reward_k)`` for K rewards of every sample, [N]: each reward is normalised by itself
    within its group.

    The scale of a reward has no influence, and samples with equal sums of different parts keep different advantages.
    NaN: the sample has no such reward, which is then 0 for it and not in the statistics of its group. The method
    whitens the result over the step (``whitened``; over tokens here, over samples there). Source: GDPO 2601.05242.
    """
    parts_KN = torch.stack(
        [
            grpo(rewards_N, groups_N, valid_N=~rewards_N.isnan(), members="leave_out")
            for rewards_N in rewards_NK.unbind(1)
        ]
    )
    return (weights_K.to(parts_KN.dtype)[:, None] * parts_KN).sum(0)


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator, and whether its advantages are whitened."""

    function: Advantage
    whiten: bool = False
    """True: advantages are whitened over the trainable tokens of the step (``whitened``)."""


ADVANTAGES: Mapping[str, Estimator] = {
    "grpo": Estimator(grpo),
    "grpo_no_std": Estimator(grpo_no_std),
    "batch_std": Estimator(batch_std),
    "rloo": Estimator(rloo),
    "reinforce": Estimator(reinforce),
    "reinforce_pp": Estimator(reinforce, whiten=True),
    "reinforce_pp_baseline": Estimator(grpo_no_std, whiten=True),
    "opo": Estimator(opo),
    "maxrl": Estimator(maxrl),
    "pass_at_k": Estimator(pass_at_k),
    "gdpo": Estimator(grpo, whiten=True),
    "none": Estimator(none),
}
"""Estimators by the name in ``AlgorithmConfig.advantage``; ``gdpo`` of a reward without parts, which is then the only
part.

Source of reinforce_pp and its baseline: REINFORCE++, Hu et al. 2025.
"""


def _counted(valid_N: Tensor | None, members: str) -> Tensor | None:
    """Return the mask of the samples in the statistics; None = all. Raises ValueError for an unknown ``members``."""
    if members not in MEMBERS:
        raise ValueError(f"members: want {' | '.join(MEMBERS)}, got {members!r}")
    return valid_N if members == "leave_out" else None


def _own(advantages_N: Tensor, valid_N: Tensor | None) -> Tensor:
    return advantages_N if valid_N is None else torch.where(valid_N, advantages_N, 0.0)


# ---- whitening


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``(number, sum, sum of squares)`` of the unmasked values, float64 [3]; add them over rows and ranks, then
    call ``whitened``.

    ``mask``: bool, or the multiplicity of each value (tokens of a sample). The variance computed from the sums has a
    relative error of about 1e-16 mean^2 / variance. The mean of the variances of the ranks would be a different number.
    """
    counts, kept = mask.double(), torch.where(mask != 0, values, 0.0).double()
    return torch.stack([counts.sum(), (counts * kept).sum(), (counts * kept.square()).sum()])


def whitened(values: Tensor, mask: Tensor, moments: Tensor | None = None, *, shift: bool = True) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + 1e-8)``, plus the mean again without ``shift``; 0 where masked (counted 0
    times).

    ``moments``: those of all values of the step, over rows and ranks; None = ``values`` are all of them. The variance
    divides by their number (not by one less): one value, or equal values, give 0 up to rounding. Mask invalid samples:
    their 0 would become -mean / std.
    """
    number, total, squares = (masked_moments(values, mask) if moments is None else moments).unbind()
    mean = total / number.clamp(min=1)
    variance = (squares / number.clamp(min=1) - mean.square()).clamp(min=0)
    scaled = (torch.where(mask != 0, values, 0.0).double() - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return torch.where(mask != 0, scaled if shift else scaled + mean, 0.0).to(values.dtype)


# ---- rewards of tokens


def returns_to_go(token_rewards_T: Tensor, sample_T: Tensor, *, gamma: float, mask_T: Tensor | None = None) -> Tensor:
    """Return ``R_t = r_t + gamma R_next`` within each sample, [T], detached; 0 where masked and in padding
    (``sample_T`` < 0).

    Masked tokens pass the return on without discount, and their own rewards are ignored (``values.terminal_rewards``
    puts a reward at the last trainable token). ``mask_T`` None: every token of a sample is a step. REINFORCE++ whitens
    these returns over all tokens of the step, with ``r_t = -coef (log pi - log pi_ref)`` and the outcome at the last
    token.
    Raises ValueError for gamma outside 0..1. Source: REINFORCE++, Hu et al. 2025.
    """
    steps_T = sample_T >= 0 if mask_T is None else mask_T & (sample_T >= 0)
    return gae(token_rewards_T, torch.zeros_like(token_rewards_T), steps_T, sample_T, gamma=gamma, lam=1.0)[0]
