"""A file of JSON lines that grows while a run goes on. Lines for which its disk has no room wait in memory."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


class GrowingFile:
    """JSON lines that are appended whole, in order, or not yet."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._waiting: list[bytes] = []

    @property
    def num_waiting(self) -> int:
        """Number of lines that are not written yet."""
        return len(self._waiting)

    def append(self, line: Mapping[str, object]) -> None:
        """Add a line, which ``write`` writes."""
        self._waiting.append(json.dumps(line).encode() + b"\n")

    def write(self) -> None:
        """Write the waiting lines. Raises OSError when that is not possible: they go on waiting, and the file is as it was."""
        if not self._waiting:
            return
        descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            before = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, b"".join(self._waiting))
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
        self._waiting.clear()


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
