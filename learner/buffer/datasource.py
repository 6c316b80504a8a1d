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
from tidemill.bus.wire.messages import Cursor, Dead, Kind, Plan, PlanRecord, Requeue, Settle, Task
from tidemill.bus.wire.subjects import Position
from tidemill.learner.buffer import ledger, step_plan
from tidemill.learner.buffer.arrivals import Arrival, Arrivals
from tidemill.learner.buffer.groups import SampleGroup, Verdict
from tidemill.learner.buffer.ledger import ROWS, SCHEMA, SampleAccounting, SettledIds, SettledSamples, read_state
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.buffer.sample_index import SampleIndex
from tidemill.learner.buffer.step_plan import GENESIS, Waits, chain_of, is_filtered
from tidemill.learner.buffer.task_admission import Admission, Requeues, TaskDemand
from tidemill.learner.errors import ReplayMismatch

REISSUED = frozenset({"stale", "lost"})
"""Reasons to settle a task that are not caused by its prompt, which is issued again."""


class DataSource:
    """State of tasks, groups and samples. Methods raise ReplayMismatch where records and samples contradict."""

    def __init__(self, rules: DataRules, *, epoch: int = 0, created: str = "", floors: Position = (0,)) -> None:
        """``created`` identifies the stream SAMPLES; reading begins after these sequences, one for each shard."""
        self.rules, self.epoch = rules, epoch
        self.step = 0
        """Last planned step."""
        self.chain = GENESIS
        self.plan_seq = 0
        """Sequence of the last applied record in the log PLAN."""
        self.max_record_bytes = 0
        """Bytes that a record of PLAN may have; 0 = any number. A larger step is planned with fewer groups."""
        self.left_out = 0
        """Groups that the last proposed plan left out, because of ``max_record_bytes``."""
        self.filtered = 0
        """Groups that filters have dropped for the next step."""
        self._created = created
        self._admission, self._requeues = Admission(rules), Requeues()
        self._arrivals = Arrivals(rules, floors=floors)
        self.groups = self._arrivals.groups
        """The open groups by task."""
        self._steps = self._arrivals.versions.steps
        self._waiting_since: float | None = None
        self._delayed_since: float | None = None

    # ---- admit

    def wanted(self, drawn: Sequence[tuple[int, int]] = ()) -> TaskDemand | None:
        """Return the next task to issue; None while the staleness budget or the rest of the run admits none.

        ``drawn`` as for ``Admission.wanted``.
        """
        return self._admission.wanted(num_open=len(self.groups), step=self.step, drawn=drawn)

    def passed(self, epoch: int) -> None:
        """Register that passes before ``epoch`` have no further prompt."""
        self._admission.passed(epoch)

    @property
    def exhausted(self) -> bool:
        """True once all passes of ``rules.num_epochs`` are issued and settled, and no dead prompt is to be requeued."""
        return self._admission.exhausted and not self.groups and self.settlement() is None

    def issued(self, task: Task, now: float) -> None:
        """Register a task of the stream TASKS (just issued, or read at a restart). Call it in the order of ids.

        Raises ConfigRefused for a task that was issued with other sampling settings.
        """
        if self._arrivals.issued(task, now) and task.kind is Kind.TRAIN:
            self._admission.issued(task)

    # ---- receive

    def add(self, sample: SampleIndex, now: float) -> Arrival:
        """Classify a sample of SAMPLES; call this and ``refuse`` in stream order.

        The caller looks up the ``unread_versions`` of the sample first: a version that is still unknown has no row, and
        the sample is invalid.
        """
        return self._arrivals.add(sample, now)

    def refuse(self, seq: int, error: WireError, actor: str = "") -> Arrival:
        """Count a message of SAMPLES that is no valid sample. ``actor``: as in the subject."""
        return self._arrivals.refuse(seq, error, actor)

    def take_settled(self) -> list[int]:
        """Return the sequences that were settled since the last call."""
        settled, self._arrivals.samples.newly_settled = self._arrivals.samples.newly_settled, []
        return settled

    def dead(self, task_id: int) -> bool:
        """Mark a task as dead: the next records settle it. Its actor may give it up before its issue is confirmed.

        Returns whether an open group cannot be trained for it.
        """
        return self._arrivals.dead(task_id)

    def lost(self, task_id: int) -> None:
        """Mark a task as acknowledged without all its samples: it is settled, and its prompt is issued again."""
        self._arrivals.abandon(task_id, "lost")

    def requeue(self, dead: Dead) -> None:
        """Requeue the prompt of a dead task with the next records; repeated calls requeue it once."""
        if dead.root >= 0:
            self._requeues.ask(dead)

    # ---- filters

    def unjudged(self) -> list[tuple[Task, list[int]]]:
        """Return the complete groups that wait for ``judged``, each with the sequences of its samples, by index."""
        return [
            (group.task, group.seqs)
            for group in self.groups.values()
            if group.is_complete(self.rules) and not group.is_judged(self.rules)
        ]

    def judged(self, task_id: int, verdict: Verdict, seqs: Sequence[int] | None = None) -> None:
        """Register the filters' decision on a complete group of these samples; None = the samples that it has.

        Without effect for a group that is settled or has another sample meanwhile.
        """
        group = self.groups.get(task_id)
        if group is not None and group.is_complete(self.rules) and (seqs is None or group.seqs == list(seqs)):
            group.judge(verdict)

    def unchosen(self) -> list[tuple[Task, list[int], float]]:
        """Return the groups to decide on with ``chosen``: (task, sequences of its samples, priority so far).

        All groups that the filters of single groups keep, once these are enough for the next step and the decided ones
        are not. While the step waits for a group that would be too old for the next one, each new group counts.
        """
        if not self.rules.buffer_filters:
            return []
        kept = [group for group in self.groups.values() if group.is_judged(self.rules) and not self._drop_reason(group)]
        num_ready, num_wanted = sum(group.is_ready(self.rules) for group in kept), self._wanted_groups()
        if len(kept) < num_wanted or num_ready == len(kept):
            return []
        if num_ready >= num_wanted and self._delayed_since is None:
            return []
        return [(group.task, group.seqs, group.verdict.priority) for group in kept if group.verdict is not None]

    def chosen(self, step: int, choices: Sequence[tuple[int, Sequence[int], Verdict]]) -> None:
        """Register the buffer filters' decisions for ``step``: (task, sequences of its samples, decision).

        Without effect for another step than the next, and for groups that are settled or have another sample meanwhile.
        """
        for task_id, seqs, choice in choices if step == self.step + 1 else ():
            group = self.groups.get(task_id)
            if group is not None and group.is_judged(self.rules) and group.seqs == list(seqs):
                group.choice = choice

    # ---- versions

    def version(self, version: int, step: int, after: Position = (0,)) -> None:
        """Register the row of a version: the step of its weights; it made no sample up to position ``after``."""
        self._arrivals.versions.read_row(version, step, after)

    def published(self, version: int, step: int) -> None:
        """Register ``version`` as the head: tasks trained up to its step are out no more, and new tasks require it."""
        self._arrivals.versions.note(version, step)
        self._admission.published(version, step)

    @property
    def versions(self) -> dict[int, int]:
        """Step of every known version."""
        return dict(self._steps)

    @property
    def head(self) -> tuple[int, int] | None:
        """(version, step) of the newest published weights."""
        return self._admission.head

    def unread_versions(self, sample: SampleIndex) -> set[int]:
        """Return the versions of a sample for which ``version`` has not been called."""
        return self._arrivals.versions.unread(sample)

    # ---- decide

    def settlement(self) -> Settle | Requeue | None:
        """Return the record to write before any plan: tasks given up, one reason at a time, then requeued prompts."""
        by_reason: dict[str, list[SampleGroup]] = {}
        for group in self.groups.values():
            reason = "" if group.is_complete(self.rules) else group.abandoned
            if group.is_judged(self.rules):
                reason = self._drop_reason(group)
            if reason:
                by_reason.setdefault(reason, []).append(group)
        if not by_reason:
            return self._requeues.next(epoch=self.epoch, step=self.step + 1)
        # The least reason by name, because any fixed order will do; later calls return the others.
        reason, groups = min(by_reason.items())
        return step_plan.make_settle(
            step_plan.settled_at_once(groups, self.max_record_bytes), reason, epoch=self.epoch, step=self.step + 1
        )

    def plan(self, now: float) -> Plan | Settle | Requeue | Waits:
        """Return the next record to write, a Settle first, or a description of what the next step waits for."""
        # Groups that are dropped give their places back before a step is chosen among the others.
        if settle := self.settlement():
            return settle
        step, groups = self.step + 1, self.groups.values()
        ready = [group for group in groups if group.is_ready(self.rules)]
        if len(ready) < (num_wanted := self._wanted_groups()):
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            missing = max(0, num_wanted - sum(group.is_judged(self.rules) for group in groups))
            waited_s = now - self._waiting_since
            return step_plan.wait_for_groups(
                groups, self.rules, missing, step=step, now=now, waited_s=waited_s, head=self.head
            )
        chosen = step_plan.order_groups(ready, self._steps, self.rules, step)[: self.rules.groups_per_step]
        in_flight = (group for group in groups if not group.is_ready(self.rules))
        if old_groups := step_plan.urgent_groups(in_flight, chosen, self._steps, self.rules, step):
            self._delayed_since = now if self._delayed_since is None else self._delayed_since
            left_s = self._delayed_since + self.rules.staleness.order_deadline_s - now
            if left_s > 0:
                return step_plan.wait_for_old_groups(old_groups, step=step, now=now, left_s=left_s)
        fitting = step_plan.fit_groups(chosen, self.max_record_bytes)
        self.left_out = len(chosen) - len(fitting)
        return step_plan.make_plan(fitting, self._steps, self.rules, epoch=self.epoch, step=step, chain=self.chain)

    def _wanted_groups(self) -> int:
        """Return the number of complete groups with which the next step is planned."""
        # So many groups had equal rewards that waiting for a full step might never end: a single group is enough then.
        if self.filtered >= self.rules.max_filtered:
            return 1
        # Of the last prompts there may be fewer than a step has: no others come, so the step takes them once all are
        # complete.
        open_groups = max(1, len(self.groups)) if self._admission.exhausted else self.rules.groups_per_step
        return min(open_groups, self.rules.groups_per_step)

    def _drop_reason(self, group: SampleGroup) -> str:
        return step_plan.drop_reason(group, self._steps, self.rules, self.step + 1)

    # ---- settle

    def lacks(self, record: PlanRecord) -> list[int]:
        """Return the sequences of a record that are not read yet. Raises ReplayMismatch for one that is not usable."""
        if not isinstance(record, Plan | Settle):
            return []
        groups = [self.groups[int(task)] for task in record.tasks if int(task) in self.groups]
        buffered = {sample.seq for group in groups for sample in group.samples.values()}
        missing = [int(seq) for seq in record.seqs if int(seq) not in buffered]
        if unusable := [seq for seq in missing if self._arrivals.samples.knows(seq)]:
            got = f"sequences {unusable[:5]} cannot be used"
            raise ReplayMismatch(_label(record), "its samples in the stream", got)
        return missing

    def apply(self, record: PlanRecord, seq: int) -> None:
        """Apply a record that PLAN has at ``seq``. Raises ReplayMismatch if it does not continue the state."""
        if isinstance(record, Plan):
            self._apply_plan(record)
        elif isinstance(record, Settle):
            self._apply_settle(record)
        elif isinstance(record, Requeue):
            self._admission.schedule_requeue(self._requeues.apply(record), self._open_tasks())
        # Last: a record that is refused leaves the place in the log as it was.
        self.plan_seq = seq

    def _apply_plan(self, plan: Plan) -> None:
        if plan.step != self.step + 1:
            raise ReplayMismatch("log PLAN", f"a plan of step {self.step + 1}", f"one of step {plan.step}")
        # The chain covers all plans before: a restart that arrives at it has the same history, sample by sample.
        if (chain := chain_of(self.chain, plan)) != plan.chain:
            raise ReplayMismatch(_label(plan), f"chain {plan.chain}", chain)
        masked = frozenset[int]() if plan.masked is None else frozenset(plan.masked.tolist())
        groups, named = self._open_groups(plan), set(plan.seqs.tolist())
        for group in groups:
            # Samples of a dead task may come after the plan that trains it without them was made.
            self._arrivals.leave_out(group, named)
            group.mask(masked.intersection(group.seqs))
            self._arrivals.counts.count_tokens(plan, group, max_lag=self.rules.staleness.max_lag)
        self._arrivals.close(groups, named, "trained")
        self._admission.planned(plan.step, len(plan.tasks))
        for group in self.groups.values():  # it was for this step
            group.choice = None
        self.step, self.chain, self.filtered = plan.step, plan.chain, 0
        self._waiting_since = self._delayed_since = None

    def _apply_settle(self, settle: Settle) -> None:
        groups = self._open_groups(settle)
        self._arrivals.close(groups, settle.seqs.tolist(), settle.reason)
        self.filtered += len(groups) * is_filtered(settle.reason)
        if settle.reason == "dead":
            self._requeues.settled(group.task.id for group in groups)
        if settle.reason in REISSUED:
            open_tasks = self._open_tasks()
            for group in groups:
                self._arrivals.counts.given_up += not self._admission.schedule_reissue(group.task, open_tasks)

    def _open_groups(self, record: Plan | Settle) -> list[SampleGroup]:
        if closed := [int(task) for task in record.tasks if int(task) not in self.groups]:
            raise ReplayMismatch(_label(record), "its tasks open", f"tasks {closed[:5]} settled or unknown")
        return [self.groups[int(task)] for task in record.tasks]

    def _open_tasks(self) -> list[Task]:
        return [group.task for group in self.groups.values()]

    # ---- inspect: the first three before ``apply``, which removes the groups of the record

    def samples(self, plan: Plan) -> list[SampleIndex]:
        """Return the samples of a plan, in its order."""
        samples = {sample.seq: sample for group in self._open_groups(plan) for sample in group.samples.values()}
        return [samples[seq] for seq in plan.seqs.tolist()]

    def scored(self, record: PlanRecord) -> list[tuple[Task, list[float]]]:
        """Return the groups that a record settles with scores, trained or filtered, and their scores."""
        if not isinstance(record, Plan) and not (isinstance(record, Settle) and is_filtered(record.reason)):
            return []
        named = set(record.seqs.tolist())
        return [
            (group.task, [sample.score for sample in group.rows if sample.seq in named])
            for group in self._open_groups(record)
        ]

    def token_limits(self, plan: Plan) -> dict[int, int]:
        """Return the bound of sampled tokens of every open task of a plan that has a budget of them."""
        tasks = [group.task for task_id in plan.tasks if (group := self.groups.get(int(task_id))) is not None]
        return {task.id: task.budget.tokens for task in tasks if task.budget is not None and task.budget.tokens}

    def incomplete(self) -> list[int]:
        """Return the open training tasks that lack samples."""
        return [task_id for task_id in self.groups if self.lacks_samples(task_id)]

    def lacks_samples(self, task_id: int) -> bool:
        """Return whether a task is open and lacks samples."""
        group = self.groups.get(task_id)
        return group is not None and not group.full and not group.abandoned

    def group(self, task_id: int) -> SampleGroup:
        """Return the group of an open task. Raises KeyError for another task."""
        return self.groups[task_id]

    def cursor(self) -> Cursor:
        """Return the position in SAMPLES at which a restart from this state continues reading."""
        return self._arrivals.samples.cursor(self._created)

    @property
    def task_floor(self) -> int:
        """Largest id up to which all tasks are settled."""
        return self._arrivals.tasks.floor

    def accounting(self) -> SampleAccounting:
        """Return the counts as of now: since the start of the run, with open tasks and buffered samples."""
        return self._arrivals.counts.completed(buffered=self._arrivals.num_buffered, open_tasks=len(self.groups))

    # ---- persist

    def snapshot(self, evaluation: JsonObject | None = None, **states: object) -> bytes:
        """Return the state after the last applied plan as msgpack, with ``states`` of other parts after the same plan.

        It has no open tasks and buffered samples: a restart reads them again.
        """
        arrivals, cursor = self._arrivals, self.cursor()
        return msgpack.packb(
            {
                "schema": SCHEMA,
                "identity": self.rules.identity,
                "step": self.step,
                "chain": self.chain,
                "plan_seq": self.plan_seq,
                "samples": ledger.dump_cursor(cursor),
                "tasks": {"floor": arrivals.tasks.floor, "settled": list(arrivals.tasks.settled)},
                "admission": self._admission.dump(),
                # "buried" and "tally" are the names of schema 1 for attributes that have been renamed since.
                "buried": self._requeues.dump(),
                "evals": arrivals.evals.dump(),
                "tally": arrivals.counts.dump(buffered=arrivals.num_buffered, open_tasks=len(self.groups)),
                "evaluation": evaluation,
                **states,
            }
        )

    @classmethod
    def restore(cls, rules: DataRules, data: bytes, *, epoch: int = 0) -> "DataSource":
        """Return a DataSource with the state of a snapshot.

        The caller then registers the tasks after ``task_floor``, versions and head, adds the samples from ``cursor()``,
        marks dead tasks behind their samples, and applies the records after ``plan_seq``. Raises ConfigRefused if the
        identity of the run differs, ReplayMismatch for another schema.
        """
        state = read_state(data)
        # Files of prompts are compared by their planned rows, where the snapshot has them.
        rules.refuse_other_identity(state["identity"], but="prompts_digest" if ROWS in state else "")
        cursor = ledger.cursor_of(state)
        source = cls(rules, epoch=epoch, created=cursor.created)
        source.step, source.chain, source.plan_seq = state["step"], state["chain"], state["plan_seq"]
        source._arrivals.samples = SettledSamples(cursor.position, cursor.settled)
        source._arrivals.tasks = SettledIds(state["tasks"]["floor"], state["tasks"]["settled"])
        source._admission.load(state["admission"])
        source._requeues.load(state.get("buried", ()))  # missing in snapshots from before requeues
        source._arrivals.evals.load(state["evals"])
        source._arrivals.counts = SampleAccounting.load(state["tally"])
        return source


def _label(record: Plan | Settle) -> str:
    if isinstance(record, Plan):
        return f"recorded plan {record.step}"
    return f"recorded settlement ({record.reason}) before step {record.step}"
