"""Name -> adapter: the only place that names backends. Each is imported when it is requested."""

from typing import TYPE_CHECKING

from tidemill.actors.config import EngineConfig

if TYPE_CHECKING:
    from tidemill.actors.serving.port import Factory

ENGINES = ("builtin", "sglang")
"""Allowed values of ``engine.kind``."""


def engine_factory(config: EngineConfig) -> "Factory":
    """Return the factory of the engine that ``config.kind`` names. Raises ValueError for an unknown name."""
    match config.kind:
        case "builtin":
            from tidemill.actors.serving.builtin.engine import BuiltinEngine

            return BuiltinEngine
        case "sglang":
            from tidemill.actors.serving.sglang.engine import SglangEngine

            return SglangEngine
    raise ValueError(f"engine.kind: want {' or '.join(ENGINES)}, got {config.kind!r}")
