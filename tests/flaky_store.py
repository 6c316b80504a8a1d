"""An object store in memory, as a file system of fsspec with the protocol ``flaky``: it records requests, and fails
when told to.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

SECRET = "https://store.example/bucket/object?X-Signature=5ec7e7"
URL = "flaky://bucket/path"


class FlakyFileSystem(MemoryFileSystem):
    """Counts of objects are those of the class: a test takes the fixture, which clears them."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    done: ClassVar[list[tuple[str, str]]] = []
    """Requests that change the store: (verb, path behind the base)."""
    fails: ClassVar[Callable[[str, str], bool]] = staticmethod(lambda verb, path: False)
    loses: ClassVar[str] = ""
    """Name of a file that is taken and not kept."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def _asked(self, verb: str, path: str, changes: bool = True) -> None:
        short = self._strip_protocol(path).removeprefix("/bucket/path/")
        if type(self).fails(verb, short):
            raise RuntimeError(f"503 for {SECRET}")
        if changes:
            self.done.append((verb, short))

    def find(self, path: str, **more: Any) -> Any:
        self._asked("find", path, changes=False)
        return super().find(path, **more)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        self._asked("read", path, changes=False)
        return super().cat_file(path, start, end, **more)

    def put_file(self, lpath: str, rpath: str, **more: Any) -> Any:
        self._asked("upload", rpath)
        if self.loses and rpath.endswith(self.loses):
            return None
        return super().put_file(lpath, rpath, **more)

    def pipe_file(self, path: str, value: bytes, **more: Any) -> Any:
        self._asked("write", path)
        return super().pipe_file(path, value, **more)

    def rm_file(self, path: str) -> Any:
        self._asked("remove", path)
        return super().rm_file(path)


@pytest.fixture
def flaky() -> Iterator[type[FlakyFileSystem]]:
    """Register the protocol, and give its class with an empty store."""
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.store.clear()
    FlakyFileSystem.pseudo_dirs[:] = [""]
    FlakyFileSystem.done.clear()
    FlakyFileSystem.loses = ""
    FlakyFileSystem.fails = staticmethod(lambda verb, path: False)
    yield FlakyFileSystem
    FlakyFileSystem.fails = staticmethod(lambda verb, path: False)
