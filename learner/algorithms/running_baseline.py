"""Role-conditioned advantage estimation (RAE): rewards less a running mean of the rewards of the same role, which outlives the step.

Pure functions; N = samples of the step. The trainer keeps the baselines between steps and in the checkpoint. They depend on the rewards and
the roles of the steps taken so far and on nothing else, so a step that is repeated computes the same advantages.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MOST_ROLES = 1024
"""Most baselines that a run may have. A key with a value for each prompt would have a new baseline, of 0, for each sample."""


def roles_of(metadata: Sequence[Mapping[str, object]], key: str, *, num_samples: int) -> list[str]:
    """Return the role of each sample: its metadata at ``key`` as text, "" without it; all "" for an empty key.

    Raises ValueError if no sample has the key.
    """
    if not key:
        return [""] * num_samples
    if not any(key in one for one in metadata):
        found = sorted({name for one in metadata for name in one})
        raise ValueError(f"algorithm.rae_role: want a key of the samples' metadata, got {key!r}; the samples of the step have {found}")
    return [str(one.get(key, "")) for one in metadata]


def over_baselines(
    rewards_N: Tensor, roles: Sequence[str], baselines: Mapping[str, float], *, decay: float
) -> tuple[Tensor, dict[str, float]]:
    """Return (``r_i - b_role``, the baselines after the step); a role has baseline 0 until its first reward.

    All samples of a step are compared with the baseline before it, which none of them has influenced. Then n rewards of a role move it to
    ``decay^n b + (1 - decay^n) mean``, in any order of the samples to the bit: one reward as in the source, and n equal ones as one after
    another there. A reward that is not finite, whose step is skipped, moves none. Raises ValueError for more than ``MOST_ROLES`` roles.
    Source: SPIRAL, Liu et al. 2025 (2506.24119), section on RAE, decay 0.95; each reward compared before it moves the baseline, as there.
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
        raise ValueError(f"algorithm.rae_role: want at most {MOST_ROLES} roles in a run, got {len(after)}, such as {max(by_role)!r}")
    return rewards_N - before_N.to(rewards_N.dtype), after
