"""Names of the built-in estimators, units of credit, losses, aggregations and estimates of a divergence."""

OF_GROUPS = ("grpo", "grpo_no_std", "batch_std", "rloo", "reinforce_pp_baseline", "opo", "maxrl", "pass_at_k", "gdpo")
"""Estimators that compare the samples of a group; in a group of one the advantage is 0."""
ADVANTAGES = (*OF_GROUPS, "reinforce", "reinforce_pp", "none")
BY_CRITIC = ("gae", "vtrace")
"""Estimators of one advantage per token, from the values of a critic (``learner/algorithms/token_advantages.py``)."""
DISCOUNTED = ("reinforce", "reinforce_pp")
"""Estimators without a baseline of rewards, whose return may be discounted by token
(``learner/algorithms/token_returns.py``).
"""
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
