"""Buffered data source: which tasks to hand out, which groups make the next step, and what has become of every sample.

A pure state machine: no input or output, no clock (``now`` is passed in, monotonic seconds). What settles anything is a *record*
(a Plan, Settle or Requeue): ``plan`` only proposes one, the caller writes it to the log, and ``apply`` makes it true. A restart reads
the same records and samples and calls the same ``apply``, so live and replayed histories cannot differ.

Step k (1-based) trains the weights of step k - 1. Lag of a token = k - 1 - step of the version that made it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack

from bus.errors import WireError
from bus.messages import Cursor, Dead, Kind, Plan, PlanRecord, Requeue, Sample, Settle, Status, Task
from learner.admission import Admission, Reissue, TaskDemand
from learner.errors import ConfigRefused, ReplayMismatch
from learner.groups import BufferedSample, Group, mismatch
from learner.ledger import SampleAccounting, SampleCounter, SettledIds, field_of
from learner.plans import GENESIS, chain_of
from learner.rules import DataRules
from learner.selection import age, drop_reason, make_plan, make_settle, urgent

SCHEMA = 1
"""Of a snapshot."""

REISSUED = frozenset({"stale", "lost"})
"""Reasons that say nothing against the prompt: it is issued again."""

EARLY_IDS = 64
"""A sample may be read before the issue of its task is confirmed. An id that is farther ahead than this belongs to no task."""
EARLY_SAMPLES = 1024
"""Most samples that are kept for tasks whose issue is not confirmed yet; further ones are invalid. It bounds the memory that samples of
invented tasks can take."""


class Disposition(StrEnum):
    """What became of a sample at its arrival."""

    BUFFERED = "buffered"
    DUPLICATE = "duplicate"
    INVALID = "invalid"
    DROPPED = "dropped"
    EVAL = "eval"
    SEEN = "seen"


@dataclass(frozen=True, slots=True)
class Arrival:
    name: Disposition
    reason: str = ""
    """Of an invalid or dropped one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Why there is no plan yet."""

    text: str
    """In words: "13 more groups for step 7, for 42 s; 20 in flight, oldest 311 s"."""
    missing: int
    """Groups."""
    wake_in_s: float | None = None
    """Ask again after so long even if nothing happens."""


class DataSource:
    """See the module. Verbs raise ReplayMismatch when records and samples do not fit together."""

    def __init__(self, rules: DataRules, *, epoch: int = 0, created: str = "", floor: int = 0) -> None:
        """``created`` and ``floor``: the stream SAMPLES and where reading begins."""
        self.rules, self.epoch = rules, epoch
        self.step = 0
        """Last planned step."""
        self.chain = GENESIS
        self.plan_seq = 0
        """Sequence of the last applied record in the log PLAN."""
        self.changes = 0
        """Rises whenever ``plan`` or ``settlement`` may answer differently."""
        self._created = created
        self._admission, self._counter = Admission(rules), SampleCounter()
        self._samples, self._tasks = SettledIds(floor), SettledIds()
        self._groups: dict[int, Group] = {}
        self._early: dict[int, list[tuple[int, Sample, str]]] = {}
        self._evals: dict[int, set[int]] = {}
        self._eval_sizes: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        """Step of every version there is, as far as it is known."""
        self._after: dict[int, int] = {}
        """By version, once its row was read: the sequence that samples of it come after."""
        self._asked: dict[int, Dead] = {}
        """Dead tasks whose prompts somebody wants to see again; not recorded yet."""
        self._decided_dead: set[int] = set()
        """Tasks settled as dead, and not asked for again since."""
        self._filtered = 0
        self._waiting_since: float | None = None
        self._delayed_since: float | None = None

    # ---- admit

    def wanted(self) -> TaskDemand | None:
        """The next task to issue, None while the staleness budget or the rest of the run admits none."""
        return self._admission.wanted(num_open=len(self._groups), step=self.step)

    def issued(self, task: Task, now: float) -> None:
        """A task stands in the stream TASKS (just issued, or found there at a restart); in order of ids."""
        if not self._tasks.see(task.id):
            return
        if task.kind is Kind.EVAL:
            self._eval_sizes[task.id] = task.group_size
            self._place_early(task, now)
            return
        self._refuse_other_sampling(task)
        self._counter.issued += 1
        self._groups[task.id] = Group(task=task, touched_s=now)
        self._admission.issued(task)
        self._place_early(task, now)

    def _place_early(self, issued: Task, now: float) -> None:
        """Samples that came before the issue of this task. Those of smaller ids name no task: ids are issued in order."""
        for id in [id for id in self._early if id <= issued.id]:
            for seq, sample, actor in self._early.pop(id):
                if id == issued.id and issued.kind is Kind.TRAIN:
                    self._place(seq, sample, now, actor)
                else:
                    self._invalid(seq, "task", actor)
        for id in [id for id in self._evals if id not in self._eval_sizes and id <= issued.id]:
            del self._evals[id]
        self._settle_eval(issued.id)

    def _refuse_other_sampling(self, task: Task) -> None:
        want = (self.rules.temperature, self.rules.top_p, self.rules.top_k)
        got = (task.sampling.temperature, task.sampling.top_p, task.sampling.top_k)
        if want != got:
            raise ConfigRefused("sampling", f"{got}, as in task {task.id} of this run (another one needs another run)", want)

    # ---- take in

    def add(self, seq: int, sample: Sample | WireError, now: float, actor: str = "") -> Arrival:
        """A message of SAMPLES, in stream order. ``actor``: that of its subject. Versions that it names and ``unread_versions`` gives must
        have been looked up since it was stored: of one that is still unknown there is no row, and the sample is invalid."""
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
        if any(span.version not in self._steps or seq <= self._after.get(span.version, 0) for span in sample.spans):
            return self._invalid(seq, "version", actor)
        if self._tasks.knows(sample.task):
            return self._place(seq, sample, now, actor)
        if not self._may_come_early(sample):
            return self._invalid(seq, "task", actor)
        self._early.setdefault(sample.task, []).append((seq, sample, actor))
        return Arrival(Disposition.BUFFERED)

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
        self.changes += group.full
        return Arrival(Disposition.BUFFERED)

    def _add_eval(self, seq: int, sample: Sample) -> Arrival:
        self._counter.eval += 1
        size = self._eval_sizes.get(sample.task)
        if sample.index < size if size is not None else not self._tasks.knows(sample.task) and self._may_come_early(sample):
            self._evals.setdefault(sample.task, set()).add(sample.index)
            self._settle_eval(sample.task)
        return self._settled(seq, Arrival(Disposition.EVAL))

    def _may_come_early(self, sample: Sample) -> bool:
        """Whether its task may be one that is just being issued, and there is room to keep it until then."""
        if sample.task > self._tasks.seen_to + EARLY_IDS:
            return False
        evals = sum(len(seen) for id, seen in self._evals.items() if id not in self._eval_sizes)
        return evals + sum(map(len, self._early.values())) < EARLY_SAMPLES

    def _settle_eval(self, id: int, *, dead: bool = False) -> None:
        """An evaluation task is open until each of its samples has been seen; it takes no place and no part in any step."""
        size = self._eval_sizes.get(id)
        if size is not None and (dead or len(self._evals.get(id, ())) >= size):
            self._evals.pop(id, None)
            del self._eval_sizes[id]
            self._tasks.settle(id)

    def _invalid(self, seq: int, reason: str, actor: str) -> Arrival:
        self._counter.refuse(reason, actor)
        return self._settled(seq, Arrival(Disposition.INVALID, reason))

    def _duplicate(self, seq: int) -> Arrival:
        self._counter.duplicate += 1
        return self._settled(seq, Arrival(Disposition.DUPLICATE))

    def _settled(self, seq: int, arrival: Arrival) -> Arrival:
        self._samples.settle(seq)
        return arrival

    def dead(self, id: int) -> None:
        """A task was declared dead: it is settled with the next records."""
        self._abandon(id, "dead")

    def lost(self, id: int) -> None:
        """A task that is over without its samples: settled with the next records, and its prompt issued again."""
        self._abandon(id, "lost")

    def requeue(self, dead: Dead) -> None:
        """Somebody wants the prompt of a dead task to be issued again: with the next records, and once, however often it is said."""
        if dead.root >= 0:
            self._asked[dead.task] = dead
            self.changes += 1

    def _abandon(self, id: int, reason: str) -> None:
        self._settle_eval(id, dead=True)
        group = self._groups.get(id)
        if group is not None and not group.abandoned:
            group.abandoned = reason
            self.changes += 1

    # ---- versions

    def version(self, version: int, step: int, after: int = 0) -> None:
        """As its row says: the weights called ``version`` are those of ``step``, and no sample up to sequence ``after`` is of them."""
        self._note_step(version, step)
        self._after[version] = after

    def _note_step(self, version: int, step: int) -> None:
        if self._steps.setdefault(version, step) != step:
            raise ReplayMismatch(f"version {version}", f"weights of step {self._steps[version]}", f"step {step}")

    def published(self, version: int, step: int) -> None:
        """``version`` is the head: tasks trained up to its step give their places back, and new ones ask for it."""
        self._note_step(version, step)
        self._admission.published(version, step)
        self.changes += 1

    @property
    def versions(self) -> dict[int, int]:
        """Step of every version known so far."""
        return dict(self._steps)

    @property
    def head(self) -> tuple[int, int] | None:
        """(version, step) of the newest published weights."""
        return self._admission.head

    def unread_versions(self, sample: Sample) -> set[int]:
        """Versions that a sample names and ``version`` has not been called for."""
        return {span.version for span in sample.spans if span.version not in self._after}

    # ---- decide

    def settlement(self) -> Settle | Requeue | None:
        """What is to be recorded before anything is planned: tasks given up, one reason at a time, then prompts asked for again."""
        by_reason: dict[str, list[Group]] = {}
        for group in self._groups.values():
            reason = group.abandoned or (drop_reason(group, self._steps, self.rules, self.step + 1) if self._ready(group) else "")
            if reason:
                by_reason.setdefault(reason, []).append(group)
        if not by_reason:
            return self._next_requeue()
        reason, groups = min(by_reason.items())
        return make_settle(groups, reason, epoch=self.epoch, step=self.step + 1)

    def _next_requeue(self) -> Requeue | None:
        asked = self._asked.keys() & self._decided_dead
        if not asked:
            return None
        dead = self._asked[min(asked)]
        return Requeue(
            epoch=self.epoch,
            task=dead.task,
            root=dead.root,
            count=dead.reissues + 1,
            prompt_epoch=dead.prompt_epoch,
            offset=dead.offset,
            step=self.step + 1,
        )

    def plan(self, now: float) -> Plan | Settle | Requeue | Waits:
        """The next record to write (a Settle first, if there is one), or what the next step waits for."""
        if settle := self.settlement():
            return settle
        ready = sorted((group for group in self._groups.values() if self._ready(group)), key=lambda group: age(group, self._steps))
        wanted = 1 if self.refilled_enough else self.rules.groups_per_step
        if len(ready) < wanted:
            return self._waits(now, wanted - len(ready))
        chosen = ready[: self.rules.groups_per_step]
        in_flight = (group for group in self._groups.values() if not self._ready(group))
        if old := urgent(in_flight, chosen, self._steps, self.rules, self.step + 1):
            self._delayed_since = now if self._delayed_since is None else self._delayed_since
            left = self._delayed_since + self.rules.order_deadline_s - now
            if left > 0:
                return self._waits_for_old(now, old, left)
        return make_plan(chosen, self._steps, self.rules, epoch=self.epoch, step=self.step + 1, chain=self.chain)

    @property
    def refilled_enough(self) -> bool:
        """So many groups were filtered for this step that it may run short."""
        return self._filtered >= self.rules.max_filtered

    def _ready(self, group: Group) -> bool:
        return group.full and not group.abandoned

    def _waits(self, now: float, missing: int) -> Waits:
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        parts = [f"{missing} more group{'s' * (missing > 1)} for step {self.step + 1}, for {now - self._waiting_since:.0f} s"]
        flying = [group.task.id for group in self._groups.values() if not group.full]
        touched = [group.touched_s for group in self._groups.values() if not group.full]
        parts.append(
            f"{len(flying)} in flight, oldest task {min(flying)}, silent for {now - min(touched):.0f} s" if flying else "none in flight"
        )
        if self.head is None:
            parts.append("no version is published yet")
        return Waits(text="; ".join(parts), missing=missing)

    def _waits_for_old(self, now: float, old: list[Group], left: float) -> Waits:
        silent = now - min(group.touched_s for group in old)
        text = (
            f"{len(old)} group{'s' * (len(old) > 1)} in flight (task {old[0].task.id}, silent for {silent:.0f} s) that would be "
            f"too old for step {self.step + 2}; step {self.step + 1} goes without in {left:.0f} s"
        )
        return Waits(text=text, missing=len(old), wake_in_s=left)

    # ---- settle

    def lacks(self, record: PlanRecord) -> list[int]:
        """Sequences of a record that have not been read yet. Raises ReplayMismatch for those that were and cannot be used."""
        if not isinstance(record, Plan | Settle):
            return []
        buffered = {sample.seq for task in record.tasks if int(task) in self._groups for sample in self._groups[int(task)].samples.values()}
        missing = [int(seq) for seq in record.seqs if int(seq) not in buffered]
        if read := [seq for seq in missing if self._samples.knows(seq)]:
            raise ReplayMismatch(_label(record), "its samples in the stream", f"sequences {read[:5]} cannot be used")
        return missing

    def apply(self, record: PlanRecord, seq: int) -> None:
        """A record stands in the log PLAN at ``seq``: it is true now."""
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
        if (chain := chain_of(self.chain, plan)) != plan.chain:
            raise ReplayMismatch(_label(plan), f"chain {plan.chain}", chain)
        for group in self._open(plan):
            self._count_tokens(plan, group)
        self._close(self._open(plan), plan.seqs.tolist(), "trained")
        self._admission.planned(plan.step, len(plan.tasks))
        self.step, self.chain, self._filtered = plan.step, plan.chain, 0
        self._waiting_since = self._delayed_since = None

    def _count_tokens(self, plan: Plan, group: Group) -> None:
        too_old = plan.step - 1 - self.rules.max_lag
        for step, count in group.tokens_by_step(plan.version_steps).items():
            masked = plan.oldest_step is not None and step < plan.oldest_step
            self._counter.tokens["masked" if masked else "trained"] += count
            self._counter.tokens["too_old"] += count * (not masked and step < too_old)

    def _apply_settle(self, settle: Settle) -> None:
        groups = self._open(settle)
        self._close(groups, settle.seqs.tolist(), settle.reason)
        self._filtered += len(groups) * (settle.reason == "filtered")
        if settle.reason == "dead":
            self._decided_dead.update(group.task.id for group in groups)
        if settle.reason in REISSUED:
            still_open = [group.task for group in self._groups.values()]
            for group in groups:
                self._counter.given_up += not self._admission.schedule_reissue(group.task, still_open)

    def _apply_requeue(self, record: Requeue) -> None:
        if record.task not in self._decided_dead:
            raise ReplayMismatch(f"requeue of task {record.task}", "a task settled as dead, and not requeued since", "none")
        self._decided_dead.remove(record.task)
        again = Reissue(root=record.root, count=record.count, prompt_epoch=record.prompt_epoch, offset=record.offset)
        self._admission.schedule_requeue(again, [group.task for group in self._groups.values()])

    def _open(self, record: Plan | Settle) -> list[Group]:
        closed = [int(task) for task in record.tasks if int(task) not in self._groups]
        if closed:
            raise ReplayMismatch(_label(record), "its tasks open", f"tasks {closed[:5]} settled or unknown")
        return [self._groups[int(task)] for task in record.tasks]

    def _close(self, groups: list[Group], seqs: list[int], reason: str) -> None:
        """Samples in ``seqs`` meet ``reason``; others of these groups came too late to be in the record."""
        named = set(seqs)
        for group in groups:
            del self._groups[group.task.id]
            self._tasks.settle(group.task.id)
            self._counter.settled[reason] += 1
            for sample in group.rows:
                if sample.seq in named:
                    self._counter.count(reason)
                    self._samples.settle(sample.seq)
                else:
                    self._duplicate(sample.seq)

    # ---- look

    def buffered(self) -> set[int]:
        """Sequences of all buffered samples."""
        early = {seq for waiting in self._early.values() for seq, *_ in waiting}
        return early | {sample.seq for group in self._groups.values() for sample in group.samples.values()}

    def incomplete(self) -> list[int]:
        """Open training tasks that lack samples."""
        return [id for id in self._groups if self.lacks_samples(id)]

    def lacks_samples(self, id: int) -> bool:
        """It is one of them."""
        group = self._groups.get(id)
        return group is not None and not group.full and not group.abandoned

    def lack(self, id: int) -> str:
        """What an open task lacks, in words."""
        group = self._groups[id]
        return f"{group.task.group_size - len(group.samples)} of its {group.task.group_size} samples are missing or invalid"

    def cursor(self) -> Cursor:
        """Where a restart has to read on, if the state is this one."""
        return Cursor(created=self._created, floor=self._samples.floor, settled=self._samples.settled)

    @property
    def task_floor(self) -> int:
        """All tasks with ids up to this are settled."""
        return self._tasks.floor

    def accounting(self) -> SampleAccounting:
        return self._counter.accounting(buffered=len(self.buffered()), open_tasks=len(self._groups))

    # ---- keep

    def snapshot(self) -> bytes:
        """The state as computed with the last applied plan; what is open is not in it: it will be read again."""
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
                "buried": sorted(self._decided_dead),
                "evals": sorted((id, sorted(seen)) for id, seen in self._evals.items()),
                "tally": self._counter.dump(buffered=len(self.buffered()), open_tasks=len(self._groups)),
            }
        )

    @classmethod
    def restore(cls, rules: DataRules, data: bytes, *, epoch: int = 0) -> "DataSource":
        """The state of a snapshot. Then tell it the tasks behind ``task_floor``, the dead ones, versions and head, the samples
        from ``cursor()``, and ``apply`` the records behind ``plan_seq``.

        Raises ConfigRefused when the run's identity is another, ReplayMismatch for another schema.
        """
        state = read_state(data)
        for name, value in rules.identity.items():
            if state["identity"].get(name, value) != value:
                want = f"{state['identity'].get(name)!r}, as in the checkpoint (another one needs another run)"
                raise ConfigRefused(name, want, value)
        source = cls(rules, epoch=epoch, created=state["samples"]["created"])
        source.step, source.chain, source.plan_seq = state["step"], state["chain"], state["plan_seq"]
        source._samples = SettledIds(state["samples"]["floor"], state["samples"]["settled"])
        source._tasks = SettledIds(state["tasks"]["floor"], state["tasks"]["settled"])
        source._admission.load(state["admission"])
        source._decided_dead = set(state.get("buried", ()))
        source._evals = {id: set(seen) for id, seen in state["evals"]}
        source._counter = SampleCounter.load(state["tally"])
        return source


def read_state(data: bytes) -> dict[str, Any]:
    """The map of a snapshot. Raises ReplayMismatch for another schema."""
    state: dict[str, Any] = msgpack.unpackb(data)
    if state.get("schema") != SCHEMA:
        raise ReplayMismatch("state of the data", f"schema {SCHEMA}", state.get("schema"))
    return state


def _label(record: Plan | Settle) -> str:
    return (
        f"recorded plan {record.step}" if isinstance(record, Plan) else f"recorded settlement ({record.reason}) before step {record.step}"
    )
