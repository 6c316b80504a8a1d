"""The errors of users' functions, and of libraries that do not document theirs, as errors of this project."""

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_LIBRARIES = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
"""Beginnings of the names of files that no user has written."""


@contextmanager
def errors_as(error_of: Callable[[BaseException], Exception], *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise ``error_of(error)`` from every error in the block, SystemExit included; errors of the types ``but`` pass unchanged."""
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as error:
        raise error_of(error) from error


def text_of(error: BaseException) -> str:
    """Return type and message of an error."""
    name = type(error).__name__
    try:
        message = str(error)
    except Exception as second:
        return f"{name}, whose text raises {type(second).__name__}"
    return f"{name}: {message}" if message else name


def described(error: BaseException) -> str:
    """Return type and message of an error in an ``errors_as`` block, and the line of the user's code that raised it, if there is one."""
    if isinstance(error, SyntaxError):  # its message names the line
        return text_of(error)
    # The first two frames are those of ``errors_as`` and of its block.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[2:] if not frame.filename.startswith(_LIBRARIES)]
    return text_of(error) + (f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else "")


def repr_of(error: BaseException) -> str:
    """Return the repr of an error, or the reason why there is none."""
    try:
        return repr(error)
    except BaseException as second:
        return f"{type(error).__name__}, whose repr raises {type(second).__name__}"


def settle(future: "Future[T]", work: Callable[[], T]) -> None:
    """Set the result of ``work``, or its error, in a future."""
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
