"""The errors of users' functions, and of libraries that do not document theirs, as errors of this project."""

import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_PACKAGES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
"""Installed packages, which may be below Python's own directories."""
_PYTHON = ("<", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")))
_OURS = tuple(
    str(Path(__file__).resolve().parents[2] / name) + os.sep
    for name in ("actors", "bus", "launch", "learner", "rewards", "weightstore")
)


@contextmanager
def errors_as(
    error_of: Callable[[BaseException], Exception], *, but: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise ``error_of(error)`` from every error in the block, SystemExit included, except the types ``but``."""
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
    """Return type and message of an error in an ``errors_as`` block, and the line of the user's code that raised it."""
    if isinstance(error, SyntaxError):  # its message names the line
        return text_of(error)
    # The first two frames belong to ``errors_as`` and its block.
    return text_of(error) + _place(traceback.extract_tb(error.__traceback__)[2:])


def repr_at(error: BaseException) -> str:
    """Return the repr of an error, and the line of the user's code that raised it, if there is one."""
    return repr_of(error) + _place(traceback.extract_tb(error.__traceback__))


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line outside of packages in a traceback, else the line where one was entered."""
    foreign = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    written = [frame for frame in foreign if not frame.filename.startswith((*_PYTHON, *_PACKAGES))]
    entered = [frame for frame in foreign if frame.filename.startswith(_PACKAGES)]
    user_frames = written[-1:] or entered[:1]
    return f" ({user_frames[0].filename}, line {user_frames[0].lineno})" if user_frames else ""


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
