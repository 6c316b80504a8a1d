"""The versions of the weights that a run has made: the step of each, and the samples that it cannot have made."""

from tidemill.bus.wire.messages import Sample
from tidemill.learner.errors import ReplayMismatch


class KnownVersions:
    """Steps of the known versions, and the place in SAMPLES at which the row of each was written."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        """Step of every known version."""
        self._after: dict[int, int] = {}
        """Sequence by version, once its row was read: no sample up to it can be of that version."""

    def note(self, version: int, step: int) -> None:
        """Register the step of a version. Raises ReplayMismatch if it is known with another one."""
        if self.steps.setdefault(version, step) != step:
            raise ReplayMismatch(f"version {version}", f"weights of step {self.steps[version]}", f"step {step}")

    def read_row(self, version: int, step: int, after: int) -> None:
        """Register the row of a version, as ``note`` does; no sample up to sequence ``after`` was made by it."""
        self.note(version, step)
        self._after[version] = after

    def unread(self, sample: Sample) -> set[int]:
        """Return the versions of a sample with rows that were not read."""
        return {span.version for span in sample.spans if span.version not in self._after}

    def made(self, sample: Sample, seq: int) -> bool:
        """Return whether these versions can have made a sample at ``seq``: all are known, and none is newer than the sample."""
        return all(span.version in self.steps and seq > self._after.get(span.version, 0) for span in sample.spans)
