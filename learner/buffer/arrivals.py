"""Arrivals: classifies every message of SAMPLES once, and puts the samples into the groups of their tasks.

A sample may be read before the issue of its task is confirmed; it waits here until then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidemill.bus.errors import WireError
from tidemill.bus.wire.messages import Kind, Status, Task
from tidemill.bus.wire.subjects import Position, is_behind
from tidemill.learner.buffer.groups import SampleGroup, mismatch
from tidemill.learner.buffer.ledger import SampleAccounting, SettledIds, SettledSamples, count_of, field_of
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.buffer.sample_index import NO_TEACHER, SampleIndex
from tidemill.learner.errors import ConfigRefused, ReplayMismatch

EARLY_IDS = 64
"""Distance between the last known task and a sample's task behind which the sample belongs to no task."""
EARLY_SAMPLES = 1024
"""Maximum number of samples kept for tasks that are not confirmed as issued yet; further ones are invalid."""


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
    fills_group: bool = False
    """True if it is the last sample of its group."""
    may_decide: bool = False
    """True if the next record may be another one than before."""


_SEEN, _EVAL, _DUPLICATE = Arrival(Disposition.SEEN), Arrival(Disposition.EVAL), Arrival(Disposition.DUPLICATE)
_BUFFERED = Arrival(Disposition.BUFFERED)


