"""``multi_turn`` for an interpreter of its own (``rollouts.NAME.python``), which has aiohttp and nothing of ours installed.

Loaded as a file. Our packages are found where this file lies, by their own paths: nothing that is installed beside them can be imported.
"""

import sys
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[3]


def _find(name: str) -> None:
    """Make one of our packages importable, unless the interpreter has it."""
    package = ModuleType(name)
    package.__path__ = [str(_ROOT / name)]
    sys.modules.setdefault(name, package)


for _name in ("actors", "rewards", "bus"):
    _find(_name)

from tidemill.actors.episodes.programs.multi_turn import MultiTurn  # noqa: E402  # behind what finds it

__all__ = ["MultiTurn"]
