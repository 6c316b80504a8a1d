"""Name -> adapter: the only place that names backends. Each is imported when it is asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.config import EngineConfig

ENGINES = ("builtin", "sglang")
"""What ``engine.kind`` may be."""


def engine_factory(config: EngineConfig) -> Callable[[Path, EngineConfig], Any]:
    """What makes the engine a configuration names. Raises ValueError for a name there is none for."""
    match config.kind:
        case "builtin":
            from actors.serving.builtin.engine import BuiltinEngine

            return BuiltinEngine
        case "sglang":
            from actors.serving.sglang.engine import SglangEngine

            return SglangEngine
    raise ValueError(f"engine.kind: want {' or '.join(ENGINES)}, got {config.kind!r}")
