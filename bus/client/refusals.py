"""Subjects that the server refuses to this process's user. It reports them by an error of the connection, which answers
no request: listeners end the requests that would wait.
"""

import logging
import re
import time
from collections.abc import Callable

from tidemill.bus.errors import Forbidden
from tidemill.bus.system.output import FailureLog

_log = logging.getLogger(__name__)

_FORBIDDEN_S = 10.0  # Seconds for which a forbidden subject is not tried again; permissions may have changed afterwards
# The server's error for a forbidden subject, which has no code
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)
# Prefix of requests that may be refused: the server removes idle consumers by itself, too
_CLEANUP = "$js.api.consumer.delete."
_ROW = "$kv.tm_"  # Prefix of rows of any run, in lower case
_SHADOW = "shadow-"  # Prefix of the user of a shadow learner ``NAME``, which writes the rows of the run ``<run>-NAME``


class Refusals:
    """The recent refusals of one connection, and the listeners that claim them."""

    def __init__(self) -> None:
        self._listeners: set[Callable[[Forbidden], bool]] = set()
        # Recent refusals with their time, by subject in lower case, as the client library reports it
        self._recent: dict[str, tuple[Forbidden, float]] = {}
        self._repeated = FailureLog(_log)

    def on_forbidden(self, listener: Callable[[Forbidden], bool]) -> Callable[[], None]:
        """Call ``listener`` whenever the server refuses a publish. Returns a function that removes it.

        ``subject`` of the error is in lower case. The listener returns whether it claims the publish; others are
        logged.
        """
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def check_allowed(self, subject: str) -> None:
        """Raise Forbidden for a subject that the server refused within the last 10 s."""
        if not self._recent:
            return
        error, since = self._recent.get(subject.lower(), (None, 0.0))
        if error is None:
            return
        if time.monotonic() - since < _FORBIDDEN_S:
            raise Forbidden(subject, error.verb, error.user)
        del self._recent[subject.lower()]

    def record(self, text: str, user: str) -> bool:
        """Record the refusal that an error of the server reports. Returns False for any other error."""
        violation = _VIOLATION.search(text)
        if violation is None:
            return False
        verb, subject = violation[1].lower(), violation[2]
        self._record(Forbidden(subject, "publish" if verb == "publish" else "subscribe", user))
        return True

    def clear(self) -> None:
        """Forget the refusals: permissions may have changed while there was no connection."""
        self._recent.clear()

    def _record(self, error: Forbidden) -> None:
        subject = error.subject.lower()
        if subject.startswith(_CLEANUP):
            _log.debug("bus: cleanup request refused, the server removes idle consumers itself: %s", error)
            return
        claimed = False
        if error.verb == "publish":
            self._recent[subject] = (error, time.monotonic())
            claimed = any([listener(error) for listener in list(self._listeners)])
        if claimed:
            return
        # Without the subscription to a row's changes a process still reads the row every few seconds (``Rows.watch``).
        if error.verb == "subscribe" and subject.startswith(_ROW):
            level = logging.INFO if _is_own_row_of_shadow(subject, error.user) else logging.WARNING
            self._repeated(f"bus: changes of {error.subject} are seen late", str(error), level=level)
        else:
            _log.error("bus: %s", error)


def _is_own_row_of_shadow(subject: str, user: str) -> bool:
    """Return whether a shadow's user writes this row (in lower case): no user subscribes to what it writes, or it could
    answer itself in a circle.
    """
    bucket = subject.removeprefix(_ROW).partition(".")[0]
    name = user.lower().removeprefix(_SHADOW)
    return user.startswith(_SHADOW) and bucket.rpartition("_")[0].endswith(f"-{name}")
