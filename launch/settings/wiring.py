"""Name -> adapter: the only place that names backends. Each is imported when it is requested."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.config import EngineConfig

ENGINES = ("builtin", "sglang")
"""Allowed values of ``engine.kind``."""


def engine_factory(config: EngineConfig) -> Callable[[Path, EngineConfig], Any]:
    """Return the factory of the engine that ``config.kind`` names. Raises ValueError for an unknown name."""
    match config.kind:
        case "builtin":
            from actors.serving.builtin.engine import BuiltinEngine

            return BuiltinEngine
        case "sglang":
            from actors.serving.sglang.engine import SglangEngine

            return SglangEngine
    raise ValueError(f"engine.kind: want {' or '.join(ENGINES)}, got {config.kind!r}")
