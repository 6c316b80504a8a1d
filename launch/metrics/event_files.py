"""Metrics as event files of TensorBoard."""

from tidemill.launch.metrics.port import StepMetrics
from tidemill.launch.settings import extras


class TensorBoard:
    """Writes scalars under the names of the metrics; a directory for each run below ``directory``."""

    def __init__(self, *, directory: str) -> None:
        extras.require("metrics")
        from tensorboardX import SummaryWriter

        self._directory, self._open = directory, SummaryWriter
        self._writers: dict[str, SummaryWriter] = {}

    def __call__(self, one: StepMetrics) -> None:
        """Write the scalars of a step, and flush them."""
        if one.run not in self._writers:
            self._writers[one.run] = self._open(f"{self._directory}/{one.run}", write_to_disk=True)
        writer = self._writers[one.run]
        for name, value in one.metrics.items():
            writer.add_scalar(name, value, one.step)
        writer.flush()

    def close(self) -> None:
        """Close the event files."""
        for writer in self._writers.values():
            writer.close()
