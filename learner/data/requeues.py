"""Requeues of dead tasks: which tasks were settled as dead, and which of their prompts an operator wants issued again."""

from collections.abc import Iterable

from tidemill.bus.wire.messages import Dead, Requeue
from tidemill.learner.data.staleness_admission import Reissue
from tidemill.learner.errors import ReplayMismatch


class Requeues:
    """Dead tasks with prompts that can be issued again, each once."""

    def __init__(self) -> None:
        self._asked: dict[int, Dead] = {}
        """Dead tasks with prompts that an operator has requeued, without a record so far."""
        self._decided: set[int] = set()
        """Tasks settled as dead, and not requeued since."""

    def ask(self, dead: Dead) -> None:
        """Register that an operator has requeued the prompt of a dead task."""
        self._asked[dead.task] = dead

    def settled(self, ids: Iterable[int]) -> None:
        """Register tasks that were settled as dead."""
        self._decided.update(ids)

    def next(self, *, epoch: int, step: int) -> Requeue | None:
        """Return the record of the next prompt to issue again, before ``step``; None without any."""
        asked = self._asked.keys() & self._decided
        if not asked:
            return None
        dead = self._asked[min(asked)]
        return Requeue(
            epoch=epoch,
            task=dead.task,
            root=dead.root,
            count=dead.reissues + 1,
            prompt_epoch=dead.prompt_epoch,
            offset=dead.offset,
            step=step,
        )

    def apply(self, record: Requeue) -> Reissue:
        """Return the prompt of a record, which is to be issued again. Raises ReplayMismatch unless its task is settled as dead."""
        if record.task not in self._decided:
            raise ReplayMismatch(f"requeue of task {record.task}", "a task settled as dead, and not requeued since", "none")
        self._decided.remove(record.task)
        return Reissue(root=record.root, count=record.count, prompt_epoch=record.prompt_epoch, offset=record.offset)

    def dump(self) -> list[int]:
        """Return the tasks that are settled as dead, for a snapshot."""
        return sorted(self._decided)

    def load(self, ids: Iterable[int]) -> None:
        """Set the tasks of a snapshot."""
        self._decided = set(ids)
