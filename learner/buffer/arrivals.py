"""Arrivals: the classification of a sample that is read, samples before their task, known versions, and open evaluation
tasks.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tidemill.bus.wire.messages import Sample, Task
from tidemill.learner.errors import ReplayMismatch


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
    """Training samples, and ids of dead tasks, that were read before the issue of their task. Its caller bounds their
    number.
    """

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

    def add_dead(self, task_id: int) -> None:
        """Note that a task was given up by its actor."""
        self._dead.add(task_id)

    def take(self, issued: int) -> Iterator[tuple[int, EarlySample]]:
        """Remove and yield the samples of the task that was ``issued``, and of smaller ids, each with its id. Ids are
        issued in order.
        """
        for task_id in [task_id for task_id in self._samples if task_id <= issued]:
            for early in self._samples.pop(task_id):
                yield task_id, early

    def take_dead(self, issued: int) -> bool:
        """Return whether the task that was ``issued`` is dead; it and smaller ids are forgotten."""
        found = issued in self._dead
        self._dead = {task_id for task_id in self._dead if task_id > issued}
        return found


class SampleStore:
    """The samples of the groups that the DataSource has: it keeps their numbers, and this their content."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}

    def add(self, seq: int, sample: Sample) -> None:
        """Keep the sample of a sequence of SAMPLES."""
        self._samples[seq] = sample

    def of(self, seqs: Iterable[int]) -> list[Sample]:
        """Return the samples of some sequences, in their order. All must be kept."""
        return [self._samples[int(seq)] for seq in seqs]

    def keep_only(self, seqs: Collection[int]) -> None:
        """Forget the samples that are buffered no longer."""
        self._samples = {seq: sample for seq, sample in self._samples.items() if seq in seqs}


class EvalTasks:
    """Sizes of open evaluation tasks, and the indices of the samples that were read, which may come before their task
    is issued.
    """

    def __init__(self) -> None:
        self._seen: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}

    @property
    def num_early(self) -> int:
        """Number of samples of tasks that are not issued."""
        return sum(len(seen) for task_id, seen in self._seen.items() if task_id not in self._sizes)

    def issued(self, task: Task) -> None:
        """Open a task."""
        self._sizes[task.id] = task.group_size

    def size(self, task_id: int) -> int | None:
        """Return the number of samples of an open task; None = it is not open."""
        return self._sizes.get(task_id)

    def add(self, sample: Sample) -> None:
        """Note a sample."""
        self._seen.setdefault(sample.task, set()).add(sample.index)

    def forget_unissued(self, to: int) -> None:
        """Forget the samples of ids up to ``to`` that no evaluation task has: ids are issued in order."""
        for task_id in [task_id for task_id in self._seen if task_id not in self._sizes and task_id <= to]:
            del self._seen[task_id]

    def close(self, task_id: int, *, dead: bool) -> bool:
        """Close a task if all its samples were read, or it is dead. Returns whether it was closed."""
        size = self._sizes.get(task_id)
        if size is None or not (dead or len(self._seen.get(task_id, ())) >= size):
            return False
        self._seen.pop(task_id, None)
        del self._sizes[task_id]
        return True

    def dump(self) -> list[tuple[int, list[int]]]:
        """Return the indices that were read, by task, for a snapshot."""
        return sorted((task_id, sorted(seen)) for task_id, seen in self._seen.items())

    def load(self, seen: Iterable[tuple[int, Iterable[int]]]) -> None:
        """Set the indices of a snapshot; a restart reads the tasks again."""
        self._seen = {task_id: set(indices) for task_id, indices in seen}


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
        """Return whether these versions can have made a sample at ``seq``: all are known, and none is newer than the
        sample.
        """
        return all(span.version in self.steps and seq > self._after.get(span.version, 0) for span in sample.spans)
