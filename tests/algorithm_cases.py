"""Algorithms that are trained in tests: every preset, and settings that no preset uses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.algorithm_settings import algorithm_of
from tests.examples import THOROUGH
from tidemill.learner.algorithms.choices import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, PRESETS
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.policy_losses import LOSS_FUNCTIONS, PolicyLoss
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.algorithms.tokens import Tokens

KL = KLConfig(coef=0.1)
ENGINE: dict[str, Any] = {"advantage": "none", "distill": {"coef": 0.5, "teacher": "engine"}}


def _listed(loss: str) -> dict[str, Any]:
    return ENGINE | {"distill": ENGINE["distill"] | {"loss": loss, "top_k": 3}}


REFERENCE = "reverse distillation over the reference's tokens"
RUNNING = "running baseline"
SHOWN = "demonstrations alone"
EVERY_TERM = "every term of the loss"
EVERY_REJECTION = "every rejection"
EQUAL_REWARDS = "groups of equal rewards, and long prompts"
CASES: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "distillation over listed tokens": (_listed("forward_kl"), 2),
    **{name: ({"correction": name}, 1) for name in PRESETS},
    **{
        f"{name} in 2 minibatches": ({"correction": name}, 2)
        for name in ("naive", "bypass", "tis", "decoupled", "m2po", "cispo", "gspo")
    },
    **{f"advantage {name}": ({"advantage": name}, 1) for name in ADVANTAGES if name not in ("grpo", "none")},
    **{f"aggregation {name}": ({"aggregation": name, "entropy": {"coef": 0.01}}, 2) for name in AGGREGATIONS},
    **{f"kl {name}": ({"kl": KLConfig(coef=0.1, estimator=name)}, 1) for name in KL_ESTIMATORS},
    "kpop, tight": ({"correction": "kpop", "reject": {"binary_kl": 0.003}}, 1),
    "geo_mask, loose": ({"correction": "geo_mask", "reject": {"rules": ("k1 seq_mean 0.9 1.1",)}}, 1),
    "kl uncorrected": ({"kl": KLConfig(coef=0.1, estimator="k2", corrected=False)}, 1),
    "kl in the reward, adaptive": ({"kl": KLConfig(reward_coef=0.05, target=0.01, horizon=100)}, 2),
    "kl in the reward of tokens": (
        {"advantage": "reinforce_pp_baseline", "kl": KLConfig(reward_coef=0.05, reward_by="token")},
        1,
    ),
    "distillation": ({"advantage": "reinforce", "distill": {"coef": 1.0}}, 1),
    REFERENCE: ({"advantage": "none", "distill": {"coef": 0.5, "loss": "reverse_kl", "top_k": 3}}, 1),
    "distillation from an engine": (ENGINE | {"advantage": "grpo"}, 2),
    "reverse distillation over listed tokens": (_listed("reverse_kl"), 1),
    "whitened": ({"whiten": True}, 1),
    "overlong": ({"overlong": {"buffer": 6, "penalty": 0.5}}, 1),
    "dual clip": ({"correction": "bypass", "clip": {"dual": 1.5}}, 1),
    "lower bound": ({"weight": {"low": 0.8, "high": 1.2}}, 1),
    "truncate": ({"weight": {"action": "truncate", "high": 1.1}}, 1),
    "prefix weights": ({"weight": {"level": "prefix"}}, 1),
    "geometric weights": ({"weight": {"level": "geometric"}}, 1),
    "self-normalised": ({"weight": {"self_normalise": True, "high": 1.2}}, 2),
    "self-normalised sequences": ({"weight": {"level": "sequence", "self_normalise": True}}, 1),
    "rejections": ({"reject": {"rules": ("k1 token 0.3 3", "k3 seq_mean 0.4", "k2 seq_max 1.5"), "veto": 0.2}}, 1),
    "top entropy": ({"top_entropy": 0.2}, 2),
    "ess_lr": ({"ess_lr": 1.0}, 2),
    SHOWN: ({"correction": "sft"}, 2),
    EVERY_TERM: (
        {
            **_listed("forward_kl"),
            "advantage": "grpo",
            "loss": f"{__name__}:reporting",
            "clip": {"low": 2e-3, "high": 2e-3},
            "weight": {"low": 0.5},
            "sft_coef": 0.5,
            "kl": KL,
            "entropy": {"coef": 0.01, "target": 6.0},
            "top_entropy": 0.5,
            "ess_lr": 1.0,
        },
        2,
    ),
    EVERY_REJECTION: (
        {
            "advantage": "rae",
            "distill": {"coef": 0.5, "loss": "reverse_kl", "top_k": 3},
            "weight": {"self_normalise": True},
            "reject": {
                "rules": ("k1 token 0.05 20", "k1 seq_mean 0.3 3", "k3 seq_mean 3", "k2 seq_max 10", f"{__name__}:far"),
                "veto": 0.01,
                "binary_kl": 0.02,
                "opsm": 0.8,
            },
            "m2": {"limit": 3.0},
        },
        2,
    ),
    "discounted returns": ({"advantage": "reinforce_pp", "gamma": 0.9}, 1),
    "discounted, kl in the reward of tokens": (
        {"advantage": "reinforce", "gamma": 0.95, "kl": KLConfig(reward_coef=0.05, reward_by="token")},
        2,
    ),
    RUNNING: ({"advantage": "rae"}, 2),
    EQUAL_REWARDS: ({"advantage": "grpo_no_std", "aggregation": "seq_mean_token_mean"}, 2),
}
"""Cases by name: (settings, minibatches)."""
EVERYWHERE = (EVERY_TERM, EVERY_REJECTION, EQUAL_REWARDS)
"""Cases that a layout trains besides those of its stride: together they have every metric, a teacher's and the
reference's tokens, and a running baseline.
"""
ALTERNATIVES = (
    "naive in 2 minibatches",
    "bypass in 2 minibatches",
    "tis in 2 minibatches",
    "decoupled in 2 minibatches",
    "m2po in 2 minibatches",
    "cispo in 2 minibatches",
    *(f"advantage {name}" for name in ADVANTAGES if name not in ("gae", "vtrace")),
    *(f"aggregation {name}" for name in AGGREGATIONS if name != "prompt_mean"),
    *(f"kl {name}" for name in KL_ESTIMATORS if name != "k3"),
)
"""Cases that are one choice of a kind of which another one is tried everywhere: their formulas have tests of their own
(``tests/unit/test_algorithms_*``).
"""
TRIED: Sequence[str] = [name for name in CASES if THOROUGH or name not in ALTERNATIVES]
"""Cases that are trained: all, or one of each kind."""
SHOWN_GROUPS: Mapping[str, int] = {SHOWN: 6, EVERY_TERM: 2}
"""Groups of demonstrations among the six of a step."""
OWN_TEMPERATURES = (EVERY_REJECTION,)
"""Cases with another temperature for each group."""
FRESH = (EVERY_TERM,)
"""Cases with samples that the newest weights alone have made, others that are older than usual, responses that ran into
their limit, and a group of equal rewards.
"""


def reporting(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    """A loss of one's own, that of PPO with metrics."""
    made = LOSS_FUNCTIONS["ppo"](log_probs_T, anchor_T, tokens, config)
    return replace(made, metrics={"surprise": -log_probs_T, "advantage": tokens.advantages_T})


def far(delta_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """A rule of one's own."""
    return delta_T.abs() > 3.5


def algorithm(name: str) -> AlgorithmConfig:
    return algorithm_of(**CASES[name][0])
