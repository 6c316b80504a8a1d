"""Reward functions, one per file, selected by name or import path."""

from typing import TYPE_CHECKING

from tidemill.bus.public_names import public_names

if TYPE_CHECKING:
    from tidemill.rewards.group import GroupRequest
    from tidemill.rewards.port import RewardRequest

_MODULES = {
    "GroupRequest": "group",
    "RewardRequest": "port",
}
__all__ = ["GroupRequest", "RewardRequest"]
__getattr__ = public_names(__name__, _MODULES)
