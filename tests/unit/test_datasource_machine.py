"""The DataSource under random histories: invariants after every event, and restarts that change nothing."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.data_kit import rules, sample, task
from tests.examples import examples
from tidemill.bus.errors import WireError
from tidemill.bus.wire.messages import Dead, Kind, Plan, Requeue, Sample, Settle, Status, Task
from tidemill.learner.batch.batching import trainable_lags
from tidemill.learner.buffer.arrivals import Disposition
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.groups import Verdict
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.buffer.step_plan import Waits

NUM_PROMPTS = 5
REACHED: Counter[str] = Counter()


class History(RuleBasedStateMachine):
    """The world outside of the DataSource: three streams and the registry, all of which survive a crash."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Task] = []
        self.stream: list[Sample | WireError] = []
        self.log: list[Plan | Settle | Requeue] = []
        self.steps: dict[int, int] = {}
        self.after: dict[int, int] = {}
        """The registry: step of every version, and the end of the stream when its row was written."""
        self.lies: set[int] = set()
        """Sequences of samples that name versions which did not exist when they were stored."""
        self.dead: list[int] = []
        self.words: list[Dead] = []
        self.snapshots: dict[int, bytes] = {}
        self.read_to = 0
        self.now = 0.0
        self.next_id = 1
        self.kept: set[tuple[int, int]] = set()
        """(step, task) of the groups that the buffer filters have kept for a step."""

    @initialize(
        max_lag=st.integers(0, 2),
        gate=st.sampled_from(["mask", "drop", "train"]),
        filtering=st.booleans(),
        data_parallel=st.integers(1, 2),
        num_epochs=st.sampled_from([0, 0, 1, 2]),
        rejected=st.sampled_from([0.0, 0.0, 0.5, 0.99]),
        least=st.sampled_from([0, 0, 1, 2]),
        choosing=st.booleans(),
    )
    def begin(
        self,
        max_lag: int,
        gate: str,
        filtering: bool,
        data_parallel: int,
        num_epochs: int,
        rejected: float = 0.0,
        least: int = 0,
        choosing: bool = False,
    ) -> None:
        self.rejected = rejected
        self.rules: DataRules = rules(
            steps=6,
            num_epochs=num_epochs,
            max_lag=max_lag,
            gate=gate,
            filter_zero_variance=filtering,
            max_reissues=1,
            max_refill=1.0,
            order_deadline_s=1.0,
            data_parallel=data_parallel,
            filters=f"drop {rejected}" if rejected else "",
            buffer_filters=choosing and rejected > 0,
            over_sampling=rejected,
            min_group_size=least,
        )
        self.source = DataSource(self.rules)
        self.steps[0] = self.after[0] = 0
        self.source.published(0, 0)

    # ---- events

    @rule(count=st.integers(1, 6))
    def issue_some(self, count: int) -> None:
        for _ in range(count):
            self.issue(True, 0, 1)

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 8))
    def turns(self, seed: int, count: int) -> None:
        """Perform the events of a mostly healthy run; the other rules disturb it."""
        chance = random.Random(seed)
        for _ in range(count):
            self.confirm()
            for _ in range(chance.randint(0, self.rules.admitted)):
                self.issue(True, chance.randint(0, 1), chance.randint(0, 9))
            self.complete(chance)
            self.read(chance.randint(0, 12))
            if chance.random() < 0.8:
                self.judge(chance.randint(1, 9))
                self.propose()
            if chance.random() < 0.7:
                self.publish(chance)
            if chance.random() < 0.2:
                self.bury(chance)
            self.now += chance.uniform(0, 2)

    @rule(confirmed=st.booleans(), gap=st.integers(0, 1), evaluation=st.integers(0, 5))
    def issue(self, confirmed: bool, gap: int, evaluation: int) -> None:
        wanted = self.source.wanted()
        if wanted is None or any(one.id > self.seen_task for one in self.tasks):
            return
        self.next_id += gap  # a fence stands between
        epoch, offset = wanted.prompt_epoch, wanted.offset
        if offset >= NUM_PROMPTS:
            epoch, offset = epoch + 1, 0
        if wanted.reissue_of is None and 0 < self.rules.num_epochs <= epoch:
            self.source.passed(epoch)
            return
        new = task(
            self.next_id,
            prompt_epoch=epoch,
            offset=offset,
            reissue_of=wanted.reissue_of,
            reissues=wanted.reissues,
            min_version=wanted.min_version,
            issue_step=wanted.issue_step,
        )
        if evaluation == 0:
            new = replace(new, kind=Kind.EVAL)
        self.next_id += 1
        self.tasks.append(new)
        if confirmed:
            self.source.issued(new, self.now)

    @rule()
    def confirm(self) -> None:
        for one in self.tasks:
            self.source.issued(one, self.now)

    @precondition(lambda self: self.tasks and self.steps)
    @rule(data=st.data())
    def respond(self, data: st.DataObject) -> None:
        of = data.draw(st.sampled_from(self.tasks[-8:]))
        index = data.draw(st.integers(0, of.group_size - 1))
        old = [version for version in self.steps if version >= of.min_version]
        first = data.draw(st.sampled_from(old))
        second = data.draw(st.sampled_from([version for version in old if version >= first]))
        status = data.draw(st.sampled_from([Status.COMPLETED] * 5 + [Status.TRUNCATED, Status.FAILED, Status.ABORTED]))
        reward = float(data.draw(st.integers(0, 1)))
        self.store(
            of, index, first, second + data.draw(st.sampled_from([0] * 5 + [1, 3])), status=status, reward=reward
        )

    def store(self, of: Task, index: int, first: int, second: int, **changes: Any) -> None:
        """Store a sample, which may name versions that do not exist yet."""
        self.stream.append(sample(of, index, ((first, 2), (second, 1)), attempt=str(len(self.stream)), **changes))
        if not {first, second} <= self.steps.keys():
            self.lies.add(len(self.stream))

    def complete(self, chance: random.Random) -> None:
        """Store whole groups for some of the tasks without samples; now and then a sample is stored twice."""
        worked = {one.task for one in self.stream if isinstance(one, Sample)}
        for of in [
            one for one in self.tasks if one.id not in worked and chance.random() < (0.1 if one.id % 4 == 0 else 0.7)
        ]:
            versions = sorted(version for version in self.steps if version >= of.min_version)
            equal = chance.random() < 0.2
            if self.rules.min_group_size and of.id % 5 == 1:  # the others have failed for good
                self.store(of, chance.randrange(of.group_size), chance.choice(versions), max(versions))
                self.dead.append(of.id)
                self.source.dead(of.id)
                continue
            for index in [*range(of.group_size), *chance.choices(range(of.group_size), k=chance.randint(0, 1))]:
                first = chance.choice(versions)
                second = chance.choice([version for version in versions if version >= first])
                if chance.random() < 0.1:
                    self.store(of, index, first, max(self.steps) + chance.choice((1, 3)))
                self.store(of, index, first, second, reward=1.0 if equal else float(index))

    @rule()
    def garble(self) -> None:
        self.stream.append(WireError("tokens", "bytes", None))

    @rule(count=st.integers(1, 20))
    def read(self, count: int) -> None:
        for seq in range(self.read_to + 1, min(len(self.stream), self.read_to + count) + 1):
            self.take_in(seq)
            self.read_to = seq

    def take_in(self, seq: int) -> None:
        """Add one message, after the DataSource has read the versions it names from the present registry."""
        one = self.stream[seq - 1]
        actor = f"actor-{seq % 3}"
        if not isinstance(one, Sample):
            self.source.refuse(seq, one, actor)
            return
        index = index_of(seq, one, actor)
        for version in self.source.unread_versions(index) & self.steps.keys():
            self.source.version(version, self.steps[version], (self.after[version],))
        self.source.add(index, self.now)

    def bury(self, chance: random.Random) -> None:
        for id in chance.choices([one.id for one in self.tasks[-8:] if one.id <= self.seen_task] or [1]):
            if chance.random() < 0.5:
                self.dead.append(id)
                self.source.dead(id)
                if chance.random() < 0.5:
                    self.ask_again(id)
            elif (
                self.source.lacks_samples(id) and self.source.step < self.rules.steps
            ):  # behind the last step nothing is recorded
                self.source.lost(id)
                self.propose()  # a lost task is not reported again after a restart: it counts once it is recorded

    def ask_again(self, id: int) -> None:
        """Request the requeue once or twice, of a task that may have been trained before it was declared dead."""
        (of,) = [one for one in self.tasks if one.id == id] or [task(id)]
        root = of.id if of.reissue_of is None else of.reissue_of
        place = {"root": root, "reissues": of.reissues, "prompt_epoch": of.prompt_epoch, "offset": of.offset}
        self.words.append(Dead(task=id, reason="", attempts=1, actor="", prompt="", **place))
        self.source.requeue(self.words[-1])

    @rule(chance=st.randoms(use_true_random=False))
    def publish(self, chance: random.Random) -> None:
        version = max(self.steps) + 1
        step = chance.choice(
            [self.source.step, self.source.step, chance.randint(max(self.steps.values()), self.source.step)]
        )
        self.steps[version], self.after[version] = step, len(self.stream)
        if chance.random() < 0.7:
            self.source.published(version, step)

    @rule(seconds=st.floats(0.1, 4.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 4))
    def judge(self, count: int) -> None:
        """Have the filters decide on some of the complete groups."""
        for of, seqs in self.source.unjudged()[:count]:
            self.source.judged(of.id, self.verdict(of, seqs), seqs)
        if count > 1:
            self.choose(self.source)

    def choose(self, source: DataSource) -> None:
        """Have the buffer filters decide on the groups there are; each decision depends on the group alone."""
        if found := source.unchosen():
            REACHED["chosen"] += 1
            choices = [
                (of.id, seqs, replace(self.verdict(of, [*seqs, 1]), masked=frozenset())) for of, seqs, _ in found
            ]
            source.chosen(source.step + 1, choices)
            self.kept |= {(source.step + 1, id) for id, _, choice in choices if not choice.reason}

    def verdict(self, of: Task, seqs: list[int]) -> Verdict:
        """Return the decision of a filter, which depends on the group alone."""
        chance = random.Random(of.id * 1000 + sum(seqs))
        masked = frozenset(index for index in range(of.group_size) if chance.random() < 0.3)
        if chance.random() < self.rejected or len(masked) == of.group_size:
            return Verdict(reason=f"filtered:f{of.id % 3}", masked=masked)
        return Verdict(masked=masked, priority=chance.choice([0.0, 0.0, 1.0, -2.0]))

    @rule()
    def propose(self) -> None:
        """Propose and record everything that can be recorded now."""
        while self.source.step < self.rules.steps and not isinstance(record := self.source.plan(self.now), Waits):
            self.record(record)

    def record(self, record: Plan | Settle | Requeue) -> None:
        self.log.append(record)
        self.source.apply(record, len(self.log))
        if isinstance(record, Plan):
            self.snapshots[record.step] = self.source.snapshot()

    @rule(chance=st.randoms(use_true_random=False), before_apply=st.booleans())
    def crash(self, chance: random.Random, before_apply: bool) -> None:
        """End the process, perhaps between writing a record and applying it; another begins, from any checkpoint or
        none.
        """
        old = self.source
        self.confirm()
        if before_apply and old.step < self.rules.steps and not isinstance(record := old.plan(self.now), Waits):
            self.log.append(record)
            old.apply(record, len(self.log))
        checkpoint = chance.choice([0, *self.snapshots])
        self.source = new = (
            DataSource.restore(self.rules, self.snapshots[checkpoint]) if checkpoint else DataSource(self.rules)
        )
        self.confirm()
        for id in self.dead:
            new.dead(id)
        for word in self.words:
            new.requeue(word)
        self.replay()
        if old.head is not None:
            new.published(*old.head)
        if 0 < self.rules.num_epochs <= old._admission._position[0]:  # it finds that out by its next look for a prompt
            new.passed(self.rules.num_epochs)
        for source in (old, new):
            for of, seqs in source.unjudged():
                source.judged(of.id, self.verdict(of, seqs), seqs)
            self.choose(source)
        assert new.exhausted == old.exhausted
        assert new.snapshot() == old.snapshot()
        assert new.accounting() == old.accounting()
        assert _buffered(new) == _buffered(old)
        assert new.wanted() == old.wanted()
        late = self.now + 100
        assert _same(new.plan(late), old.plan(late)) or _same(new.plan(late + 100), old.plan(late + 100))

    def replay(self) -> None:
        new = self.source
        settled, position = set(new.cursor().settled), new.cursor().floor
        for number, record in list(enumerate(self.log, 1))[new.plan_seq :]:
            while new.lacks(record):
                position += 1
                if position not in settled:
                    self.take_in(position)
            new.apply(record, number)
            if isinstance(record, Plan):
                self.snapshots[record.step] = new.snapshot()
        for seq in range(position + 1, self.read_to + 1):
            if seq not in settled:
                self.take_in(seq)

    # ---- invariants

    @property
    def seen_task(self) -> int:
        return self.source._arrivals.tasks.seen_to

    @property
    def plans(self) -> list[Plan]:
        return [record for record in self.log if isinstance(record, Plan)]

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "source"):
            return
        books = self.source.accounting()
        assert books.balanced, books
        assert sum(books.invalid.values()) == sum(books.invalid_of.values())
        messages = self.stream[: self.read_to]
        assert books.published == sum(1 for one in messages if isinstance(one, WireError) or one.kind is Kind.TRAIN)
        assert books.trained == sum(len(plan.seqs) for plan in self.plans)

    @invariant()
    def admission_is_bounded(self) -> None:
        if not hasattr(self, "source") or self.source.head is None:
            return
        gone = {int(id) for record in self.log if isinstance(record, Settle) for id in record.tasks}
        gone |= {int(id) for plan in self.plans if plan.step <= self.source.head[1] for id in plan.tasks}
        out = [one for one in self.tasks if one.id not in gone and one.kind is Kind.TRAIN]
        assert len(out) <= self.rules.admitted
        planned = {int(id) for plan in self.plans for id in plan.tasks}
        short = sum(self.rules.groups_per_step - len(plan.tasks) for plan in self.plans)  # with groups left over
        left = (self.rules.steps - self.source.step) * self.rules.groups_per_step + short
        assert len([one for one in out if one.id not in planned]) <= left

    @invariant()
    def passes_are_whole(self) -> None:
        """Every prompt of every pass is issued before the end, and settled by a record or given up at its last
        reissue.
        """
        if not hasattr(self, "source"):
            return
        places = [(one.prompt_epoch, one.offset) for one in self.tasks if one.kind is Kind.TRAIN and not one.reissues]
        if passes := self.rules.num_epochs:
            assert all(epoch < passes for epoch, _ in places)
        if not self.source.exhausted:
            return
        REACHED["exhausted"] += 1
        assert {(epoch, offset) for epoch in range(passes) for offset in range(NUM_PROMPTS)} == set(places)
        settled = {int(id) for record in self.log if not isinstance(record, Requeue) for id in record.tasks}
        assert {one.id for one in self.tasks if one.kind is Kind.TRAIN} == settled
        assert self.source.wanted() is None

    @invariant()
    def nothing_is_used_twice(self) -> None:
        for name in ("seqs", "tasks"):
            used = [
                int(value) for record in self.log if not isinstance(record, Requeue) for value in getattr(record, name)
            ]
            assert len(used) == len(set(used))
        places = [(one.prompt_epoch, one.offset) for one in self.tasks if not one.reissues and one.kind is Kind.TRAIN]
        assert len(places) == len(set(places))
        again = [(one.reissue_of, one.reissues) for one in self.tasks if one.reissues and one.kind is Kind.TRAIN]
        assert len(again) == len(set(again))

    @invariant()
    def plans_hold_whole_groups_of_first_valid_samples(self) -> None:
        for plan in self.plans:
            rows = [self.stream[int(seq) - 1] for seq in plan.seqs]
            masked = set[int]() if plan.masked is None else set(plan.masked.tolist())
            if not self.rejected:
                assert not masked
            places = [(row.task, row.index) for row in rows if isinstance(row, Sample)]
            if self.rules.buffer_filters:
                assert {(plan.step, int(id)) for id in plan.tasks} <= self.kept
            assert [id for id, _ in places] == [
                int(id) for id, size in zip(plan.tasks, plan.group_sizes, strict=True) for _ in range(size)
            ]
            for id, size in zip(plan.tasks.tolist(), plan.group_sizes.tolist(), strict=True):
                (of,) = [one for one in self.tasks if one.id == id]
                indexes = [index for its, index in places if its == id]
                assert indexes == sorted(set(indexes)) and len(indexes) == size
                if size < of.group_size:  # of a dead task, with as many as are enough
                    assert id in self.dead and size >= self.rules.min_group_size > 0
                    REACHED["short"] += 1
            for row, seq in zip(rows, plan.seqs, strict=True):
                assert isinstance(row, Sample)
                assert int(seq) not in self.lies
                for earlier, one in enumerate(self.stream[: int(seq) - 1], 1):
                    assert not (
                        earlier not in self.lies and _valid(one) and (one.task, one.index) == (row.task, row.index)
                    )  # type: ignore[union-attr]

    @invariant()
    def nothing_too_old_is_trained(self) -> None:
        for plan in self.plans:
            masked = set[int]() if plan.masked is None else set(plan.masked.tolist())
            for seq in (
                set(plan.seqs.tolist()) - masked
            ):  # of samples that a filter has masked nothing is trained, however old
                row = self.stream[seq - 1]
                assert isinstance(row, Sample)
                everything = trainable_lags(row, self.steps, plan.step, None)
                trained = trainable_lags(row, plan.version_steps, plan.step, plan.oldest_step)
                if self.rules.staleness.gate != "train":
                    assert trained.max(initial=-1) <= self.rules.staleness.max_lag
                if self.rules.staleness.gate == "drop":
                    assert everything.max(initial=-1) <= self.rules.staleness.max_lag
                if self.rules.staleness.gate == "train":
                    assert (trained == everything).all()


