"""Functions and classes of users by import path: found, and compared with the arguments that they will get.

Modules are searched in the working directory and in PYTHONPATH, as Python does it for a program that is started there.
"""

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from tidemill.bus import exit_codes
from tidemill.bus.errors import DetailedError
from tidemill.bus.system.foreign import described, errors_as

FUNCTION = "module:function"
_ROOMS = ("actors", "bus", "launch", "learner", "rewards", "weightstore")
"""Packages that were import names of their own before."""


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
