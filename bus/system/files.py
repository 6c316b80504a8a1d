"""Files that appear whole or not at all, and are synced to disk on request."""

import contextlib
import os
from pathlib import Path


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
