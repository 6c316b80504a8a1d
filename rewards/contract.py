"""Kinds of users' functions: how the argument of one is written for a child process, and which results it may have.

There is one contract for rewards (``rewards/registry.py``) and one for the filters of the learner (``learner/data/filters.py``).
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.bus.wire.json_object import JsonMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A kind of functions of users, which child processes run alike."""

    word: str
    """Name of the kind in messages: "reward"."""
    options: str
    """Setting of their options, in messages."""
    argument: str
    """Name of the first parameter's type, in messages."""
    path: str
    """Import path of this contract: child processes find it by this."""
    table: Mapping[str, str]
    """Import paths of the built-in functions by name."""
    encode: Callable[[Any], bytes]
    """Writes an argument as JSON. Raises TypeError, ValueError or RecursionError for values that JSON does not have."""
    decode: Callable[[JsonMapping], Any]
    """Returns the argument in the map that ``encode`` has written."""
    checked: Callable[[str, object], Any]
    """Returns the result of the function with this name, as JSON has it. Raises RewardFailed."""


def contract_at(path: str) -> Contract:
    """Return the contract at an import path."""
    module, _, name = path.partition(":")
    found: Contract = getattr(importlib.import_module(module), name)
    return found
