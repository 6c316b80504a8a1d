"""Metrics as lines of a file."""

import errno
import json
from pathlib import Path

from launch.metrics.port import StepMetrics


class Jsonl:
    """Appends a line for each step, and one for each evaluation."""

    def __init__(self, *, path: str) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - closed by ``close``

    def __call__(self, one: StepMetrics) -> None:
        """Write a line, all of it or nothing."""
        line, end = json.dumps({"step": one.step, "epoch": one.epoch, **one.metrics}).encode() + b"\n", self._file.seek(0, 2)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "only a part of the line was written", self._file.name)
        except OSError:
            self._file.truncate(end)  # the line is written again
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()
