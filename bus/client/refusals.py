"""Messages and rows that were passed over because they could not be read: counted, and logged."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from tidemill.bus.errors import WireError
from tidemill.bus.system.failure_log import FailureLog

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_KNOWN = 4096
"""Number of places remembered, so that a message read again, or a row read every second, is counted once."""
_MAX_TEXT = 160


class Refusals:
    """The refusals of one connection. Memory is bounded, whatever arrives.

    Each message is counted once (until thousands of others): by its sequence, a row by key and revision.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Refusals by stream (``DEAD``) or bucket (``live``)."""
        self.newest = ""
        self._known: dict[tuple[str, str], None] = {}
        self._repeated = FailureLog(_log)

    def read(self, place: str, at: object, decode: Callable[[], T]) -> T | None:
        """Return the result of ``decode``; where it raises WireError, count a refusal and return None.

        ``place`` is the stream or bucket, ``at`` the sequence, or key and revision.
        """
        try:
            return decode()
        except WireError as error:
            self.refuse(place, at, error)
            return None

    def refuse(self, place: str, at: object, reason: object) -> None:
        """Count one refusal, and log it unless another one of this place was logged within a minute."""
        message = (place, str(at))
        if message in self._known:
            return
        self._known[message] = None
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self.counts[place] += 1
        self.newest = _short(f"{place} {at}: {reason}")
        self._repeated(f"unreadable in {place}, passed over", self.newest)

    def __str__(self) -> str:
        """Return ``3 unreadable messages (DEAD 2, live 1), newest: DEAD 17: ...``; empty for none."""
        if not self.counts:
            return ""
        total = self.counts.total()
        places = ", ".join(f"{place} {count}" for place, count in sorted(self.counts.items()))
        return f"{total} unreadable message{'s' if total > 1 else ''} ({places}), newest: {self.newest}"


def _short(text: str) -> str:
    plain = "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_TEXT])
    return plain if len(text) <= _MAX_TEXT else f"{plain}..."
