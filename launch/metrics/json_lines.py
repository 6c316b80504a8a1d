"""Metrics as lines of a file."""

import errno
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tidemill.launch.metrics.port import StepMetrics


class Jsonl:
    """Appends a line for each step, and one for each evaluation. A file of another run of the name is continued, too."""

    def __init__(self, *, path: str) -> None:
        try:
            self._file = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - closed by ``close``
        except OSError as error:
            raise ValueError(f"path: want a file in a directory that is there and can be written, got {path!r}: {error.strerror}") from None
        self._has = _lines_of(self._file)

    def has(self, one: StepMetrics) -> bool:
        """Return whether the file had a line of these metrics when it was opened."""
        return _key(one.run_id, one.step, one.metrics) in self._has

    def __call__(self, one: StepMetrics) -> None:
        """Write a line, all of it or nothing."""
        values = {"step": one.step, "epoch": one.epoch, "run_id": one.run_id, **one.metrics}
        line, end = json.dumps(values).encode() + b"\n", self._file.seek(0, 2)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "only a part of the line was written", self._file.name)
        except OSError:
            self._file.truncate(end)  # the line is written again
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


Key = tuple[str, int, str]


def _key(run_id: str, step: int, metrics: Iterable[str]) -> Key:
    """Return run, step, and the evaluation set; "" for the metrics of a step."""
    first = next((name for name in metrics if name.startswith("eval/")), "")
    return run_id, step, first.rpartition("/")[0]


def _lines_of(file: BinaryIO) -> set[Key]:
    """Return the lines of a file by their keys. A last line that is not whole is removed; others that are none of ours are passed over."""
    file.seek(0)
    found, end = set[Key](), 0
    for line in file:
        if not line.endswith(b"\n"):
            file.truncate(end)
            break
        end += len(line)
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            values = json.loads(line)
            metrics = values.keys() - {"step", "epoch", "run_id"}
            found.add(_key(str(values.get("run_id", "")), int(values["step"]), metrics))
    return found
