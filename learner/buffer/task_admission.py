"""Admission control: bounds the number of tasks in flight, and chooses the next prompt, requeued ones first."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.messages import Dead, Requeue, Task
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.errors import ReplayMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDemand:
    """The next task to issue."""

    prompt_epoch: int
    offset: int
    """Offset of the prompt; for a new prompt, the first usable one at or after this offset."""
    min_version: int
    issue_step: int
    reissue_of: int | None = None
    reissues: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reissue:
    """A prompt that is to be issued again."""

    root: int
    """Id of the first task of the prompt."""
    count: int
    """Number of this reissue, from 1."""
    prompt_epoch: int
    offset: int

    @classmethod
    def of(cls, task: Task) -> "Reissue":
        """Return the next reissue of the prompt of ``task``, which may be a reissue itself."""
        root = task.id if task.reissue_of is None else task.reissue_of
        return cls(root=root, count=task.reissues + 1, prompt_epoch=task.prompt_epoch, offset=task.offset)

    def answers(self, task: Task) -> bool:
        """Return whether ``task`` is this reissue."""
        return (task.reissue_of, task.reissues) == (self.root, self.count)


class Admission:
    """Admits at most ``rules.admitted`` tasks: the open ones, and those trained by a step that is not published yet."""

    def __init__(self, rules: DataRules) -> None:
        self._rules = rules
        self.head: tuple[int, int] | None = None
        """(version, step) of the newest published weights."""
        self._position = (0, 0)
        """Pass and offset of the next new prompt."""
        self._pending_reissues: list[Reissue] = []
        self._unpublished: dict[int, int] = {}
        """Groups of each trained step that no version has yet."""

    def wanted(self, *, num_open: int, step: int, drawn: Sequence[tuple[int, int]] = ()) -> TaskDemand | None:
        """Return the next task, given ``num_open`` open ones and plans up to ``step``; None while none is admitted.

        ``drawn``: pass and offset of prompts whose tasks come before it, and are not issued yet. A reissue comes alone.
        """
        num_open += len(drawn)
        # Open tasks count as if all of them were trained; a task that is dropped makes room again.
        needed = (self._rules.steps - step) * self._rules.groups_per_step - num_open
        if self.head is None or needed <= 0 or num_open + sum(self._unpublished.values()) >= self._rules.admitted:
            return None
        if self.exhausted or (drawn and self._pending_reissues):
            return None
        version, issue_step = self.head
        epoch, offset = max([self._position, *((epoch, offset + 1) for epoch, offset in drawn[-1:])])
        demand = TaskDemand(prompt_epoch=epoch, offset=offset, min_version=version, issue_step=issue_step)
        if not self._pending_reissues:
            return demand
        reissue = self._pending_reissues[0]
        return replace(
            demand,
            prompt_epoch=reissue.prompt_epoch,
            offset=reissue.offset,
            reissue_of=reissue.root,
            reissues=reissue.count,
        )

    @property
    def exhausted(self) -> bool:
        """True if all passes of ``rules.num_epochs`` are issued, and no reissue is pending."""
        return 0 < self._rules.num_epochs <= self._position[0] and not self._pending_reissues

    def passed(self, epoch: int) -> None:
        """Continue with pass ``epoch``: the one before has no further prompt."""
        self._position = max(self._position, (epoch, 0))

    def issued(self, task: Task) -> None:
        """Register an issued task: it advances the position of new prompts, or completes a pending reissue."""
        if task.reissues:
            self._pending_reissues = [reissue for reissue in self._pending_reissues if not reissue.answers(task)]
        else:
            # max, because a restart reads tasks again, and some may lie before the position of the checkpoint.
            self._position = max(self._position, (task.prompt_epoch, task.offset + 1))

    def schedule_reissue(self, task: Task, open_tasks: list[Task]) -> bool:
        """Schedule another task for the prompt of ``task``, unless one is open already, as it may be at a restart.

        Returns False if the prompt has been issued again ``max_reissues`` times.
        """
        reissue = Reissue.of(task)
        if reissue.count > self._rules.staleness.max_reissues:
            return False
        self.schedule_requeue(reissue, open_tasks)
        return True

    def schedule_requeue(self, reissue: Reissue, open_tasks: list[Task]) -> None:
        """Schedule a prompt that an operator has requeued; ``max_reissues`` does not apply."""
        if not any(reissue.answers(task) for task in open_tasks):
            self._pending_reissues.append(reissue)

    def planned(self, step: int, num_groups: int) -> None:
        """Register the groups of a plan, which count against the limit until the weights of ``step`` are published."""
        if self.head is None or self.head[1] < step:
            self._unpublished[step] = num_groups

    def published(self, version: int, step: int) -> None:
        """Register a published version; one that is not newer than the head changes nothing."""
        if self.head is None or version > self.head[0]:
            self.head = (version, step)
            self._unpublished = {trained: count for trained, count in self._unpublished.items() if trained > step}

    def dump(self) -> dict[str, object]:
        """Return the state for a snapshot, in types of msgpack."""
        # Keys as in the first snapshots; attributes have been renamed since.
        return {
            "position": list(self._position),
            "owed": [asdict(reissue) for reissue in self._pending_reissues],
            "unpublished": sorted(self._unpublished.items()),
        }

    def load(self, data: JsonMapping) -> None:
        """Replace the state by one that ``dump`` has returned. The caller registers the head again."""
        self._position = (data["position"][0], data["position"][1])
        self._pending_reissues = [Reissue(**reissue) for reissue in data["owed"]]
        self._unpublished = {step: count for step, count in data["unpublished"]}


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
        task_ids = self._asked.keys() & self._decided
        if not task_ids:
            return None
        dead = self._asked[min(task_ids)]
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
        """Return the reissue of a record. Raises ReplayMismatch unless its task is settled as dead."""
        if record.task not in self._decided:
            raise ReplayMismatch(
                f"requeue of task {record.task}", "a task settled as dead, and not requeued since", "none"
            )
        self._decided.remove(record.task)
        return Reissue(root=record.root, count=record.count, prompt_epoch=record.prompt_epoch, offset=record.offset)

    def dump(self) -> list[int]:
        """Return the tasks that are settled as dead, for a snapshot."""
        return sorted(self._decided)

    def load(self, ids: Iterable[int]) -> None:
        """Set the tasks of a snapshot."""
        self._decided = set(ids)
