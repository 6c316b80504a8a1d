"""Code that may raise anything: functions of users, and libraries whose errors are not documented. Their errors become errors of ours."""

import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def errors_as(error_of: Callable[[BaseException], Exception], *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise ``error_of(error)`` from every error in the block, SystemExit included; errors of the types ``but`` pass unchanged."""
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as error:
        raise error_of(error) from error


def told(error: BaseException) -> str:
    """Return type and message of an error, and the file and line of the function that raised it."""
    # Not str(error), which may be foreign as well.
    text = traceback.format_exception_only(error)[-1].strip().removeprefix(f"{type(error).__module__}.")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text


def repr_of(error: BaseException) -> str:
    """Return the repr of an error, or why there is none: it may be foreign, too."""
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
