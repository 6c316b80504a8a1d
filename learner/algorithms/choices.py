"""Names of the built-in estimators, losses, aggregations and divergences; the presets, with their sources."""

from collections.abc import Mapping

OF_GROUPS = ("grpo", "grpo_no_std", "batch_std", "rloo", "reinforce_pp_baseline", "opo", "maxrl", "pass_at_k", "gdpo")
"""Estimators that compare the samples of a group; in a group of one the advantage is 0."""
ADVANTAGES = (*OF_GROUPS, "reinforce", "reinforce_pp", "none")
BY_CRITIC = ("gae", "vtrace")
"""Estimators of one advantage per token, from the values of a critic (``learner/algorithms/gae_vtrace.py``)."""
DISCOUNTED = ("reinforce", "reinforce_pp")
"""Estimators without a baseline of rewards, whose return may be discounted by token (``token_returns.py``)."""
OFFERED = ("lengths_N", "truncated_N", "parts", "metadata")
"""Arguments that an estimator by import path may ask for, by the names of its parameters."""
_OF_TOKENS = ("delta_T", "mask_T", "sequence_T", "num_sequences")
OWN_ARGUMENTS = {
    "advantage": ("rewards_N", "groups_N"),
    "loss": ("log_probs_T", "anchor_T", "tokens", "config"),
    "weight.level": _OF_TOKENS,
    "reject.rules": _OF_TOKENS,
    "aggregation": ("mask_T", "sample_T", "denominators"),
}
"""Positional arguments of a function by import path, by setting."""
RUNNING = ("rae",)
"""Estimators with a baseline that is carried from step to step (``learner/algorithms/advantages.py``)."""
CREDITS = ("episode", "turn")
OF_TURNS = ("grpo_no_std", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline")
"""Estimators that know turns (``learner/algorithms/token_returns.py``)."""
IN_REWARD = (*OF_TURNS, *RUNNING)
"""Estimators without a critic whose advantages are in units of the reward."""
BY_COVARIANCE = ("clip_cov", "kl_cov")
"""Losses that treat tokens of large covariance (advantage, log-prob) apart."""
BOUNDED = ("ppo", "clip_cov", "cispo", "gspo", "gspo_token", "gmpo", "dppo_tv", "dppo_kl", "ipo")
"""Losses with a trust region, or with bounds of their weight: they need clip.low and clip.high."""
ANCHORED = (*BOUNDED, "kl_cov", "topr", "sapo", "vespo", "dro")
"""Losses that compare the new policy with an anchor."""
LOSSES = (*ANCHORED, "reinforce", "sft")
OF_ADVANTAGE = (
    "ppo",
    "cispo",
    "gspo",
    "gspo_token",
    "gmpo",
    "dppo_tv",
    "dppo_kl",
    "ipo",
    "topr",
    "sapo",
    "vespo",
    "reinforce",
)
"""Losses of a token that are its advantage times a factor (those of ``DPPO`` without their penalty): 0, with a gradient
of 0, where the advantage is 0. That of clip_cov is, too, but its choice of tokens depends on all of them.
"""
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean", "token_sum", "constant")
WEIGHTS = ("none", "token", "sequence", "geometric", "prefix")
DPPO = ("dppo_tv", "dppo_kl", "ipo")
"""Losses with a trust region of the probability or of its divergence."""
KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "k1+", "k3+")

# ---- presets: settings of the objective and of the off-policy correction, by path

_PPO: dict[str, object] = {"loss": "ppo", "anchor": "proximal", "clip.low": 0.2, "clip.high": 0.28}
"""Range: DAPO 2503.14476."""
_TIS: dict[str, object] = {"weight.level": "token", "weight.action": "clip", "weight.low": 0.0, "weight.high": 2.0}
"""Cap of 2: Yao et al. 2025."""
_NONE: dict[str, object] = {"weight.level": "none", "weight.action": "clip", "weight.low": 0.0, "weight.high": 0.0}
_PLAIN: dict[str, object] = {"loss": "reinforce", "anchor": "none", "clip.low": 0.0, "clip.high": 0.0}
_PRIME: dict[str, object] = {"dppo.penalty": 1e-3}
"""Default of prime-rl in both of its losses; verl's dppo_tv has no such term."""

