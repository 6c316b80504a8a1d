"""Messages, streams and rows: all that crosses from one Tidemill process to another. Imports no torch."""

from typing import TYPE_CHECKING

from tidemill.bus.public_names import public_names

if TYPE_CHECKING:
    from tidemill.bus.wire.messages import Sample, Task, score_of
    from tidemill.bus.wire.rows import Capabilities
    from tidemill.bus.wire.subjects import nonce

_MODULES = {
    "Capabilities": "wire.rows",
    "Sample": "wire.messages",
    "Task": "wire.messages",
    "nonce": "wire.subjects",
    "score_of": "wire.messages",
}
__all__ = ["Capabilities", "Sample", "Task", "nonce", "score_of"]
__getattr__ = public_names(__name__, _MODULES)
