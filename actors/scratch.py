"""A directory for what a process can fetch again: removed when it ends, or, if it was killed, when another one is made on its machine."""

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import Self

_LOCK = ".lock"
"""Held as long as the process lives; in a directory that is just being made it is not there yet."""


class Scratch:
    """``path`` is an empty directory, but for its lock. Blocking: what killed processes have left may be whole models."""

    def __init__(self, what: str) -> None:
        prefix = f"tidemill-{what}-"
        _sweep(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        fresh = self.path / f"{_LOCK}-fresh"
        self._lock = fresh.open("w")
        with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.rename(self.path / _LOCK)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sweep(prefix: str) -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (directory / _LOCK).open("r+") as lock:  # none: being made; not ours: another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: in use
            shutil.rmtree(directory, ignore_errors=True)
