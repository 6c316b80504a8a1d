"""Modules with a change in their source, for tests that must fail: ``MUTANT`` is {module: [[old, new], ...]} as JSON.

Python imports this module at its start where its folder is in PYTHONPATH, so children of a test have the change, too.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

CHANGES: dict[str, list[tuple[str, str]]] = json.loads(os.environ.get("MUTANT", "{}"))


class ChangedSource(importlib.machinery.SourceFileLoader):
    """Loader of a module with its changes, past the cache of compiled modules."""

    def get_code(self, fullname: str) -> Any:
        source = self.get_data(self.path).decode()
        for old, new in CHANGES[fullname]:
            assert source.count(old) == 1, f"{fullname} has {old!r} {source.count(old)} times: mend the mutant"
            source = source.replace(old, new)
        return self.source_to_code(source.encode(), self.path)


class Finder:
    """Finder of the modules that have changes."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None, name
        return importlib.util.spec_from_file_location(name, spec.origin, loader=ChangedSource(name, spec.origin))


sys.meta_path.insert(0, Finder)
