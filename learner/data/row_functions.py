"""Rows of a function of the user's own, as a source of prompts: ``python:module:function`` in place of a file.

The function takes nothing and returns an iterable of maps, the same ones at every call: a run that is resumed reads them again.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.bus.system.foreign import described, errors_as
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.learner.errors import PromptError

_END = object()
PREFIX = "python:"
MOST_ROWS = 50_000_000
"""Rows after which a function counts as endless."""


def is_function(path: Path) -> bool:
    """Return whether ``path`` names a function."""
    return str(path).startswith(PREFIX)


def rows_of(path: Path) -> Iterator[JsonMapping | PromptError]:
    """Yield the maps of a function; for a row that is none, the error in its place. Raises PromptError for a function that fails."""
    rows = _called(path)
    for number in range(MOST_ROWS + 1):
        with errors_as(partial(_refused, f"{path}:{number + 1}", "a row, or the end")):
            row = next(rows, _END)
        if row is _END:
            return
        if number == MOST_ROWS:
            break
        yield row if isinstance(row, dict) else PromptError(f"{path}:{number + 1}", "a map", f"{type(row).__name__} {row!r:.80}")
    raise PromptError(str(path), f"at most {MOST_ROWS} rows", "more; a function must end")


def add_rows(digest: "hashlib._Hash", path: Path) -> None:
    """Add the content of all rows to a digest. Raises PromptError."""
    for row in rows_of(path):
        if isinstance(row, PromptError):
            digest.update(str(row).encode(errors="replace"))
            continue
        try:
            digest.update(json.dumps(row, sort_keys=True).encode())
        except (TypeError, ValueError, RecursionError) as error:  # and not by its repr, which may have an address in it
            raise PromptError(str(path), "rows of JSON values with texts as keys", f"{error} in {row!r:.80}") from error


def _called(path: Path) -> Iterator[Any]:
    module, _, name = str(path).removeprefix(PREFIX).partition(":")
    want = "python:module:function, which returns an iterable of maps; modules are searched in this directory and in PYTHONPATH"
    with errors_as(partial(_refused, str(path), want)):
        function: Callable[[], Iterable[Any]] = getattr(importlib.import_module(module), name)
        return iter(function())


def _refused(where: str, want: str, error: BaseException) -> PromptError:
    return PromptError(where, want, described(error))
