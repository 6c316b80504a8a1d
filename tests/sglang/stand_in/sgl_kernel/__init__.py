"""Stand-in, for tests on machines without a GPU: every name of SGLang's kernel package exists and refuses to be called.

SGLang imports names from it everywhere, and calls none with ``--device cpu --attention-backend torch_native``: a call
fails the test with the name.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

__version__ = "0.4.10"


class Missing:
    """A function, class or constant that does not exist here."""

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
    """Importer of any sub-module, as an empty one of the same kind."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
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
