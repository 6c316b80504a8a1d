"""Metrics as lines of a file."""

import json
from pathlib import Path

from launch.metrics.port import StepMetrics


class Jsonl:
    """Appends a line for each step, and one for each evaluation."""

    def __init__(self, *, path: str) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed by ``close``

    def __call__(self, one: StepMetrics) -> None:
        """Write a line, and flush it."""
        self._file.write(json.dumps({"step": one.step, "epoch": one.epoch, **one.metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
