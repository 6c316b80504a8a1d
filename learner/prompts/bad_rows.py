"""Rows that cannot be used: skipped, counted and named, or refused (``data.bad_rows``). Reads no row."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tidemill.bus.system.functions import described, errors_as
from tidemill.learner.data import REFUSE, SKIP
from tidemill.learner.errors import CannotRender, PromptError, TemplateLacks, TextTooLong

log = logging.getLogger(__name__)

MAX_LOGGED = 1000
"""Maximum number of rows that are named in the log."""


class RowTooLong(PromptError):
    """A prompt, or a recorded sequence, has more tokens than fit."""


class BadRows:
    """The bad rows of one set of prompts that were met so far."""

    def __init__(self, policy: str = SKIP) -> None:
        self.policy = policy
        self._numbers: set[int] = set()
        self._first: PromptError | None = None

    def __len__(self) -> int:
        """Return their number; a row that is met in several passes counts once."""
        return len(self._numbers)

    def add(self, number: int, error: PromptError) -> None:
        """Count and log the row ``number``. Raises its error where bad rows are refused."""
        if self.policy == REFUSE:
            raise error
        if number in self._numbers:
            return
        self._numbers.add(number)
        self._first = self._first or error
        if len(self) <= MAX_LOGGED:
            log.warning("row skipped count=%d %s", len(self), error)
        elif len(self) == MAX_LOGGED + 1:
            log.warning("further bad rows are counted alone; tidemill data check names all of them")

    def trouble(self, total: int) -> str:
        """Return their number and the first one, for status; empty while there are none. ``total``: number of rows."""
        if not self._numbers:
            return ""
        return f"{len(self)} of {total} rows left out so far (data.bad_rows), the first: {self._first}"


def all_bad(first: PromptError, place: str, count: int) -> PromptError:
    """Return the error for ``place`` if none of its ``count`` rows can be used, which is an error with any policy."""
    return PromptError(first.where, first.want, f"{first.got}; none of the {count} rows of {place} can be used")


@contextmanager
def rejections(where: str) -> Iterator[None]:
    """Raise PromptError for any error of the tokenizer or of the chat template, which is a program."""

    def refused(error: BaseException) -> PromptError:
        if isinstance(error, TextTooLong):
            return RowTooLong(where, f"<= {error.max_tokens} tokens", f"a text of {error.num_bytes} bytes")
        reason = str(error) if isinstance(error, CannotRender) else described(error)
        return PromptError(where, "a prompt that tokenizer and chat template accept", reason)

    with errors_as(refused, but=(PromptError, TemplateLacks, MemoryError)):
        yield
