"""What the training of a family needs beside the rules for all of them: one module in ``families``, named as its
``model_type``.

Shape letters: B = sequences of a bucket, L = their padded length, T = tokens of a row, H = hidden units.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidemill.bus.system.functions import find_object
from tidemill.learner.errors import ConfigRefused

SETTING, WANT = "learner.family", "module:name"
_PLACE = "tidemill.learner.backends.fsdp.families"


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
    """Return the rules for a configuration of transformers; the general ones where its family has no module."""
    name = f"{_PLACE}.{config.model_type}"
    if importlib.util.find_spec(name) is None:
        return Family()
    family: Family = importlib.import_module(name).FAMILY
    return family
