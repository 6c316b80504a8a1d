"""Rollout: the actor that turns tasks into samples, and the engines that generate for it."""

from typing import TYPE_CHECKING

from tidemill.bus.public_names import public_names

if TYPE_CHECKING:
    from tidemill.actors.config import EngineConfig
    from tidemill.actors.http_api import NONCE_HEADER

_MODULES = {
    "EngineConfig": "config",
    "NONCE_HEADER": "http_api",
}
__all__ = ["NONCE_HEADER", "EngineConfig"]
__getattr__ = public_names(__name__, _MODULES)
