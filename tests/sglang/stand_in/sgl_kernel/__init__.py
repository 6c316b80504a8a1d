"""Stand-in, for tests on machines without a GPU: every name of SGLang's kernel package exists and refuses to be called.

SGLang imports names from it wherever it runs, and calls none with ``--device cpu --attention-backend torch_native``: should one be
called, the test fails with its name.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

__version__ = "0.4.10"


class Missing:
    """A function, class or constant that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self._name} is a stand-in: there are no kernels on this machine")

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missing) and other._name == self._name

    def __lt__(self, other: "Missing") -> bool:
        return self._name < other._name


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any sub-module is there, and empty in the same way."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _missing(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _missing(module: str, name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{module}.{name}")


def __getattr__(name: str) -> Missing:
    return _missing(__name__, name)


sys.meta_path.append(_Finder())
