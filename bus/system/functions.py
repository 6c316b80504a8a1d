"""Functions and classes of users by import path: found, and compared with the arguments that they will get.

Modules are searched in the working directory and in PYTHONPATH, as Python does it for a program that is started there.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from tidemill.bus import exit_codes
from tidemill.bus.errors import DetailedError

T = TypeVar("T")
# Installed packages, which may be below Python's own directories
_PACKAGES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
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


FUNCTION = "module:function"
# Packages that were import names of their own before
_ROOMS = ("actors", "bus", "launch", "learner", "rewards", "weightstore")


class Defect(StrEnum):
    """Reason for which a function is refused."""

    FORM = "form"
    """The path has no module, or no name."""
    MODULE = "module"
    """There is no such module, or one that it imports is missing."""
    IMPORT = "import"
    """The module raises an error while it is imported."""
    NAME = "name"
    """The module has no such name."""
    KIND = "kind"
    """The object of this name is no function or class."""
    SIGNATURE = "signature"
    """It does not take the arguments with which it is called."""


class FunctionRefused(DetailedError, ValueError):
    """A function or class that a setting names is not there, or cannot be called as it would be."""

    exit_code = exit_codes.CONFIG  # no restart cures it
    path: str
    defect: Defect
    reason: str
    setting: str = ""
    want: str = FUNCTION
    template = "{where}want {want}, got {path!r}: {reason}"

    @property
    def where(self) -> str:
        """The setting as the message shows it."""
        return f"{self.setting}: " if self.setting else ""


def find_function(path: str, setting: str = "", *, want: str = FUNCTION) -> Callable[..., Any]:
    """Return the function or class at ``module:name``. ``setting``, ``want``: for messages. Raises FunctionRefused."""
    function = find_object(path, setting, want=want)
    if not callable(function):
        reason = f"want a callable, {path.partition(':')[2]} is {type(function).__name__}"
        raise FunctionRefused(path, Defect.KIND, reason, setting, want)
    return function  # type: ignore[no-any-return]


def find_object(path: str, setting: str = "", *, want: str = FUNCTION) -> Any:
    """Return the object at ``module:name`` (the name may have dots). Raises FunctionRefused, for any error of the
    import.
    """

    def refused(defect: Defect, reason: str) -> FunctionRefused:
        return FunctionRefused(path, defect, reason, setting, want)

    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise refused(Defect.FORM, "no module, or no name in it")
    if present := present_name(module_name):
        raise refused(Defect.MODULE, f"{module_name} is {present} now")
    try:
        with errors_as(
            lambda error: refused(Defect.IMPORT, f"importing {module_name}: {described(error)}"), but=(ImportError,)
        ):
            place: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise refused(Defect.MODULE, f"cannot import {module_name}: {error}") from error
    for part in name.split("."):
        if not hasattr(place, part):
            raise refused(Defect.NAME, f"{module_name} has no {name!r}{nearest(part, getattr(place, '__dict__', {}))}")
        place = getattr(place, part)
    return place


def present_name(module_name: str) -> str:
    """Return the name below ``tidemill`` of a module that is named as before the packages moved; empty for others.

    A user's own ``rewards.py`` or ``bus/`` is such a name's rightful owner.
    """
    room = module_name.partition(".")[0]
    if room not in _ROOMS:
        return ""
    old, ours = importlib.util.find_spec(room), importlib.util.find_spec(f"tidemill.{room}")
    assert ours is not None
    if old is not None and [*(old.submodule_search_locations or ())] != [*(ours.submodule_search_locations or ())]:
        return ""
    return f"tidemill.{module_name}"


def nearest(word: str, words: Mapping[str, object]) -> str:
    """Return the most similar public word, for the end of a message; empty without one."""
    similar = difflib.get_close_matches(word, [candidate for candidate in words if not candidate.startswith("_")], n=1)
    return f" (nearest: {similar[0]!r})" if similar else ""


def check_call(
    function: Callable[..., Any], given: Sequence[str], offered: Sequence[str] = (), *, path: str, setting: str
) -> frozenset[str]:
    """Return the ``offered`` arguments that are parameters of the function: it is called with these by name.

    ``given``: names of its positional arguments. A parameter with a default that is not offered keeps its default.
    Raises FunctionRefused for a function that cannot be called so.
    """
    call = ", ".join([*given, *(["*", *offered] if offered else [])])
    want = f"a function ({call})" + (", with any of the named ones" if offered else "")
    if inspect.isclass(function) or inspect.iscoroutinefunction(function):
        reason = "a class" if inspect.isclass(function) else "an async function"
        raise FunctionRefused(path, Defect.KIND, reason, setting, want)
    form = ""
    try:
        signature = inspect.signature(function)
        form = f": it takes {signature}"
        parameters = signature.parameters.values()
        by_name = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        accepted = frozenset(by_name.intersection(offered))
        signature.bind(*given, **dict.fromkeys(accepted))
    except (TypeError, ValueError) as error:
        raise FunctionRefused(path, Defect.SIGNATURE, f"{error}{form}", setting, want) from None
    return accepted