class EvalTasks:
    """Sizes of open evaluation tasks, and the indices of their samples, which may be read before the task is issued."""

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

    def add(self, sample: SampleIndex) -> None:
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
    """Steps of the known versions, and the position in SAMPLES at which the row of each was written."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        """Step of every known version."""
        self._after: dict[int, Position] = {}
        """Position by version, once its row was read: no sample up to it can be of that version."""

    def note(self, version: int, step: int) -> None:
        """Register the step of a version. Raises ReplayMismatch if it is known with another one."""
        if self.steps.setdefault(version, step) != step:
            raise ReplayMismatch(f"version {version}", f"weights of step {self.steps[version]}", f"step {step}")

    def read_row(self, version: int, step: int, after: Position) -> None:
        """Register the row of a version, as ``note`` does; no sample up to position ``after`` was made by it."""
        self.note(version, step)
        self._after[version] = after

    def unread(self, sample: SampleIndex) -> set[int]:
        """Return the versions of a sample with rows that were not read."""
        return {version for version, _ in sample.by_version if version not in self._after}

    def made(self, sample: SampleIndex) -> bool:
        """Return whether its versions can have made a sample: all are known, and none is newer than it."""
        for version, _ in sample.by_version:
            if version not in self.steps or is_behind(sample.seq, self._after.get(version, (0,))):
                return False
        return True


class Arrivals:
    """All tasks and samples that were read: open groups, settled ids, versions and counts."""

    def __init__(self, rules: DataRules, *, floors: Position = (0,)) -> None:
        self._rules = rules
        self.groups: dict[int, SampleGroup] = {}
        """Open training tasks by id."""
        self.samples, self.tasks = SettledSamples(floors), SettledIds()
        """Ids of SAMPLES and of TASKS."""
        self.versions, self.evals, self.counts = KnownVersions(), EvalTasks(), SampleAccounting()
        self._early: dict[int, list[SampleIndex]] = {}
        """Samples of tasks that are not issued yet, by task."""
        self._early_dead: set[int] = set()
        """Tasks that their actors gave up before their issue was confirmed."""

    def issued(self, task: Task, now: float) -> bool:
        """Open a task. Returns False for one that is known. Raises ConfigRefused for other sampling settings."""
        if not self.tasks.see(task.id):
            return False
        if task.kind is Kind.EVAL:
            self.evals.issued(task)
        else:
            _refuse_other_sampling(task, self._rules)
            self.counts.issued += 1
            self.groups[task.id] = SampleGroup(task=task, touched_s=now)
        self._place_early(task, now)
        return True

    def _place_early(self, issued: Task, now: float) -> None:
        """Place the samples that came before the issue of this task."""
        # Ids are issued in order, so the samples of smaller ids name no task.
        for task_id in [task_id for task_id in self._early if task_id <= issued.id]:
            for sample in self._early.pop(task_id):
                if task_id == issued.id and issued.kind is Kind.TRAIN:
                    self._place(sample, now)
                else:
                    self._refuse(sample.seq, "task", sample.actor)
        self.evals.forget_unissued(issued.id)
        self._settle_eval(issued.id)
        dead, self._early_dead = issued.id in self._early_dead, {id_ for id_ in self._early_dead if id_ > issued.id}
        if dead:
            self.abandon(issued.id, "dead")

    def add(self, sample: SampleIndex, now: float) -> Arrival:
        """Classify a sample, as ``DataSource.add``."""
        # At a restart the stream is read again from the cursor, and each message counts once.
        if not self.samples.see(sample.seq):
            return _SEEN
        if sample.kind is Kind.EVAL:
            return self._add_eval(sample)
        self.counts.published += 1
        if sample.status in (Status.FAILED, Status.ABORTED) and sample.run == self._rules.run:
            self.counts.dropped[sample.status.value] += 1
            return self._settle(sample.seq, Arrival(Disposition.DROPPED, sample.status.value))
        if field_name := self._unusable_field(sample):
            return self._refuse(sample.seq, field_name, sample.actor)
        if self.tasks.knows(sample.task):
            return self._place(sample, now)
        if not self._may_come_early(sample):
            return self._refuse(sample.seq, "task", sample.actor)
        self._early.setdefault(sample.task, []).append(sample)
        return _BUFFERED

    def refuse(self, seq: int, error: WireError, actor: str) -> Arrival:
        """Count a message that is no valid sample, as ``DataSource.refuse``."""
        if not self.samples.see(seq):
            return _SEEN
        self.counts.published += 1
        return self._refuse(seq, field_of(error), actor)

    def _unusable_field(self, sample: SampleIndex) -> str:
        """Return the first field for which no task can use a sample; empty = none."""
        if sample.run != self._rules.run:
            return "run"
        if sample.status is Status.PENDING:
            return "status"
        if sample.demonstration and not self._rules.demonstrations:
            return "demonstration"
        if self._rules.teacher and not sample.demonstration and not _is_taught(sample, self._rules.teacher_top_k):
            return "teacher_log_probs"
        # Before the task is looked up, because a sample that comes before its task is placed later without this check.
        # The answer is the same at every reading of the stream (docs/decisions/016).
        return "" if self.versions.made(sample) else "version"

    def _place(self, sample: SampleIndex, now: float) -> Arrival:
        group = self.groups.get(sample.task)
        if group is None:
            return self._duplicate(sample.seq)
        # Before the look for a duplicate: an invalid sample must not block a valid one of its index.
        if field_name := mismatch(group.task, sample, self._rules.max_context, group.context):
            return self._refuse(sample.seq, field_name, sample.actor)
        if sample.index in group.samples:
            return self._duplicate(sample.seq)
        group.add(sample)
        group.touched_s = now
        if not (group.full or group.abandoned):
            return _BUFFERED
        return Arrival(Disposition.BUFFERED, fills_group=group.full, may_decide=True)

    def _add_eval(self, sample: SampleIndex) -> Arrival:
        self.counts.eval += 1
        # Of another status, its task is tried again, or dead.
        if sample.status in (Status.COMPLETED, Status.TRUNCATED) and self._is_awaited(sample):
            self.evals.add(sample)
            self._settle_eval(sample.task)
        return self._settle(sample.seq, _EVAL)

    def _is_awaited(self, sample: SampleIndex) -> bool:
        """Return whether an evaluation task is open for it, or may be just being issued. Others are only counted."""
        size = self.evals.size(sample.task)
        if size is None:
            return not self.tasks.knows(sample.task) and self._may_come_early(sample)
        return sample.index < size

    def _may_come_early(self, sample: SampleIndex) -> bool:
        """Return whether its task may be one that is just being issued, and there is room to keep it until then."""
        if sample.task > self.tasks.seen_to + EARLY_IDS:
            return False
        return self.evals.num_early + sum(map(len, self._early.values())) < EARLY_SAMPLES

    def dead(self, task_id: int) -> bool:
        """Mark a task as dead, as ``DataSource.dead``."""
        if not self.tasks.knows(task_id) and task_id <= self.tasks.seen_to + EARLY_IDS:
            self._early_dead.add(task_id)
        return self.abandon(task_id, "dead") and not self.groups[task_id].is_complete(self._rules)

    def abandon(self, task_id: int, reason: str) -> bool:
        """Mark an open group as one that gets no further samples. Returns whether there is such a group."""
        self._settle_eval(task_id, dead=True)
        group = self.groups.get(task_id)
        if group is None or group.abandoned:
            return False
        group.abandoned = reason
        return True

    def close(self, groups: Sequence[SampleGroup], seqs: Iterable[int], reason: str) -> None:
        """Settle groups: samples in ``seqs`` for ``reason``, later samples as duplicates."""
        named = set(seqs)
        for group in groups:
            del self.groups[group.task.id]
            self.tasks.settle(group.task.id)
            count_of(self.counts.settled, reason)
            for sample in group.rows:
                if sample.seq in named:
                    self.counts.settle(reason)
                    self.samples.settle(sample.seq)
                else:
                    self._duplicate(sample.seq)

    def leave_out(self, group: SampleGroup, seqs: set[int]) -> None:
        """Settle the samples of a group that are not in ``seqs`` as duplicates."""
        for sample in group.keep(seqs):
            self._duplicate(sample.seq)

    def _settle_eval(self, task_id: int, *, dead: bool = False) -> None:
        """Settle an evaluation task once all its samples are read. It is part of no step and not counted as issued."""
        if self.evals.close(task_id, dead=dead):
            self.tasks.settle(task_id)

    def _refuse(self, seq: int, reason: str, actor: str) -> Arrival:
        self.counts.refuse(reason, actor)
        return self._settle(seq, Arrival(Disposition.INVALID, reason))

    def _duplicate(self, seq: int) -> Arrival:
        self.counts.duplicate += 1
        return self._settle(seq, _DUPLICATE)

    def _settle(self, seq: int, arrival: Arrival) -> Arrival:
        self.samples.settle(seq)
        return arrival

    @property
    def num_buffered(self) -> int:
        """Number of samples that are not settled."""
        return sum(map(len, self._early.values())) + sum(len(group.samples) for group in self.groups.values())


def _refuse_other_sampling(task: Task, rules: DataRules) -> None:
    want = (rules.top_p, rules.top_k)  # log-probs are at the temperature of each sample
    got = (task.sampling.top_p, task.sampling.top_k)
    if want != got:
        raise ConfigRefused(
            "sampling", f"{got}, as in task {task.id} of this run (another one needs another run)", want
        )


def _is_taught(sample: SampleIndex, teacher_top_k: int) -> bool:
    """Return whether it has the teacher's scores that the loss needs; one without tokens needs no listed tokens."""
    listed = sample.teacher_top_k == teacher_top_k or not teacher_top_k or not sample.response_length
    return sample.teacher_top_k != NO_TEACHER and listed
