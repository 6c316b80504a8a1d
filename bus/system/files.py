"""Files that appear whole or not at all, and are synced to disk on request; a lock that names its holder; directories
that go with their process.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import struct
import sys
import tempfile
from pathlib import Path
from typing import IO, Self


def write_whole(file: Path, text: str, *, private: bool = False) -> None:
    """Write a small file under another name, then rename it. ``private``: at no moment can others read it.

    Raises OSError with the file's name when that is not possible; the file is as it was then.
    """
    aside = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)
        with os.fdopen(
            os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666), "w"
        ) as opened:
            opened.write(text)
        os.replace(aside, file)
    except OSError as error:
        with contextlib.suppress(OSError):  # it would take the room that is missing
            aside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(file)) from error


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory: it survives a power loss afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


READER_FILE = "reader"
_FLOCK = "hhqqi"  # struct flock of Linux on 64 bits: l_type, l_whence, l_start, l_len, l_pid


class ReaderLock:
    """A lock on a directory that names its holder: the process that reads a run's store, and ends when the run starts.

    A POSIX record lock: the kernel knows the process that holds it, and releases it when that process ends. A process
    opens it once: closing any descriptor of the file releases the lock.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / READER_FILE
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Take the lock without waiting. Returns False while another process has it."""
        if self._file is not None:
            return True
        file = self._path.open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def holder(directory: Path) -> int:
    """Return the process id of the holder; 0 = none, or unknown (another machine, another system than Linux)."""
    path = directory / READER_FILE
    if sys.platform != "linux" or not path.exists():
        return 0
    with path.open("a") as file:
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, request))
    return int(pid) if kind != fcntl.F_UNLCK and pid > 0 else 0


def ask_to_end(directory: Path) -> int:
    """Send SIGTERM to the holder and return its process id; 0 when there is none that may be signalled."""
    pid = holder(directory)
    if not pid or pid == os.getpid():
        return 0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGTERM)
        return pid
    return 0


_LOCK = ".lock"  # held as long as the process lives; a directory that is just being created does not have it yet


class Scratch:
    """A directory, ``path``, for data that can be fetched again, with nothing but its lock.

    It is removed when its process ends or, after a kill, by the next process. Blocks for that.
    """

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


_TRIAL_BYTES = 1 << 16
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def lacking(directory: Path, need_bytes: int) -> str:
    """Return why the disk of ``directory`` takes no ``need_bytes``, with the cure; empty when it does.

    A small file is written, too: for quotas, inodes and mounts that are read-only there is no number to compare.
    """
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    try:
        disk = os.statvfs(place)
        free = disk.f_bavail * disk.f_frsize
        if free < need_bytes:
            amounts = f"{_mb(free)} free on the disk of {place}, want {_mb(need_bytes)}"
            return f"no room: {amounts}; free {_mb(need_bytes - free)} there"
        with tempfile.TemporaryFile(dir=place) as trial:
            trial.write(bytes(_TRIAL_BYTES))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        cause = "no inodes free" if disk.f_files and not disk.f_favail else error.strerror
        room = "no room: " if error.errno in _NO_ROOM else ""
        return f"{room}no file can be written in {place}: {cause}"
    return ""


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
