"""Classification of a sample when it is read, and samples that are read before the issue of their task is confirmed."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tidemill.bus.wire.messages import Sample


class Disposition(StrEnum):
    """Classification of a sample when it is read."""

    BUFFERED = "buffered"
    DUPLICATE = "duplicate"
    INVALID = "invalid"
    DROPPED = "dropped"
    EVAL = "eval"
    SEEN = "seen"


@dataclass(frozen=True, slots=True)
class Arrival:
    """Result of ``DataSource.add``."""

    name: Disposition
    reason: str = ""
    """Reason for which the sample is invalid or dropped; else empty."""


@dataclass(frozen=True, slots=True)
class EarlySample:
    """A sample of a task that is not issued yet, as it was read."""

    seq: int
    sample: Sample
    actor: str


class EarlyArrivals:
    """Training samples, and ids of dead tasks, that were read before the issue of their task. Its caller bounds their number."""

    def __init__(self) -> None:
        self._samples: dict[int, list[EarlySample]] = {}
        self._dead: set[int] = set()

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(map(len, self._samples.values()))

    @property
    def seqs(self) -> set[int]:
        """Sequences of the samples."""
        return {early.seq for waiting in self._samples.values() for early in waiting}

    def add(self, early: EarlySample) -> None:
        """Keep a sample until its task is issued."""
        self._samples.setdefault(early.sample.task, []).append(early)

    def add_dead(self, id: int) -> None:
        """Note that a task was given up by its actor."""
        self._dead.add(id)

    def take(self, issued: int) -> Iterator[tuple[int, EarlySample]]:
        """Remove and yield the samples of the task that was ``issued``, and of smaller ids, each with its id. Ids are issued in order."""
        for id in [id for id in self._samples if id <= issued]:
            for early in self._samples.pop(id):
                yield id, early

    def take_dead(self, issued: int) -> bool:
        """Return whether the task that was ``issued`` is dead; it and smaller ids are forgotten."""
        found = issued in self._dead
        self._dead = {id for id in self._dead if id > issued}
        return found
