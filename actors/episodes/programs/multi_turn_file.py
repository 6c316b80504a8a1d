"""``multi_turn`` for an interpreter of its own (``rollouts.NAME.python``), which has aiohttp and nothing of ours
installed.

Loaded as a file. Our packages are found where this file lies, by their own paths: nothing that is installed beside them
can be imported.
"""

import sys
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[3]
_PACKAGE = ModuleType("tidemill")
_PACKAGE.__path__ = [str(_ROOT)]  # its folders, without its own module: that is elsewhere in a checkout
sys.modules.setdefault("tidemill", _PACKAGE)

from tidemill.actors.episodes.programs.multi_turn import MultiTurn  # noqa: E402  # behind the package in which it is

__all__ = ["MultiTurn"]
