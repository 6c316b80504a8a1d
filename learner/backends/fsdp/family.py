"""What the training of a family of transformers needs beside the rules for all of them.

Shape letters: B = sequences of a bucket, L = their padded length, T = tokens of a row, H = hidden units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidemill.bus.system.functions import find_object
from tidemill.learner.errors import ConfigRefused

SETTING, WANT = "learner.family", "module:name"


def has_convolution(module: torch.nn.Module) -> bool:
    """Return whether a module has a convolution over time, which is the first step of most mixers."""
    return any(isinstance(child, torch.nn.Conv1d) for child in module.children())


def first_output(forward: Callable[..., Any], hidden_BLH: Tensor, *positional: Any, **arguments: Any) -> Tensor:
    """Return a mixer's hidden states, without what else it returns."""
    output = forward(hidden_BLH, *positional, **arguments)
    states_BLH: Tensor = output[0] if isinstance(output, tuple) else output
    return states_BLH


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rules of a family. The self-test at the start of a run tries them."""

    is_mixer: Callable[[torch.nn.Module], bool] = has_convolution
    """Whether a module carries a state from token to token, and has to compute each sequence of a row alone."""
    mix: Callable[..., Tensor] = first_output
    """``(forward, hidden_BLH, *positional, **arguments)`` -> [B, L, H]: a call of such a module for whole sequences,
    padded on the right. ``arguments``: those of the row, without the ones about its tokens (masks, positions).
    """
    result: Callable[[Tensor], Any] = lambda hidden_1TH: hidden_1TH
    """What the module returns to its layer for the hidden states of the row, [1, T, H]."""
    fit: Callable[[dict[str, Any]], None] = lambda settings: None
    """Changes the settings of the small model of the self-test, whose layers, widths and heads have been cut."""


def load_family(path: str) -> Family | None:
    """Return the user's rules at ``module:name``; None = the path is empty. Call it before the configuration is read,
    because the module may register its model type with transformers. Raises FunctionRefused, ConfigRefused.
    """
    if not path:
        return None
    family = find_object(path, SETTING, want=WANT)
    if not isinstance(family, Family):
        raise ConfigRefused(SETTING, f"{WANT}, a Family", f"{path}: {type(family).__name__}")
    return family


def family_of(config: Any) -> Family:
    """Return the rules for a configuration of transformers; the general ones for a family that has no own ones."""
    return FAMILIES.get(config.model_type, Family())


def _fit_falcon_h1(settings: dict[str, Any]) -> None:
    settings["mamba_d_ssm"] = settings["mamba_n_heads"] * settings["mamba_d_head"]


def _fit_zamba2(settings: dict[str, Any]) -> None:
    width = settings["hidden_size"]
    settings["mamba_headdim"] = settings["mamba_expand"] * width // settings["n_mamba_heads"]
    settings["attention_hidden_size"] = 2 * width
    settings["head_dim"] = 2 * width // settings["num_attention_heads"]


def _mix_minimax(forward: Callable[..., Any], hidden_BLH: Tensor, **arguments: Any) -> Tensor:
    return first_output(forward, hidden_BLH, attention_mask=None, **arguments)


FAMILIES = {
    # The width of its states is a setting beside the number and the size of their heads.
    "falcon_h1": Family(fit=_fit_falcon_h1),
    # Its lightning attention is a recurrent state without a convolution, and its layers unpack a pair.
    "minimax": Family(
        is_mixer=lambda module: type(module).__name__ == "MiniMaxLightningAttention",
        mix=_mix_minimax,
        result=lambda hidden_1TH: (hidden_1TH, None),
        fit=lambda settings: settings.update(block_size=8),
    ),
    # Its layers hold two attentions each, and their number has a name of its own.
    "longcat_flash": Family(fit=lambda settings: settings.update(num_layers=2)),
    # The widths of its states and of its shared attention are computed from others.
    "zamba2": Family(fit=_fit_zamba2),
    # A recurrent state without a convolution. The width stands alone, because there is no attention.
    "xlstm": Family(
        is_mixer=lambda module: type(module).__name__ == "xLSTMLayer",
        result=lambda hidden_1TH: (hidden_1TH, None),
        fit=lambda settings: settings.update(hidden_size=64, embedding_dim=64, num_heads=4, num_blocks=2),
    ),
}
"""Rules by ``model_type`` (docs/families.md)."""
