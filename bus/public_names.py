"""Names of a package for users, imported with their modules on use: ``import tidemill.learner`` loads no torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def public_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package. ``modules``: name -> the module below the package that defines it."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
