"""Evaluation tasks as the sample buffer sees them: open until all their samples are read. They are part of no step."""

from collections.abc import Iterable

from tidemill.bus.wire.messages import Sample, Task


class EvalTasks:
    """Sizes of open evaluation tasks, and the indices of the samples that were read, which may come before their task is issued."""

    def __init__(self) -> None:
        self._seen: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}

    @property
    def num_early(self) -> int:
        """Number of samples of tasks that are not issued."""
        return sum(len(seen) for id, seen in self._seen.items() if id not in self._sizes)

    def issued(self, task: Task) -> None:
        """Open a task."""
        self._sizes[task.id] = task.group_size

    def size(self, id: int) -> int | None:
        """Return the number of samples of an open task; None = it is not open."""
        return self._sizes.get(id)

    def add(self, sample: Sample) -> None:
        """Note a sample."""
        self._seen.setdefault(sample.task, set()).add(sample.index)

    def forget_unissued(self, to: int) -> None:
        """Forget the samples of ids up to ``to`` that no evaluation task has: ids are issued in order."""
        for id in [id for id in self._seen if id not in self._sizes and id <= to]:
            del self._seen[id]

    def close(self, id: int, *, dead: bool) -> bool:
        """Close a task if all its samples were read, or it is dead. Returns whether it was closed."""
        size = self._sizes.get(id)
        if size is None or not (dead or len(self._seen.get(id, ())) >= size):
            return False
        self._seen.pop(id, None)
        del self._sizes[id]
        return True

    def dump(self) -> list[tuple[int, list[int]]]:
        """Return the indices that were read, by task, for a snapshot."""
        return sorted((id, sorted(seen)) for id, seen in self._seen.items())

    def load(self, seen: Iterable[tuple[int, Iterable[int]]]) -> None:
        """Set the indices of a snapshot; a restart reads the tasks again."""
        self._seen = {id: set(indices) for id, indices in seen}
