"""Compares a function or class by import path with its use, by the source of its module, which is not imported: it may load torch."""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.learner.algorithms.own_functions import asked_for, imported

_FOLLOWED = 8
"""Imports that are followed from one module to the next."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The statement that defines a name."""

    module: str
    name: str
    node: ast.stmt


def misfit(path: str, count: int, offered: Sequence[str]) -> str:
    """Return the defect of the function at ``module:function``; empty if its source shows none.

    ``count``: its positional arguments; ``offered``: arguments that it may ask for by name.
    Raises ImportError, ValueError, SyntaxError, OSError for a module that cannot be read.
    """
    found = _definition(*_parts(path))
    if isinstance(found, str):
        return found
    if found is None:
        return _misfit_here(path, count, offered)
    match found.node:
        case ast.FunctionDef(args=arguments):
            return _unlike(arguments, count, offered)
        case ast.AsyncFunctionDef():
            return "an async function"
        case ast.ClassDef():
            return "a class"
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            return _misfit_value(value, count, offered)
    return ""


def missing(path: str) -> str:
    """Return the reason that there is nothing at ``module:name``; empty if there is, or no source shows it. Raises as ``misfit``."""
    found = _definition(*_parts(path))
    return found if isinstance(found, str) else ""


def misfit_class(path: str) -> str:
    """Return the defect of the class at ``module:Class``; empty if its source shows none. Raises as ``misfit``."""
    found = _definition(*_parts(path))
    if isinstance(found, str):
        return found
    match None if found is None else found.node:
        case None | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Assign(value=ast.Constant() | ast.Lambda()):
            return "no class"
    return ""


def _parts(path: str) -> tuple[str, str]:
    module, _, name = path.partition(":")
    return module, name


def _definition(module: str, name: str) -> _Found | str | None:
    """Return the statement that defines a name, behind the imports; else the defect, or None for a module without a source in Python.

    The empty text is returned for a name that may come from a star import.
    """
    for _ in range(_FOLLOWED):
        spec = importlib.util.find_spec(module)
        if spec is None:
            return f"no module {module}"
        if not spec.origin or not spec.origin.endswith(".py"):
            return None
        statements = list(_statements(ast.parse(Path(spec.origin).read_bytes()).body))
        nodes = [node for node in statements if name in _names(node)]
        if not nodes:
            known = any(isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names) for node in statements)
            return "" if known else f"{module} has no {name!r}"
        node = nodes[-1]
        if isinstance(node, ast.Import):
            return "a module"
        if not isinstance(node, ast.ImportFrom):
            return _Found(module, name, node)
        package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
        module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        name = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    return ""


def _misfit_here(path: str, count: int, offered: Sequence[str]) -> str:
    """Import a module of Python's own that has no source, and compare; nothing is known of others."""
    if path.partition(":")[0].partition(".")[0] not in sys.stdlib_module_names:
        return ""
    try:
        asked_for(imported(path, "it"), [f"argument_{number}" for number in range(count)], offered, path=path, what="it")
    except ValueError as bad:
        return str(bad).rpartition(f"{path!r}: ")[2]
    return ""


def _misfit_value(value: ast.expr | None, count: int, offered: Sequence[str]) -> str:
    match value:
        case ast.Lambda(args=arguments):
            return _unlike(arguments, count, offered)
        case ast.Constant(value=constant):
            return f"{constant!r}, which is no function"[:80]
        case ast.JoinedStr() | ast.List() | ast.Tuple() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.SetComp():
            return "no function"
    return ""  # the result of a call, such as functools.partial: the ranks compare it


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module that run when it is imported, those within ``if``, ``try`` and ``with`` too."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [one.body for one in node.handlers] if isinstance(node, ast.Try) else []
            orelse = [node.orelse] if isinstance(node, ast.If | ast.Try) else []
            last = [node.finalbody] if isinstance(node, ast.Try) else []
            for inner in (*handlers, *orelse, node.body, *last):
                yield from _statements(inner)
        else:
            yield node


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    else:
        yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))


def _unlike(arguments: ast.arguments, count: int, offered: Sequence[str]) -> str:
    """Return how a signature differs from the call; empty if it fits."""
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    takes = ", ".join([*positional, *(one.arg for one in arguments.kwonlyargs)]) or "nothing"
    named = [one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    needed = [*positional[count : len(positional) - len(arguments.defaults)], *named]
    called = f"it is called with {count} arguments" + (f", and may ask for {', '.join(offered)}" if offered else "")
    short = len(positional) < count and arguments.vararg is None
    return f"it takes {takes}; {called}" if short or not set(needed) <= set(offered) else ""
