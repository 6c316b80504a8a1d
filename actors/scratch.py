"""A directory for data that can be fetched again. Removed when its process ends or, after a kill, by the next one."""

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import Self

_LOCK = ".lock"
"""Lock file, held as long as the process lives. A directory that is just being created does not have it yet."""


class Scratch:
    """``path`` is a directory with nothing but its lock. Blocks to remove the directories of killed processes."""

    def __init__(self, what: str) -> None:
        prefix = f"tidemill-{what}-"
        _sweep(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        fresh = self.path / f"{_LOCK}-fresh"
        self._lock = fresh.open("w")
        with contextlib.suppress(OSError):  # on a file system without locks, no directory is removed
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Locked before it has this name: another process finds no lock that is free.
            fresh.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the directory, and release its lock last. Errors of the file system are ignored."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sweep(prefix: str) -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # No lock: being created; not ours: another user's.
        with contextlib.suppress(OSError), (directory / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: in use
            shutil.rmtree(directory, ignore_errors=True)
