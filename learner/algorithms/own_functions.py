"""Functions of users by import path: found, and compared with the arguments that they will get. Knows no torch."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any


class FunctionRefused(ValueError):
    """A function or class that a setting names is not there, or cannot be called as it would be."""

    exit_code = 78
    """That of wrong settings, ``tidemill.bus.exit_codes.CONFIG``: no restart cures it."""


def imported(path: str, what: str, *, form: str = "module:function") -> Callable[..., Any]:
    """Return the function or class at ``module:name``. Raises FunctionRefused with the missing part; ``what`` names the setting in it."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise FunctionRefused(f"{what}: want {form}, got {path!r}: {error}") from None
    except AttributeError:
        raise FunctionRefused(f"{what}: want {form}, got {path!r}: {module} has no {name!r}") from None
    if not callable(found):
        raise FunctionRefused(f"{what}: want {form}, got {path!r}: a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def asked_for(function: Callable[..., Any], given: Sequence[str], offered: Sequence[str], *, path: str, what: str) -> frozenset[str]:
    """Return those of the ``offered`` arguments that are parameters of the function: it is called with these by name.

    ``given``: names of its positional arguments. A parameter with a default that is not offered keeps its default.
    Raises FunctionRefused for a function that cannot be called so.
    """
    form = ", ".join([*given, *(["*", *offered] if offered else [])])
    want = f"a function ({form})" + (", with any of the named ones" if offered else "")
    if inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "a class" if inspect.isclass(function) else "an async function"
        raise FunctionRefused(f"{what}: want {want}, got {path!r}: {kind}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise FunctionRefused(f"{what}: want {want}, got {path!r}: {error}") from None
    by_name = {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    asked = frozenset(by_name.intersection(offered))
    try:
        inspect.signature(function).bind(*given, **dict.fromkeys(asked))
    except TypeError as error:
        raise FunctionRefused(f"{what}: want {want}, got {path!r}: {error}") from None
    return asked