def _valid(one: Any) -> bool:
    return isinstance(one, Sample) and one.status in (Status.COMPLETED, Status.TRUNCATED)


def _buffered(source: DataSource) -> set[int]:
    return {seq for group in source.groups.values() for seq in group.seqs}


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Plan):
        return bool(one.chain == other.chain)
    if isinstance(one, Settle):
        return (one.reason, one.tasks.tolist(), one.seqs.tolist()) == (
            other.reason,
            other.tasks.tolist(),
            other.seqs.tolist(),
        )
    if isinstance(one, Requeue):
        return one == other
    return bool(one.missing == other.missing)


History.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistory = History.TestCase


@pytest.mark.parametrize("seed", range(40))
def test_long_histories(seed: int) -> None:
    """Histories longer than those that hypothesis builds from small steps: up to the plan of the last step, with
    crashes on the way.
    """
    chance, history = random.Random(seed), History()
    history.begin(
        chance.randint(0, 2),
        ("mask", "drop", "train")[seed % 3],
        chance.random() < 0.3,
        chance.randint(1, 2),
        2 if seed % 4 == 0 else 0,
        (0.0, 0.5, 0.9)[seed // 3 % 3],
        (0, 1, 2)[seed // 2 % 3],
        seed % 5 < 2,
    )
    for _ in range(80):
        history.turns(chance.randint(0, 1 << 32), 1)
        if chance.random() < 0.2:
            history.crash(chance, chance.random() < 0.5)
        for check in (
            history.books_balance,
            history.admission_is_bounded,
            history.nothing_is_used_twice,
            history.passes_are_whole,
            history.nothing_too_old_is_trained,
            history.plans_hold_whole_groups_of_first_valid_samples,
        ):
            check()
    REACHED.update(record.reason.partition(":f")[0] for record in history.log if isinstance(record, Settle))
    REACHED["masked samples"] += sum(plan.masked is not None for plan in history.plans)
    REACHED["by a filter"] += sum(
        record.reason.startswith("filtered:") for record in history.log if isinstance(record, Settle)
    )
    REACHED.update(name for name, count in history.source.accounting().tokens.items() if count)
    REACHED["requeued"] += sum(isinstance(record, Requeue) for record in history.log)
    REACHED["steps"] += history.source.step
    REACHED["lies"] += history.source.accounting().invalid.get("version", 0)
    REACHED["given up"] += history.source.accounting().given_up


def test_long_histories_reach_every_outcome() -> None:
    for outcome in (
        "stale",
        "filtered",
        "dead",
        "lost",
        "masked",
        "too_old",
        "trained",
        "given up",
        "requeued",
        "lies",
        "exhausted",
        "masked samples",
        "by a filter",
        "short",
        "chosen",
    ):
        assert REACHED[outcome], (outcome, REACHED)


def test_dispositions_have_fixed_names() -> None:
    assert {name.value for name in Disposition} == {"buffered", "duplicate", "invalid", "dropped", "eval", "seen"}
