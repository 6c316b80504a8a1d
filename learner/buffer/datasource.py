"""Sample buffer: decides which tasks to issue and which groups form the next step, and accounts for every sample.

A pure state machine: no input or output, no clock (``now`` is an argument, monotonic seconds). Only a *record* (a Plan,
Settle or Requeue) settles tasks and samples: ``plan`` proposes one, the caller writes it to the log, and ``apply``
changes the state. A restart reads the same records and samples and calls the same ``apply``, so live and replayed
histories cannot differ.

Step k (1-based) trains the weights of step k - 1. Lag of a token = k - 1 - step of the version that made it.
"""

from collections.abc import Sequence

import msgpack

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Cursor, Dead, Kind, Plan, PlanRecord, Requeue, Sample, Settle, Status, Task
from tidemill.learner.buffer.admission import Admission, Requeues, TaskDemand
from tidemill.learner.buffer.arrivals import Arrival, Disposition, EarlyArrivals, EarlySample, EvalTasks, KnownVersions
from tidemill.learner.buffer.groups import BufferedSample, SampleGroup, Verdict, mismatch
from tidemill.learner.buffer.ledger import SampleAccounting, SampleCounter, SettledIds, count_of, field_of
from tidemill.learner.buffer.plans import GENESIS, chain_of
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.buffer.selection import (
    Waits,
    drop_reason,
    in_order,
    is_filtered,
    make_plan,
    make_settle,
    settled_at_once,
    that_fit,
    urgent,
    waits_for_groups,
    waits_for_old,
)
from tidemill.learner.buffer.snapshot import SCHEMA, read_state, refuse_other_identity
from tidemill.learner.errors import ConfigRefused, ReplayMismatch

REISSUED = frozenset({"stale", "lost"})
"""Reasons to settle a task that are not caused by its prompt, which is issued again."""

EARLY_IDS = 64
"""A sample may be read before the issue of its task is confirmed. An id that is farther ahead than this belongs to no
task.
"""
EARLY_SAMPLES = 1024
"""Largest number of samples that are kept for tasks that are not confirmed as issued yet; further ones are invalid.
Samples of invented tasks are bounded in number by it, not in bytes.
"""