PRESETS: Mapping[str, Mapping[str, object]] = {
    "none": _PLAIN | _NONE,
    "naive": _PPO | _NONE,
    "bypass": _PPO | _NONE | {"anchor": "rollout"},
    "tis": _PLAIN | _TIS,
    "aipo": _PLAIN | _TIS | {"weight.high": 4.0},
    "decoupled": _PPO | _TIS,
    "a3po": _PPO | _TIS | {"proximal": "loglinear"},
    "mis": _PPO | _TIS | {"weight.action": "mask", "weight.low": 0.5},
    "icepop": _PPO | _TIS | {"weight.action": "mask", "weight.low": 0.5, "weight.high": 5.0},
    "seq_tis": _PPO | _TIS | {"weight.level": "sequence"},
    "seq_mis": _PPO | _TIS | {"weight.level": "sequence", "weight.action": "mask", "weight.low": 0.5},
    "geo_mask": _PPO | _TIS | {"reject.rules": ("k1 seq_mean 0.99 1.01",)},
    "kpop": _PPO | _TIS | {"reject.binary_kl": 2.0},
    "opsm": _PPO | _TIS | {"reject.opsm": 0.5},
    "m2po": _PLAIN | _TIS | {"weight.high": 0.0, "m2.limit": 0.04},
    "m2po_harmful": _PLAIN
    | _TIS
    | {"weight.high": 0.0, "m2.limit": 0.04, "m2.tokens": "harmful", "m2.keep_low": 0.7, "m2.keep_high": 1.5},
    "cispo": _PPO | _NONE | {"loss": "cispo", "anchor": "rollout", "clip.low": 1.0, "clip.high": 4.0},
    "gspo": _PPO | _TIS | {"loss": "gspo", "clip.low": 3e-4, "clip.high": 4e-4, "aggregation": "seq_mean_token_mean"},
    "gspo_token": _PPO
    | _TIS
    | {"loss": "gspo_token", "clip.low": 3e-4, "clip.high": 4e-4, "aggregation": "seq_mean_token_mean"},
    "luspo": _PPO | _TIS | {"loss": "gspo", "clip.low": 3e-4, "clip.high": 4e-4, "aggregation": "seq_mean_token_sum"},
    "gmpo": _PPO | _TIS | {"loss": "gmpo", "clip.low": 0.4, "clip.high": 0.4, "aggregation": "seq_mean_token_mean"},
    "clip_cov": _PPO | _TIS | {"loss": "clip_cov"},
    "kl_cov": _PLAIN | _NONE | {"loss": "kl_cov", "anchor": "rollout"},
    "topr": _PLAIN | _NONE | {"loss": "topr", "anchor": "rollout"},
    "sapo": _PLAIN | _NONE | {"loss": "sapo", "anchor": "rollout", "aggregation": "seq_mean_token_mean"},
    "vespo": _PLAIN | _NONE | {"loss": "vespo", "anchor": "rollout"},
    "dppo_tv": _PPO | _NONE | _PRIME | {"loss": "dppo_tv", "anchor": "rollout", "clip.low": 0.2, "clip.high": 0.2},
    "dppo_kl": _PPO | _NONE | {"loss": "dppo_kl", "anchor": "rollout", "clip.low": 0.05, "clip.high": 0.05},
    "ipo": _PPO | _NONE | _PRIME | {"loss": "ipo", "anchor": "rollout", "clip.low": 0.1, "clip.high": 0.1},
    "dro": _PLAIN | _NONE | {"loss": "dro", "anchor": "rollout"},
    "sft": _PLAIN | _NONE | {"loss": "sft"},
}
"""Settings of each preset; a setting that a preset does not name has the default below."""
DEFAULTS: dict[str, object] = {
    "proximal": "recompute",
    "reject.rules": (),
    "reject.binary_kl": 0.0,
    "reject.opsm": 0.0,
    "m2.limit": 0.0,
    "m2.tokens": "all",
    "m2.keep_low": 0.0,
    "m2.keep_high": 0.0,
    "dppo.penalty": 0.0,
    "aggregation": "token_mean",
}
"""Settings that a preset fills and need not name."""
