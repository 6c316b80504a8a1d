"""Settings of the algorithm from plain maps, as a configuration file has them."""

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from tidemill.bus.section import read
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.policy_losses import LOSS_FUNCTIONS, PolicyLoss
from tidemill.learner.algorithms.tokens import Tokens


def algorithm_of(**settings: Any) -> AlgorithmConfig:
    """Return the settings; a section is a map or an instance."""
    plain = {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
        for name, value in settings.items()
    }
    return cast(AlgorithmConfig, read(AlgorithmConfig, plain))


_SECTIONS = {
    **dict.fromkeys(("low", "high", "dual"), "clip"),
    **dict.fromkeys(("penalty", "ratio_cap"), "dppo"),
    **dict.fromkeys(("tau_positive", "tau_negative"), "sapo"),
    "tau": "dro",
}
_PRESETS = {"ppo": "bypass", "reinforce": "none"}


def loss_by(
    name: str,
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor | None = None,
    sample_T: Tensor | None = None,
    num_samples: int = 1,
    **settings: float,
) -> PolicyLoss:
    """Return the built-in loss of a row with these settings of its sections; the preset has the others."""
    sections: dict[str, dict[str, float]] = {"dppo": {"penalty": 0.0}} if name in ("dppo_tv", "dppo_kl", "ipo") else {}
    for setting, value in settings.items():
        sections.setdefault(_SECTIONS[setting], {})[setting] = value
    sample_T = torch.zeros(len(log_probs_T), dtype=torch.int64) if sample_T is None else sample_T
    tokens = Tokens(
        mask_T=torch.ones(len(log_probs_T), dtype=torch.bool) if mask_T is None else mask_T,
        sample_T=sample_T,
        num_samples=num_samples,
        rollout_T=anchor_T,
        lag_T=torch.zeros_like(sample_T),
        advantages_T=advantages_T,
    )
    config = algorithm_of(correction=_PRESETS.get(name, name), **sections)
    return LOSS_FUNCTIONS[name](log_probs_T, anchor_T, tokens, config)
