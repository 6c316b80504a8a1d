"""Tidemill: asynchronous off-policy reinforcement learning for language models.

The rooms are packages of their own folders: ``tidemill.bus``, ``tidemill.weightstore``, ``tidemill.rewards``,
``tidemill.actors``, ``tidemill.learner`` and ``tidemill.launch``. Each has the names for users' code in its
``__all__``, imported with their modules on use (``import tidemill.learner`` loads no torch); everything else may
change.
"""

# Imports nothing: ``python -m`` runs this before ``__main__.py``, when a typing.py of the working directory comes first
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def public_names(package: str, modules: "Mapping[str, str]") -> "Callable[[str], Any]":
    """Return the ``__getattr__`` of a package. ``modules``: name -> the module below the package that defines it."""

    def find(name: str) -> "Any":
        from importlib import import_module

        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