class DataSource:
    """State of tasks, groups and samples (see the module). Methods raise ReplayMismatch when records and samples
    contradict each other.
    """

    def __init__(self, rules: DataRules, *, epoch: int = 0, created: str = "", floor: int = 0) -> None:
        """``created`` identifies the stream SAMPLES; reading begins after sequence ``floor``."""
        self.rules, self.epoch = rules, epoch
        self.step = 0
        """Last planned step."""
        self.chain = GENESIS
        self.plan_seq = 0
        """Sequence of the last applied record in the log PLAN."""
        self.changes = 0
        """Counter that increases whenever the result of ``plan`` or ``settlement`` may have changed."""
        self.max_record_bytes = 0
        """Bytes that a record of the log PLAN may have; 0 = any number. A step that would need more is planned with
        fewer groups.
        """
        self.left_out = 0
        """Groups that were left out of the last plan that ``plan`` returned, because of ``max_record_bytes``."""
        self._created = created
        self._admission, self._counter = Admission(rules), SampleCounter()
        self._samples, self._tasks = SettledIds(floor), SettledIds()
        self._groups: dict[int, SampleGroup] = {}
        self._early, self._evals, self._requeues, self._versions = (
            EarlyArrivals(),
            EvalTasks(),
            Requeues(),
            KnownVersions(),
        )
        self.complete = 0
        """Groups that have had all their samples, since this start."""
        self._filtered = 0
        self._waiting_since: float | None = None
        self._delayed_since: float | None = None

    # ---- admit

    def wanted(self) -> TaskDemand | None:
        """Return the next task to issue; None while the staleness budget or the rest of the run admits none."""
        return self._admission.wanted(num_open=len(self._groups), step=self.step)

    def passed(self, epoch: int) -> None:
        """Register that passes before ``epoch`` have no further prompt."""
        self._admission.passed(epoch)
        self.changes += 1

    @property
    def exhausted(self) -> bool:
        """True once all prompts of ``rules.num_epochs`` passes are issued and settled, and no dead one is to be
        requeued.
        """
        return self._admission.exhausted and not self._groups and self.settlement() is None

    def issued(self, task: Task, now: float) -> None:
        """Register a task of the stream TASKS (just issued, or read at a restart). Call it in the order of ids.

        Raises ConfigRefused for a task that was issued with other sampling settings.
        """
        if not self._tasks.see(task.id):
            return
        if task.kind is Kind.EVAL:
            self._evals.issued(task)
            self._place_early(task, now)
            return
        self._refuse_other_sampling(task)
        self._counter.issued += 1
        self._groups[task.id] = SampleGroup(task=task, touched_s=now)
        self._admission.issued(task)
        self._place_early(task, now)

    def _place_early(self, issued: Task, now: float) -> None:
        """Place the samples that came before the issue of this task. Samples of smaller ids name no task: ids are
        issued in order.
        """
        for task_id, early in self._early.take(issued.id):
            if task_id == issued.id and issued.kind is Kind.TRAIN:
                self._place(early.seq, early.sample, now, early.actor)
            else:
                self._invalid(early.seq, "task", early.actor)
        self._evals.forget_unissued(issued.id)
        self._settle_eval(issued.id)
        if self._early.take_dead(issued.id):
            self._abandon(issued.id, "dead")

    def _refuse_other_sampling(self, task: Task) -> None:
        want = (self.rules.top_p, self.rules.top_k)  # log-probs are at the temperature of each sample
        got = (task.sampling.top_p, task.sampling.top_k)
        if want != got:
            raise ConfigRefused(
                "sampling", f"{got}, as in task {task.id} of this run (another one needs another run)", want
            )

    # ---- receive

    def add(self, seq: int, sample: Sample | WireError, now: float, actor: str = "") -> Arrival:
        """Classify a message of SAMPLES, and return the classification; call it in stream order. ``actor``: as in the
        subject.

        The caller looks up the ``unread_versions`` of the sample first: a version that is still unknown has no row, and
        the sample is invalid.
        """
        if not self._samples.see(seq):
            return Arrival(Disposition.SEEN)
        if isinstance(sample, Sample) and sample.kind is Kind.EVAL:
            return self._add_eval(seq, sample)
        self._counter.published += 1
        if isinstance(sample, WireError):
            return self._invalid(seq, field_of(sample), actor)
        if sample.run != self.rules.run:
            return self._invalid(seq, "run", actor)
        if sample.status is Status.PENDING:
            return self._invalid(seq, "status", actor)
        if sample.status in (Status.FAILED, Status.ABORTED):
            self._counter.dropped[sample.status.value] += 1
            return self._settled(seq, Arrival(Disposition.DROPPED, sample.status.value))
        if sample.demonstration and not self.rules.demonstrations:
            return self._invalid(seq, "demonstration", actor)
        if self.rules.teacher and not sample.demonstration and not self._taught(sample):
            return self._invalid(seq, "teacher_log_probs", actor)
        # Before the task, because a sample that comes before its task is placed later without this check. The answer is
        # the same at every reading of the stream (docs/decisions/016).
        if not self._versions.made(sample, seq):
            return self._invalid(seq, "version", actor)
        if self._tasks.knows(sample.task):
            return self._place(seq, sample, now, actor)
        if not self._may_come_early(sample):
            return self._invalid(seq, "task", actor)
        self._early.add(EarlySample(seq, sample, actor))
        return Arrival(Disposition.BUFFERED)

    def _taught(self, sample: Sample) -> bool:
        """Return whether a sample has the scores of a teacher that the loss needs; one without tokens needs none
        listed.
        """
        listed = (
            sample.teacher_top_k == self.rules.teacher_top_k
            or not self.rules.teacher_top_k
            or not sample.response_length
        )
        return sample.teacher_log_probs is not None and listed

    def _place(self, seq: int, sample: Sample, now: float, actor: str) -> Arrival:
        group = self._groups.get(sample.task)
        if group is None:
            return self._duplicate(seq)
        if wrong := mismatch(group.task, sample, self.rules.max_context):
            return self._invalid(seq, wrong, actor)
        if sample.index in group.samples:
            return self._duplicate(seq)
        group.add(BufferedSample.of(seq, sample))
        group.touched_s = now
        self.complete += group.full
        self.changes += group.full or bool(group.abandoned)
        return Arrival(Disposition.BUFFERED)

    def _add_eval(self, seq: int, sample: Sample) -> Arrival:
        self._counter.eval += 1
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED):  # its task is tried again, or dead
            return self._settled(seq, Arrival(Disposition.EVAL))
        size = self._evals.size(sample.task)
        # An open evaluation task has a size; one without may be just being issued. Samples of other tasks are only
        # counted.
        if (
            sample.index < size
            if size is not None
            else not self._tasks.knows(sample.task) and self._may_come_early(sample)
        ):
            self._evals.add(sample)
            self._settle_eval(sample.task)
        return self._settled(seq, Arrival(Disposition.EVAL))

    def _may_come_early(self, sample: Sample) -> bool:
        """Return whether its task may be one that is just being issued, and there is room to keep it until then."""
        if sample.task > self._tasks.seen_to + EARLY_IDS:
            return False
        return self._evals.num_early + len(self._early) < EARLY_SAMPLES

    def _settle_eval(self, task_id: int, *, dead: bool = False) -> None:
        """Settle an evaluation task once all its samples are read. Such tasks are part of no step and do not count as
        issued.
        """
        if self._evals.close(task_id, dead=dead):
            self._tasks.settle(task_id)

    def _invalid(self, seq: int, reason: str, actor: str) -> Arrival:
        self._counter.refuse(reason, actor)
        return self._settled(seq, Arrival(Disposition.INVALID, reason))

    def _duplicate(self, seq: int) -> Arrival:
        self._counter.duplicate += 1
        return self._settled(seq, Arrival(Disposition.DUPLICATE))

    def _settled(self, seq: int, arrival: Arrival) -> Arrival:
        self._samples.settle(seq)
        return arrival

    def dead(self, task_id: int) -> bool:
        """Mark a task as dead: the next records settle it. It may be given up by its actor before its issue is
        confirmed.

        Returns whether an open group cannot be trained for it.
        """
        if not self._tasks.knows(task_id) and task_id <= self._tasks.seen_to + EARLY_IDS:
            self._early.add_dead(task_id)
        return self._abandon(task_id, "dead") and not self._complete(self._groups[task_id])

    def lost(self, task_id: int) -> None:
        """Mark a task as acknowledged without all its samples: the next records settle it, and its prompt is issued
        again.
        """
        self._abandon(task_id, "lost")

    def requeue(self, dead: Dead) -> None:
        """Requeue the prompt of a dead task with the next records; repeated calls requeue it once."""
        if dead.root >= 0:
            self._requeues.ask(dead)
            self.changes += 1

    def _abandon(self, task_id: int, reason: str) -> bool:
        """Mark an open group as one that gets no further samples. Returns whether there is such a group."""
        self._settle_eval(task_id, dead=True)
        group = self._groups.get(task_id)
        if group is None or group.abandoned:
            return False
        group.abandoned = reason
        self.changes += 1
        return True

    # ---- filters

    def unjudged(self) -> list[tuple[Task, list[int]]]:
        """Return the complete groups that wait for ``judged``, each with the sequences of its samples, by index."""
        if not self.rules.filters:
            return []
        groups = [group for group in self._groups.values() if self._complete(group) and group.verdict is None]
        groups = [group for group in groups if not group.demonstrations]
        return [(group.task, group.seqs) for group in groups]

    def judged(self, task_id: int, verdict: Verdict, seqs: Sequence[int] | None = None) -> None:
        """Register the filters' decision on a complete group of these samples, as ``unjudged`` returned them; None =
        those it has.

        Without effect for one that is settled or has another sample meanwhile.
        """
        group = self._groups.get(task_id)
        if group is not None and self._complete(group) and (seqs is None or group.seqs == list(seqs)):
            group.judge(verdict)
            self.changes += 1

    def unchosen(self) -> list[tuple[Task, list[int], float]]:
        """Return the groups to decide on with ``chosen``: (task, sequences of its samples, priority so far).

        All that the filters of single groups keep, once they are enough for the next step, and those with a decision
        for it are not. While the step waits for a group that would be too old for the next one, they are decided on
        again with each that comes.
        """
        if not self.rules.buffer_filters:
            return []
        kept = [group for group in self._groups.values() if self._judged(group) and not self._drop_reason(group)]
        ready, wanted = sum(map(self._ready, kept)), self._wanted_groups()
        if len(kept) < wanted or ready == len(kept) or (ready >= wanted and self._delayed_since is None):
            return []
        return [(group.task, group.seqs, group.verdict.priority) for group in kept if group.verdict is not None]

    def chosen(self, step: int, choices: Sequence[tuple[int, Sequence[int], Verdict]]) -> None:
        """Register the buffer filters' decisions for ``step`` on groups: (task, its sequences as ``unchosen`` returned
        them, decision).

        Without effect if it is not the next step any more, and for groups that are settled or have another sample
        meanwhile.
        """
        for task_id, seqs, choice in choices if step == self.step + 1 else ():
            group = self._groups.get(task_id)
            if group is not None and self._judged(group) and group.seqs == list(seqs):
                group.choice = choice
                self.changes += 1

    # ---- versions

    def version(self, version: int, step: int, after: int = 0) -> None:
        """Register the row of ``version``: it has the weights of ``step``, and no sample up to sequence ``after`` was
        made by it.
        """
        self._versions.read_row(version, step, after)

    def published(self, version: int, step: int) -> None:
        """Register ``version`` as the head: places of tasks trained up to its step are free again, and new tasks
        require it.
        """
        self._versions.note(version, step)
        self._admission.published(version, step)
        self.changes += 1

    @property
    def versions(self) -> dict[int, int]:
        """Step of every known version."""
        return dict(self._versions.steps)

    @property
    def head(self) -> tuple[int, int] | None:
        """(version, step) of the newest published weights."""
        return self._admission.head

    def unread_versions(self, sample: Sample) -> set[int]:
        """Return the versions of a sample for which ``version`` has not been called."""
        return self._versions.unread(sample)

    # ---- decide

    def settlement(self) -> Settle | Requeue | None:
        """Return the record to write before any plan: tasks given up, one reason at a time, then requeued prompts. None
        without any.
        """
        by_reason: dict[str, list[SampleGroup]] = {}
        for group in self._groups.values():
            reason = "" if self._complete(group) else group.abandoned
            if self._judged(group):
                reason = self._drop_reason(group)
            if reason:
                by_reason.setdefault(reason, []).append(group)
        if not by_reason:
            return self._requeues.next(epoch=self.epoch, step=self.step + 1)
        # The least reason by name, because any fixed order will do; later calls return the others.
        reason, groups = min(by_reason.items())
        return make_settle(settled_at_once(groups, self.max_record_bytes), reason, epoch=self.epoch, step=self.step + 1)

    def plan(self, now: float) -> Plan | Settle | Requeue | Waits:
        """Return the next record to write (a Settle first, if there is one), or a description of what the next step
        waits for.
        """
        if settle := self.settlement():
            return settle
        ready = [group for group in self._groups.values() if self._ready(group)]
        if len(ready) < (wanted := self._wanted_groups()):
            return self._waits(now, max(0, wanted - sum(map(self._judged, self._groups.values()))))
        chosen = in_order(ready, self._versions.steps, self.rules, self.step + 1)[: self.rules.groups_per_step]
        in_flight = (group for group in self._groups.values() if not self._ready(group))
        if old := urgent(in_flight, chosen, self._versions.steps, self.rules, self.step + 1):
            self._delayed_since = now if self._delayed_since is None else self._delayed_since
            left = self._delayed_since + self.rules.order_deadline_s - now
            if left > 0:
                return waits_for_old(old, step=self.step + 1, now=now, left_s=left)
        fitting = that_fit(chosen, self.max_record_bytes)
        self.left_out = len(chosen) - len(fitting)
        return make_plan(
            fitting, self._versions.steps, self.rules, epoch=self.epoch, step=self.step + 1, chain=self.chain
        )

    def _wanted_groups(self) -> int:
        """Return the number of complete groups with which the next step is planned."""
        # So many groups had equal rewards that waiting for a full step might never end: a single group is enough then.
        if self.refilled_enough:
            return 1
        # Of the last prompts there may be fewer than a step has: no others come, so the step takes them once all are
        # complete.
        left = max(1, len(self._groups)) if self._admission.exhausted else self.rules.groups_per_step
        return min(left, self.rules.groups_per_step)

    @property
    def filtered(self) -> int:
        """Number of groups that filters have dropped for the next step."""
        return self._filtered

    @property
    def refilled_enough(self) -> bool:
        """True if so many groups were filtered for this step that it may run with fewer groups."""
        return self._filtered >= self.rules.max_filtered

    def _ready(self, group: SampleGroup) -> bool:
        """Return whether the next step may take a group."""
        return self._judged(group) and (
            group.choice is not None or not self.rules.buffer_filters or group.demonstrations
        )

    def _judged(self, group: SampleGroup) -> bool:
        """Return whether a group is complete, and the filters of single groups have decided on it."""
        return self._complete(group) and (group.verdict is not None or not self.rules.filters or group.demonstrations)

    def _drop_reason(self, group: SampleGroup) -> str:
        """Return the reason to drop a group that is judged before the next step; empty = it may be trained."""
        choice = "" if group.choice is None else group.choice.reason
        return drop_reason(group, self._versions.steps, self.rules, self.step + 1) or choice

    def _complete(self, group: SampleGroup) -> bool:
        """Return whether a group has the samples with which it is trained: all, or enough samples of a dead task."""
        if group.abandoned == "dead":
            return 0 < self.rules.min_group_size <= len(group.samples)
        return group.full and not group.abandoned

    def _waits(self, now: float, missing: int) -> Waits:
        since = self._waiting_since = now if self._waiting_since is None else self._waiting_since
        in_flight = [group for group in self._groups.values() if not (group.full or self._complete(group))]
        judging = sum(self._complete(group) and not self._ready(group) for group in self._groups.values())
        head = self.head is not None
        return waits_for_groups(
            in_flight, missing, step=self.step + 1, now=now, since=since, judging=judging, head=head
        )

    # ---- settle

    def lacks(self, record: PlanRecord) -> list[int]:
        """Return the sequences of a record that have not been read yet. Raises ReplayMismatch if some were read and are
        not usable.
        """
        if not isinstance(record, Plan | Settle):
            return []
        buffered = {
            sample.seq
            for task in record.tasks
            if int(task) in self._groups
            for sample in self._groups[int(task)].samples.values()
        }
        missing = [int(seq) for seq in record.seqs if int(seq) not in buffered]
        if read := [seq for seq in missing if self._samples.knows(seq)]:
            raise ReplayMismatch(_label(record), "its samples in the stream", f"sequences {read[:5]} cannot be used")
        return missing

    def apply(self, record: PlanRecord, seq: int) -> None:
        """Apply a record that is in the log PLAN at ``seq``. Raises ReplayMismatch if it does not continue the
        state.
        """
        if isinstance(record, Plan):
            self._apply_plan(record)
        elif isinstance(record, Settle):
            self._apply_settle(record)
        elif isinstance(record, Requeue):
            self._apply_requeue(record)
        self.plan_seq = seq
        self.changes += 1

    def _apply_plan(self, plan: Plan) -> None:
        if plan.step != self.step + 1:
            raise ReplayMismatch("log PLAN", f"a plan of step {self.step + 1}", f"one of step {plan.step}")
        # The chain covers all plans before: a restart that arrives at it has the same history, sample by sample.
        if (chain := chain_of(self.chain, plan)) != plan.chain:
            raise ReplayMismatch(_label(plan), f"chain {plan.chain}", chain)
        masked = frozenset[int]() if plan.masked is None else frozenset(plan.masked.tolist())
        named = set(plan.seqs.tolist())
        for group in self._open(plan):
            for late in group.keep(named):  # read after the plan was made, of a dead task that is trained without it
                self._duplicate(late.seq)
            group.mask(masked.intersection(group.seqs))
            self._count_tokens(plan, group)
        self._close(self._open(plan), plan.seqs.tolist(), "trained")
        self._admission.planned(plan.step, len(plan.tasks))
        for group in self._groups.values():  # it was for this step
            group.choice = None
        self.step, self.chain, self._filtered = plan.step, plan.chain, 0
        self._waiting_since = self._delayed_since = None

    def _count_tokens(self, plan: Plan, group: SampleGroup) -> None:
        too_old = plan.step - 1 - self.rules.max_lag
        if group.masked:
            left_out = [count for sample in group.rows if sample.seq in group.masked for _, count in sample.by_version]
            self._counter.tokens["filtered"] += sum(left_out)
        for step, count in group.tokens_by_step(plan.version_steps).items():
            masked = plan.oldest_step is not None and step < plan.oldest_step
            self._counter.tokens["masked" if masked else "trained"] += count
            self._counter.tokens["too_old"] += count * (not masked and step < too_old)

    def _apply_settle(self, settle: Settle) -> None:
        groups = self._open(settle)
        self._close(groups, settle.seqs.tolist(), settle.reason)
        self._filtered += len(groups) * is_filtered(settle.reason)
        if settle.reason == "dead":
            self._requeues.settled(group.task.id for group in groups)
        if settle.reason in REISSUED:
            still_open = [group.task for group in self._groups.values()]
            for group in groups:
                self._counter.given_up += not self._admission.schedule_reissue(group.task, still_open)

    def _apply_requeue(self, record: Requeue) -> None:
        again = self._requeues.apply(record)
        self._admission.schedule_requeue(again, [group.task for group in self._groups.values()])

    def _open(self, record: Plan | Settle) -> list[SampleGroup]:
        closed = [int(task) for task in record.tasks if int(task) not in self._groups]
        if closed:
            raise ReplayMismatch(_label(record), "its tasks open", f"tasks {closed[:5]} settled or unknown")
        return [self._groups[int(task)] for task in record.tasks]

    def scored(self, record: PlanRecord) -> list[tuple[Task, list[float]]]:
        """Return the groups that a record settles with scores, trained or filtered, and their scores. Call it before
        ``apply``.
        """
        if not isinstance(record, Plan) and not (isinstance(record, Settle) and is_filtered(record.reason)):
            return []
        named = set(record.seqs.tolist())
        return [
            (group.task, [sample.score for sample in group.rows if sample.seq in named]) for group in self._open(record)
        ]

    def token_limits(self, plan: Plan) -> dict[int, int]:
        """Return the bound of sampled tokens of every open task of a plan that has a budget of them. Call it before
        ``apply``.
        """
        tasks = [group.task for task_id in plan.tasks if (group := self._groups.get(int(task_id))) is not None]
        return {task.id: task.budget.tokens for task in tasks if task.budget is not None and task.budget.tokens}

    def _close(self, groups: list[SampleGroup], seqs: list[int], reason: str) -> None:
        """Settle groups: samples in ``seqs`` for ``reason``, others, which were read after the record was made, as
        duplicates.
        """
        named = set(seqs)
        for group in groups:
            del self._groups[group.task.id]
            self._tasks.settle(group.task.id)
            count_of(self._counter.settled, reason)
            for sample in group.rows:
                if sample.seq in named:
                    self._counter.count(reason)
                    self._samples.settle(sample.seq)
                else:
                    self._duplicate(sample.seq)

    # ---- inspect

    def buffered(self) -> set[int]:
        """Return the sequences of all buffered samples."""
        return self._early.seqs | {sample.seq for group in self._groups.values() for sample in group.samples.values()}

    def incomplete(self) -> list[int]:
        """Return the open training tasks that lack samples."""
        return [task_id for task_id in self._groups if self.lacks_samples(task_id)]

    def lacks_samples(self, task_id: int) -> bool:
        """Return whether a task is open and lacks samples."""
        group = self._groups.get(task_id)
        return group is not None and not group.full and not group.abandoned

    def rollout_of(self, task_id: int) -> str:
        """Return the rollout of an open task, empty for a single turn. Raises KeyError for another task."""
        return self._groups[task_id].task.rollout

    def lack(self, task_id: int) -> str:
        """Return a description of the samples that an open task lacks. Raises KeyError for another task."""
        group = self._groups[task_id]
        return (
            f"{group.task.group_size - len(group.samples)} of its {group.task.group_size} samples are missing "
            "or invalid"
        )

    def cursor(self) -> Cursor:
        """Return the position in SAMPLES at which a restart from this state continues reading."""
        return Cursor(created=self._created, floor=self._samples.floor, settled=self._samples.settled)

    @property
    def task_floor(self) -> int:
        """Largest id up to which all tasks are settled."""
        return self._tasks.floor

    def accounting(self) -> SampleAccounting:
        """Return the counts as of now: settled ones since the start of the run, and the open tasks and buffered
        samples.
        """
        return self._counter.accounting(buffered=len(self.buffered()), open_tasks=len(self._groups))

    # ---- persist

    def snapshot(self, evaluation: JsonObject | None = None, **more: object) -> bytes:
        """Return the state after the last applied plan as msgpack, without open tasks and buffered samples: a restart
        reads them again.

        ``evaluation``: state of the evaluation beside training, which belongs to the same position in SAMPLES.
        ``more``: other states that belong to it, by name.
        """
        cursor = self.cursor()
        return msgpack.packb(
            {
                "schema": SCHEMA,
                "identity": self.rules.identity,
                "step": self.step,
                "chain": self.chain,
                "plan_seq": self.plan_seq,
                "samples": {"created": cursor.created, "floor": cursor.floor, "settled": list(cursor.settled)},
                "tasks": {"floor": self._tasks.floor, "settled": list(self._tasks.settled)},
                "admission": self._admission.dump(),
                # "buried" and "tally" are the names of schema 1 for attributes that have been renamed since.
                "buried": self._requeues.dump(),
                "evals": self._evals.dump(),
                "tally": self._counter.dump(buffered=len(self.buffered()), open_tasks=len(self._groups)),
                "evaluation": evaluation,
                **more,
            }
        )

    @classmethod
    def restore(cls, rules: DataRules, data: bytes, *, epoch: int = 0) -> "DataSource":
        """Return a DataSource with the state of a snapshot.

        The caller then registers the tasks after ``task_floor``, dead tasks, versions and head, adds the samples from
        ``cursor()``, and applies the records after ``plan_seq``. Raises ConfigRefused if the identity of the run
        differs, ReplayMismatch for another schema.
        """
        state = read_state(data)
        refuse_other_identity(state, rules)
        source = cls(rules, epoch=epoch, created=state["samples"]["created"])
        source.step, source.chain, source.plan_seq = state["step"], state["chain"], state["plan_seq"]
        source._samples = SettledIds(state["samples"]["floor"], state["samples"]["settled"])
        source._tasks = SettledIds(state["tasks"]["floor"], state["tasks"]["settled"])
        source._admission.load(state["admission"])
        source._requeues.load(state.get("buried", ()))  # missing in snapshots from before requeues
        source._evals.load(state["evals"])
        source._counter = SampleCounter.load(state["tally"])
        return source


def _label(record: Plan | Settle) -> str:
    return (
        f"recorded plan {record.step}"
        if isinstance(record, Plan)
        else f"recorded settlement ({record.reason}) before step {record.step}"
    )
