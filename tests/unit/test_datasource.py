"""The DataSource's rules, one by one."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data_kit import RUN, eval_task, rules, sample, task
from tests.refusals import refusal
from tidemill.bus.errors import WireError
from tidemill.bus.wire.codec import encode_record
from tidemill.bus.wire.messages import Dead, Plan, Requeue, SequenceSize, Settle, Status, Task
from tidemill.bus.wire.subjects import Shards
from tidemill.learner.buffer.arrivals import EARLY_SAMPLES, Arrival, Disposition
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.groups import SampleGroup, Verdict
from tidemill.learner.buffer.ledger import SettledSamples, cursor_of, dump_cursor
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.buffer.step_plan import Waits, fit_groups, plan_bytes, settle_bytes
from tidemill.learner.errors import ConfigRefused, ReplayMismatch


class Pond:
    """A DataSource with the streams around it: plans are recorded and applied at once."""

    def __init__(self, **changes: Any) -> None:
        self.source = DataSource(rules(**changes), epoch=1)
        self.source.published(0, 0)
        self.seq = self.records = 0
        self.now = 0.0

    def issue(self, *ids: int, **changes: Any) -> list[Task]:
        version, step = self.source.head or (0, 0)
        issued = [task(id, **({"min_version": version, "issue_step": step} | changes)) for id in ids]
        for one in issued:
            self.source.issued(one, self.now)
        return issued

    def add(self, one: Any) -> Arrival:
        self.seq += 1
        if isinstance(one, WireError):
            return self.source.refuse(self.seq, one)
        return self.source.add(index_of(self.seq, one), self.now)

    def complete(self, of: Task, *spans: tuple[int, int], rewards: tuple[float, float] = (0.0, 1.0)) -> None:
        for index, reward in enumerate(rewards):
            assert (
                self.add(sample(of, index, spans or ((of.min_version, 3),), reward=reward)).name is Disposition.BUFFERED
            )

    def take(self) -> Plan | Settle | Requeue:
        record = self.source.plan(self.now)
        assert not isinstance(record, Waits), record.text
        self.records += 1
        self.source.apply(record, self.records)
        return record

    def take_plan(self) -> Plan:
        plan = self.take()
        assert isinstance(plan, Plan)
        return plan

    def take_settle(self) -> Settle:
        settle = self.take()
        assert isinstance(settle, Settle)
        return settle

    def waits(self) -> Waits:
        waits = self.source.plan(self.now)
        assert isinstance(waits, Waits)
        return waits


# ---- admit


def test_nothing_is_issued_before_a_version_is_published() -> None:
    assert DataSource(rules()).wanted() is None


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_admission_ends_at_the_bound(max_lag: int) -> None:
    pond = Pond(max_lag=max_lag)
    for id in range(1, 2 * (max_lag + 1) + 1):
        assert pond.source.wanted() is not None
        pond.issue(id)
    assert pond.source.wanted() is None


def test_tasks_are_demanded_behind_prompts_that_are_drawn() -> None:
    pond = Pond(max_lag=0)
    first, second = pond.source.wanted(), pond.source.wanted([(0, 4)])
    assert first is not None and second is not None
    assert (first.offset, second.offset) == (0, 5)
    assert pond.source.wanted([(0, 4), (0, 5)]) is None, "two are admitted"


def test_a_reissue_is_demanded_alone() -> None:
    pond, old = at_step_three("mask", over_sampling=4.0)
    assert pond.source.wanted([(0, 9)]) is not None
    pond.complete(old, (0, 5))
    pond.take_settle()
    assert pond.source.wanted() is not None
    assert pond.source.wanted([(0, 9)]) is None


def test_admission_ends_with_the_run() -> None:
    pond = Pond(steps=1, max_lag=5)
    pond.issue(1, 2)
    assert pond.source.wanted() is None
    pond.source.dead(1)
    pond.take_settle()
    assert pond.source.wanted() is not None


def test_a_place_is_given_back_when_its_step_is_published() -> None:
    pond = Pond(max_lag=0)
    for one in pond.issue(1, 2):
        pond.complete(one)
    pond.take_plan()
    assert pond.source.wanted() is None
    pond.source.published(1, 0)  # pushed again, without the step
    assert pond.source.wanted() is None
    pond.source.published(2, 1)
    wanted = pond.source.wanted()
    assert wanted is not None
    assert (wanted.min_version, wanted.issue_step, wanted.prompt_epoch, wanted.offset) == (2, 1, 0, 2)


def test_versions_that_are_no_news_change_nothing() -> None:
    pond = Pond()
    pond.source.published(3, 0)
    pond.source.published(2, 0)
    assert pond.source.head == (3, 0)


def test_a_version_has_one_step() -> None:
    with refusal(ReplayMismatch, where="version 0", got="step 1"):
        Pond().source.version(0, 1)


# ---- take in


def test_first_valid_sample_wins_whatever_stands_before_it() -> None:
    pond = Pond()
    (one, _) = pond.issue(1, 2)
    for status in (Status.FAILED, Status.ABORTED):
        assert pond.add(sample(one, 0, status=status)) == Arrival(Disposition.DROPPED, status.value)
    assert pond.add(sample(one, 0, status=Status.PENDING)) == Arrival(Disposition.INVALID, "status")
    assert pond.add(WireError("tokens[3]", "0 <= id", -1)) == Arrival(Disposition.INVALID, "tokens")
    assert pond.add(sample(one, 0)).name is Disposition.BUFFERED
    assert pond.add(sample(one, 0, attempt="b")).name is Disposition.DUPLICATE
    books = pond.source.accounting()
    assert (books.dropped, books.invalid, books.duplicate) == (
        {"failed": 1, "aborted": 1},
        {"status": 1, "tokens": 1},
        1,
    )
    assert books.balanced


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"run": "other"}, "run"),
        ({"group_size": 3}, "group_size"),
        ({"index": 2}, "index"),
        ({"tokens": np.array([1, 2, 4, 5, 6, 7], np.int32)}, "prompt"),
        ({"tokens": np.array([1, 2, 5, 6, 7], np.int32)}, "prompt"),
        ({"task": 900}, "task"),
    ],
)
def test_samples_that_do_not_fit_their_task_are_invalid(changes: dict[str, Any], field: str) -> None:
    pond = Pond()
    (one,) = pond.issue(1)
    assert pond.add(replace(sample(one, 0), **changes)) == Arrival(Disposition.INVALID, field)


def test_samples_of_other_sampling_or_beyond_the_context_are_invalid() -> None:
    pond = Pond(max_context=6)
    (one,) = pond.issue(1)
    warm = replace(one.sampling, temperature=0.5)
    assert pond.add(sample(one, 0, sampling=warm)) == Arrival(Disposition.INVALID, "sampling")
    longest = replace(one.sampling, max_new_tokens=0)  # the loss may be divided by it
    assert pond.add(sample(one, 0, sampling=longest)) == Arrival(Disposition.INVALID, "sampling")
    assert pond.add(sample(one, 0, ((0, 4),))) == Arrival(Disposition.INVALID, "length")
    assert pond.add(sample(one, 0, ((0, 3),))).name is Disposition.BUFFERED


def test_a_sample_may_come_before_its_task_is_confirmed() -> None:
    pond = Pond(groups_per_step=1)
    early = task(1)
    assert pond.add(sample(early, 0)).name is Disposition.BUFFERED
    assert pond.add(sample(early, 1)).name is Disposition.BUFFERED
    assert pond.source.accounting().buffered == 2
    pond.issue(1)
    assert pond.take_plan().seqs.tolist() == [1, 2]


def test_early_samples_of_a_task_that_is_none_are_settled_by_the_next_one() -> None:
    """Invented ids that no task gets, or that an evaluation gets, keep neither memory nor the position in the
    stream.
    """
    pond = Pond(groups_per_step=1)
    for id in (1, 1, 2):
        assert pond.add(sample(task(id), 0)).name is Disposition.BUFFERED
    assert pond.add(sample(eval_task(1), 0)).name is Disposition.EVAL
    pond.source.issued(eval_task(2), 0.0)
    books = pond.source.accounting()
    assert (books.buffered, books.invalid["task"], pond.source.cursor().floor) == (0, 3, 4)
    assert pond.source.task_floor == 1, "the evaluation is open"
    for index in (0, 1):
        pond.add(sample(eval_task(2), index))
    assert pond.source.task_floor == 2


def test_a_task_may_die_before_its_issue_is_confirmed() -> None:
    pond = Pond()
    for id in (1, 2, 10**6):
        pond.source.dead(id)
    pond.issue(1)
    pond.source.issued(eval_task(2), 0.0)
    assert pond.take_settle().tasks.tolist() == [1]
    assert pond.source.task_floor == 2


def test_early_samples_take_bounded_room() -> None:
    pond = Pond()
    for number in range(EARLY_SAMPLES):
        one = replace(eval_task(5), group_size=2000) if number % 2 else task(1 + number % 40, group_size=2000)
        assert pond.add(sample(one, number)).name in (Disposition.BUFFERED, Disposition.EVAL)
    assert pond.add(sample(task(1), 0)) == Arrival(Disposition.INVALID, "task")
    assert pond.add(sample(eval_task(6), 0)).name is Disposition.EVAL
    pond.issue(50)
    assert pond.add(sample(task(51), 0)).name is Disposition.BUFFERED, "there is room again"


def test_an_evaluation_is_complete_with_its_own_samples_only() -> None:
    pond = Pond()
    asked = eval_task(1)
    pond.source.issued(asked, 0.0)
    for index in (0, 7, 8):
        pond.add(sample(replace(asked, group_size=9), index))
    assert pond.source.task_floor == 0
    pond.add(sample(asked, 1))
    assert pond.source.task_floor == 1


def test_samples_of_settled_tasks_are_duplicates() -> None:
    pond = Pond()
    (one,) = pond.issue(1)
    pond.source.dead(1)
    pond.take_settle()
    assert pond.add(sample(one, 0)).name is Disposition.DUPLICATE


def test_a_sequence_counts_once() -> None:
    pond = Pond()
    (one,) = pond.issue(1)
    pond.add(sample(one, 0))
    assert pond.source.add(index_of(1, sample(one, 0)), 0.0).name is Disposition.SEEN
    assert pond.source.accounting().published == 1


def test_a_sample_of_a_version_that_is_pushed_but_not_the_head_is_trained() -> None:
    pond = Pond(groups_per_step=1, max_lag=3)
    (one,) = pond.issue(1)
    assert pond.source.unread_versions(index_of(1, sample(one, 0, ((0, 1), (7, 2))))) == {0, 7}
    pond.source.version(7, 0)
    pond.complete(one, (0, 1), (7, 2))
    assert pond.take_plan().version_steps == {0: 0, 7: 0}


def test_a_sample_of_a_version_that_did_not_exist_when_it_was_stored_is_invalid_for_ever() -> None:
    pond = Pond(groups_per_step=1)
    (one,) = pond.issue(1)
    for index in (0, 1):
        assert pond.add(sample(one, index, ((0, 1), (7, 2)))) == Arrival(Disposition.INVALID, "version")
    restarted = Pond(groups_per_step=1)  # reads them again when the version exists
    restarted.issue(1)
    for each in (pond, restarted):
        each.seq = 2
        each.source.version(7, 0, after=(2,))
    for index in (0, 1):
        assert restarted.source.add(index_of(index + 1, sample(one, index, ((0, 1), (7, 2)))), 0.0) == Arrival(
            Disposition.INVALID, "version"
        )
    for each in (pond, restarted):
        each.complete(one, (0, 1), (7, 2))
        assert each.source.accounting().invalid == {"version": 2}
        assert each.take_plan().seqs.tolist() == [3, 4]
        assert each.source.accounting().balanced
    assert pond.source.snapshot() == restarted.source.snapshot()


def test_invalid_samples_are_counted_by_actor_and_a_flood_of_names_together() -> None:
    pond = Pond()
    (one,) = pond.issue(1)
    for number in range(200):
        pond.source.add(index_of(number + 1, replace(sample(one, 0), index=2), f"nobody-{number}"), 0.0)
    pond.source.refuse(201, WireError("tokens[3]", "0 <= id", -1), "nobody-0")
    books = pond.source.accounting()
    assert books.invalid == {"index": 200, "tokens": 1}
    assert (len(books.invalid_of), books.invalid_of["nobody-0"], books.invalid_of["(others)"]) == (65, 2, 136)


def test_failed_eval_samples_leave_their_task_open() -> None:
    """The actor of the task tries it again; a settled one would be acknowledged unworked."""
    pond = Pond()
    asked = eval_task(1)
    pond.source.issued(asked, 0.0)
    for status in (Status.FAILED, Status.ABORTED):
        for index in range(2):
            assert pond.add(sample(asked, index, status=status)).name is Disposition.EVAL
    assert pond.source.task_floor == 0
    for index in range(2):
        pond.add(sample(asked, index, status=Status.COMPLETED if index else Status.TRUNCATED))
    assert pond.source.task_floor == 1


def test_eval_samples_are_never_trained() -> None:
    pond = Pond(groups_per_step=1)
    asked = eval_task(1)
    pond.source.issued(asked, 0.0)
    assert pond.source.accounting().issued == 0
    for index in (0, 1):
        assert pond.add(sample(asked, index)).name is Disposition.EVAL
    assert (pond.source.accounting().eval, pond.source.accounting().published) == (2, 0)
    assert isinstance(pond.source.plan(0.0), Waits)
    assert pond.source.task_floor == 1
    assert pond.source.accounting().balanced


# ---- order


def test_oldest_complete_groups_first_ties_by_task_id() -> None:
    pond = Pond(max_lag=3, groups_per_step=2)
    pond.source.version(1, 0)
    one, two, three, four = pond.issue(1, 2, 3, 4)
    pond.source.step = 2  # versions of steps 1 and 2 exist
    pond.source.version(5, 1)
    pond.source.version(6, 2)
    pond.complete(four, (6, 2))
    pond.complete(three, (5, 1), (6, 2))
    pond.complete(two, (6, 3))
    pond.complete(one, (6, 3))
    assert pond.take_plan().tasks.tolist() == [3, 1]
    assert pond.take_plan().tasks.tolist() == [2, 4]


def test_a_step_waits_for_a_group_that_would_be_too_old_for_the_next() -> None:
    pond = Pond(max_lag=1, order_deadline_s=10.0)
    old = pond.issue(1, 2, 3, 4)
    for one in old[1:]:
        pond.complete(one)
    assert pond.take_plan().tasks.tolist() == [2, 3]  # task 1 may still come for step 2
    pond.source.published(1, 1)
    (young, _) = pond.issue(5, 6)
    pond.complete(young)
    waits = pond.waits()  # at step 2 task 1 has lag 1, at step 3 it would have 2
    assert (waits.missing, waits.wake_in_s) == (1, 10.0)
    assert "task 1" in waits.text
    pond.now = 9.9
    assert pond.waits().wake_in_s == pytest.approx(0.1)
    pond.complete(old[0])
    assert pond.take_plan().tasks.tolist() == [1, 4]


def test_a_step_goes_without_after_the_deadline() -> None:
    pond = Pond(max_lag=0, order_deadline_s=10.0, groups_per_step=1)
    (slow,) = pond.issue(1)
    (fast,) = pond.issue(2)
    pond.complete(fast)
    pond.waits()
    pond.now = 10.0
    assert pond.take_plan().tasks.tolist() == [2]
    assert pond.source.accounting().open == 1
    pond.source.published(1, 1)
    pond.complete(slow, (0, 3))
    assert pond.take_settle().reason == "stale"


def test_the_last_step_waits_for_no_group() -> None:
    pond = Pond(max_lag=0, steps=1, groups_per_step=1)
    _, fast = pond.issue(1, 2)
    pond.complete(fast)
    assert pond.take_plan().tasks.tolist() == [2]


def test_a_wait_has_its_reason_and_its_begin() -> None:
    pond = Pond()
    pond.waits()
    pond.issue(3, 4)
    pond.now = 42.4
    assert pond.waits().text == "2 more groups for step 1, for 42 s; 2 in flight, oldest task 3, silent for 42 s"


# ---- gate


def at_step_three(gate: str, **changes: Any) -> tuple[Pond, Task]:
    """Step 3 is next and max_lag is 1: tokens of version 0 are too old, those of version 1 are not."""
    pond = Pond(gate=gate, groups_per_step=1, max_lag=1, order_deadline_s=1e-9, **changes)
    (old,) = pond.issue(1)
    for step, id in ((1, 2), (2, 3)):
        (one,) = pond.issue(id)
        pond.complete(one)
        pond.now += 1
        pond.waits() if step == 2 else None
        pond.now += 1
        pond.take_plan()
        pond.source.published(step, step)
    return pond, old


def test_mask_records_the_oldest_step() -> None:
    pond, old = at_step_three("mask")
    pond.complete(old, (0, 2), (1, 3))
    plan = pond.take_plan()
    assert (plan.oldest_step, plan.version_steps) == (1, {0: 0, 1: 1})
    assert pond.source.accounting().tokens["masked"] == 4
    assert pond.source.accounting().tokens["too_old"] == 0


def test_a_group_of_masked_tokens_only_is_stale_and_issued_again() -> None:
    pond, old = at_step_three("mask")
    pond.complete(old, (0, 5))
    settle = pond.take_settle()
    assert (settle.reason, settle.tasks.tolist(), len(settle.seqs)) == ("stale", [1], 2)
    wanted = pond.source.wanted()
    assert wanted is not None
    assert (wanted.reissue_of, wanted.reissues, wanted.offset, wanted.min_version) == (1, 1, 0, 2)


def test_drop_gives_up_a_group_with_any_token_too_old() -> None:
    pond, old = at_step_three("drop")
    pond.complete(old, (0, 1), (1, 3))
    assert pond.take_settle().reason == "stale"


def test_train_takes_it_and_counts() -> None:
    pond, old = at_step_three("train")
    pond.complete(old, (0, 2), (1, 3))
    assert pond.take_plan().oldest_step is None
    assert pond.source.accounting().tokens["too_old"] == 4


def test_environment_tokens_have_no_age() -> None:
    pond, old = at_step_three("drop")
    for index in (0, 1):
        pond.add(sample(old, index, ((0, 1), (1, 2)), loss_mask=np.array([0, 1, 1], np.uint8)))
    assert pond.take_plan().tasks.tolist() == [1]


def test_a_prompt_is_issued_again_so_often_and_no_more() -> None:
    pond, old = at_step_three("mask", max_reissues=1)
    pond.complete(old, (0, 5))
    pond.take_settle()
    (again,) = pond.issue(9, reissue_of=1, reissues=1, offset=0)
    pond.complete(again, (0, 5))
    pond.take_settle()
    wanted = pond.source.wanted()
    assert wanted is not None
    assert (wanted.reissues, wanted.offset) == (0, 3)  # the next new prompt
    assert pond.source.accounting().given_up == 1


def test_lost_tasks_are_issued_again_and_dead_ones_are_not() -> None:
    pond = Pond()
    pond.issue(1, 2)
    pond.source.dead(1)
    pond.source.lost(2)
    assert {pond.take_settle().reason, pond.take_settle().reason} == {"dead", "lost"}
    wanted = pond.source.wanted()
    assert wanted is not None
    assert (wanted.reissue_of, wanted.reissues) == (2, 1)


def test_a_task_may_be_lost_until_its_group_is_full() -> None:
    pond = Pond()
    one, two = pond.issue(1, 2)
    pond.add(sample(one, 0))
    pond.complete(two)
    assert pond.source.incomplete() == [1]
    assert len(pond.source.group(1).samples) == 1
    assert [id for id in (1, 2, 3) if pond.source.lacks_samples(id)] == [1]
    pond.source.lost(1)
    assert not pond.source.incomplete()


def test_a_group_without_a_trainable_token_is_empty() -> None:
    pond = Pond(groups_per_step=1)
    (one,) = pond.issue(1)
    for index in (0, 1):
        pond.add(sample(one, index, loss_mask=np.zeros(3, np.uint8)))
    assert pond.take_settle().reason == "empty"


# ---- filter


def test_equal_rewards_are_filtered_and_others_drawn() -> None:
    pond = Pond(filter_zero_variance=True)
    for one in pond.issue(1, 2):
        pond.complete(one, rewards=(1.0, 1.0))
    assert pond.take_settle().reason == "filtered"
    wanted = pond.source.wanted()
    assert wanted is not None
    assert (wanted.reissues, wanted.offset) == (0, 2)


def test_filtering_ends_in_a_short_step() -> None:
    pond = Pond(filter_zero_variance=True, max_refill=1.0, max_lag=0)
    for one in pond.issue(1, 2):
        pond.complete(one, rewards=(1.0, 1.0))
    pond.take_settle()
    (good, _) = pond.issue(3, 4)
    pond.complete(good)
    pond.now = 1e9
    assert isinstance(pond.source.plan(0.0), Waits)  # for task 4, which would be too old
    assert pond.take_plan().tasks.tolist() == [3]
    assert pond.source.filtered == 0


# ---- replay


def test_a_plan_must_continue_the_chain() -> None:
    pond = Pond(groups_per_step=1)
    (one, two) = pond.issue(1, 2)
    pond.complete(one)
    plan = pond.source.plan(0.0)
    assert isinstance(plan, Plan)
    with refusal(ReplayMismatch, where="recorded plan 1"):
        pond.source.apply(replace(plan, oldest_step=-5), 1)
    with refusal(ReplayMismatch, got="one of step 2"):
        pond.source.apply(replace(plan, step=2), 1)
    pond.source.apply(plan, 1)
    with refusal(ReplayMismatch, where="recorded settlement (dead) before step 2", got="tasks [1] settled or unknown"):
        pond.source.apply(Settle(epoch=1, reason="dead", tasks=np.array([1]), seqs=np.array([], np.int64), step=2), 2)
    assert two.id == 2


def test_samples_that_come_after_their_settlement_are_duplicates_at_a_replay_too() -> None:
    """Live: task 1 is settled, then its sample comes. Replay: the sample is read first."""
    live, replayed = Pond(), Pond()
    (one,) = live.issue(1)
    live.source.dead(1)
    settle = live.take_settle()
    live.add(sample(one, 0))
    replayed.issue(1)
    replayed.add(sample(one, 0))
    replayed.source.apply(settle, 1)
    assert live.source.snapshot() == replayed.source.snapshot()


def test_a_recorded_plan_waits_for_its_samples_and_refuses_others() -> None:
    live, replayed = Pond(groups_per_step=1), Pond(groups_per_step=1)
    (one,) = live.issue(1)
    live.complete(one)
    plan = live.take_plan()
    replayed.issue(1)
    assert replayed.source.lacks(plan) == [1, 2]
    replayed.add(sample(one, 0))
    assert replayed.source.lacks(plan) == [2]
    replayed.add(WireError("tokens", "bytes", None))
    with refusal(ReplayMismatch, where="recorded plan 1"):
        replayed.source.lacks(plan)


def test_restore_refuses_another_run() -> None:
    state = Pond().source.snapshot()
    for changes in ({"temperature": 0.7}, {"run": "other"}, {"seed": 1}, {"prompts_digest": "x"}):
        with pytest.raises(ConfigRefused, match=next(iter(changes))):
            DataSource.restore(rules(**changes), state)
    assert DataSource.restore(rules(max_lag=3, steps=20, data_parallel=2), state).step == 0
    with refusal(ReplayMismatch, where="state of the data"):
        DataSource.restore(rules(), b"\x80")


def test_tasks_of_another_distribution_are_refused_and_a_row_may_have_its_temperature() -> None:
    (issued,) = Pond(temperature=0.7).issue(1)
    with refusal(ConfigRefused, field="sampling"):
        Pond().source.issued(replace(issued, sampling=replace(issued.sampling, top_p=0.9)), 0.0)


# ---- rules


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"push_every": 3, "max_lag": 1}, {"field": "weights.push_every", "got": 3}),
        ({"temperature": 0.0}, {"field": "sampling.temperature"}),
        ({"top_p": 0.9}, {"field": "sampling"}),
        ({"top_k": 50}, {"field": "sampling"}),
    ],
)
def test_rules_that_cannot_work_are_refused(changes: dict[str, Any], message: dict[str, Any]) -> None:
    with refusal(ConfigRefused, **message):
        rules(**changes)


def test_digest_changes_with_any_rule() -> None:
    of_staleness = ({"max_lag": 2}, {"gate": "drop"}, {"max_reissues": 1}, {"over_sampling": 0.5}, {"max_refill": 1.0})
    changes = ({}, {"seed": 1}, {"data_parallel": 2}, *of_staleness)
    assert len({rules(**change).digest for change in changes}) == len(changes)
    assert rules().run == RUN


def test_cursor_lists_what_is_settled_above_the_floor() -> None:
    pond = Pond(groups_per_step=1)
    one, two = pond.issue(1, 2)
    pond.add(sample(one, 0))
    pond.complete(two)
    pond.add(sample(one, 0, attempt="b"))
    pond.now = math.inf
    pond.take_plan()
    assert (pond.source.cursor().floor, pond.source.cursor().settled) == (0, (2, 3, 4))
    again = DataSource.restore(rules(groups_per_step=1), pond.source.snapshot())
    assert again.cursor() == pond.source.cursor()


def letter(of: Task, **changes: Any) -> Dead:
    return Dead(
        task=of.id, reason="", attempts=3, actor="a", prompt="", **({"root": of.id, "offset": of.offset} | changes)
    )


def test_a_requeued_dead_task_is_issued_once_more() -> None:
    pond = Pond()
    (first, *_) = pond.issue(*range(1, 5))
    pond.source.requeue(letter(first))
    assert isinstance(pond.source.plan(pond.now), Waits), "not dead: nothing to ask for"
    pond.source.dead(1)
    assert pond.take_settle().reason == "dead"
    again = pond.take()
    assert isinstance(again, Requeue)
    wanted = pond.source.wanted()
    assert wanted is not None
    assert (wanted.reissue_of, wanted.reissues, wanted.offset) == (1, 1, first.offset)
    pond.source.requeue(letter(first))
    assert isinstance(pond.source.plan(pond.now), Waits), "once, however often it is said"
    pond.issue(5, reissue_of=1, reissues=1, offset=first.offset)
    assert pond.source.wanted() is None or pond.source.wanted().reissue_of is None  # type: ignore[union-attr]


def test_a_dead_task_without_a_prompt_position_cannot_be_requeued() -> None:
    pond = Pond()
    (first, *_) = pond.issue(*range(1, 5))
    pond.source.dead(1)
    pond.take_settle()
    pond.source.requeue(letter(first, root=-1))
    assert isinstance(pond.source.plan(pond.now), Waits)


def test_the_last_step_of_the_passes_takes_the_prompts_that_are_left() -> None:
    pond = Pond(num_epochs=1, groups_per_step=2)
    tasks = pond.issue(1, 2, 3)
    assert not pond.source.exhausted
    pond.source.passed(1)
    assert pond.source.wanted() is None
    pond.complete(tasks[0])
    assert pond.waits().missing == 1, "one more of three is needed for a full step"
    pond.complete(tasks[1])
    assert len(pond.take_plan().tasks) == 2
    assert pond.waits().missing == 1
    assert not pond.source.exhausted, "a task is open"
    pond.complete(tasks[2])
    assert len(pond.take_plan().tasks) == 1
    assert pond.source.exhausted


def test_prompts_that_are_issued_again_are_part_of_the_passes() -> None:
    pond = Pond(num_epochs=1, groups_per_step=1)
    one, two = pond.issue(1, 2)
    pond.source.passed(1)
    pond.source.dead(two.id)
    pond.source.lost(one.id)
    reasons = [pond.take_settle().reason, pond.take_settle().reason]
    assert sorted(reasons) == ["dead", "lost"]
    wanted = pond.source.wanted()
    assert wanted is not None
    assert wanted.reissue_of == one.id
    assert not pond.source.exhausted
    (again,) = pond.issue(3, reissue_of=one.id, reissues=1, offset=0)
    pond.complete(again)
    pond.take_plan()
    assert pond.source.exhausted
    pond.source.requeue(
        Dead(task=two.id, reason="", attempts=1, actor="", prompt="", root=two.id, prompt_epoch=0, offset=1)
    )
    assert not pond.source.exhausted, "an operator wants the dead one after all"


def test_more_passes_continue_a_run_that_was_exhausted() -> None:
    pond = Pond(num_epochs=1, groups_per_step=1)
    (one,) = pond.issue(1)
    pond.complete(one)
    pond.source.passed(1)
    pond.take_plan()
    assert pond.source.exhausted
    more = DataSource.restore(rules(num_epochs=2, groups_per_step=1), pond.source.snapshot())
    more.published(1, 1)
    wanted = more.wanted()
    assert wanted is not None
    assert (wanted.prompt_epoch, wanted.offset) == (1, 0)


def test_plans_without_a_number_of_passes_have_the_digest_of_earlier_releases() -> None:
    assert rules().digest == "cc63f384be29a23e"
    sizes = {
        "steps": 8,
        "groups_per_step": 2,
        "min_group_size": 1,
        "num_epochs": 2,
        "data_parallel": 2,
        "minibatches": 2,
    }
    ages = {
        "max_lag": 1,
        "gate": "drop",
        "max_reissues": 2,
        "order_deadline_s": 5.0,
        "over_sampling": 0.5,
        "max_refill": 3.0,
    }
    data = {
        "filters": "[]",
        "buffer_filters": True,
        "filter_zero_variance": True,
        "seed": 5,
        "prompts_digest": "abc",
        "model": "m",
    }
    losses = {
        "demonstrations": True,
        "teacher": True,
        "teacher_top_k": 4,
        "temperature": 0.7,
        "push_every": 2,
        "max_context": 64,
    }
    every = rules(**sizes, **ages, **data, **losses, run="r", max_tokens_per_micro_batch=32, top_p=1.0, top_k=-1)
    assert every.digest == "b56452e9f40f54c9"
    assert rules(num_epochs=1).digest != rules().digest


def test_trained_and_filtered_groups_have_their_scores_and_others_have_none() -> None:
    pond = Pond(groups_per_step=1, filter_zero_variance=True)
    lost, equal, mixed = pond.issue(1, 2, 3)
    pond.complete(equal, rewards=(1.0, 1.0))
    pond.complete(mixed)
    pond.source.lost(lost.id)
    found = {}
    while not isinstance(record := pond.source.plan(0.0), Waits):
        found[record.reason if isinstance(record, Settle) else "trained"] = [
            (one.id, scores) for one, scores in pond.source.scored(record)
        ]
        pond.take()
    assert found == {"lost": [], "filtered": [(2, [1.0, 1.0])], "trained": [(3, [0.0, 1.0])]}


# ---- groups of dead tasks


def short(pond: Pond, *indexes: int) -> Task:
    """Issue a task of four samples, of which these are stored before it is dead."""
    (of,) = pond.issue(1, group_size=4)
    for index in indexes:
        pond.add(sample(of, index, reward=float(index)))
    pond.source.dead(of.id)
    return of


def test_the_group_of_a_dead_task_is_trained_with_the_samples_it_has() -> None:
    pond = Pond(groups_per_step=1, min_group_size=2)
    of = short(pond, 0, 2, 3)
    plan = pond.source.plan(pond.now)
    assert isinstance(plan, Plan)
    assert plan.seqs.tolist() == [1, 2, 3] and plan.group_sizes.tolist() == [3]
    assert pond.add(sample(of, 1)).name is Disposition.BUFFERED  # read after the plan was made
    assert pond.source.scored(plan) == [(of, [0.0, 2.0, 3.0])]
    pond.source.apply(plan, 1)
    books = pond.source.accounting()
    assert (books.trained, books.duplicate, books.buffered, books.open) == (3, 1, 0, 0) and books.balanced
    assert pond.source.task_floor == of.id and books.tokens["trained"] == 9
    assert pond.add(sample(of, 1)).name is Disposition.DUPLICATE


@pytest.mark.parametrize(("least", "indexes"), [(3, (0, 1)), (0, (0, 1, 2)), (0, (0, 1, 2, 3))])
def test_with_fewer_samples_or_no_such_rule_the_group_of_a_dead_task_is_dropped(
    least: int, indexes: tuple[int, ...]
) -> None:
    pond = Pond(groups_per_step=1, min_group_size=least)
    short(pond, *indexes)
    assert pond.take_settle().reason == "dead"
    books = pond.source.accounting()
    assert books.dropped["dead"] == len(indexes) and books.balanced


def test_a_sample_that_comes_after_the_verdict_is_judged_with_the_others() -> None:
    pond = Pond(groups_per_step=1, min_group_size=2, filters="f")
    of = short(pond, 0, 1)
    ((_, seqs),) = pond.source.unjudged()
    pond.add(sample(of, 3))
    pond.source.judged(of.id, Verdict(reason="filtered:f"), seqs)  # of the two
    ((_, seqs),) = pond.source.unjudged()
    assert seqs == [1, 2, 3]
    pond.source.judged(of.id, Verdict(masked=frozenset({3})), seqs)
    pond.add(sample(of, 2))
    assert [seqs for _, seqs in pond.source.unjudged()] == [[1, 2, 4, 3]]
    pond.source.judged(of.id, Verdict(), [1, 2, 4, 3])
    plan = pond.take_plan()
    assert plan.group_sizes.tolist() == [4] and plan.masked is None


# ---- records that fit in a message


@given(
    sizes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=12),
    versions=st.integers(1, 40),
    masks=st.booleans(),
    big=st.booleans(),
)
def test_a_plan_has_at_most_the_bytes_that_are_expected_of_it(
    sizes: list[list[int]], versions: int, masks: bool, big: bool
) -> None:
    """``sizes``: sequences of each sample of each group."""
    samples, sequences = sum(map(len, sizes)), sum(map(sum, sizes))
    first = 2**40 if big else 0
    plan = Plan(
        epoch=first,
        step=first + 1,
        tasks=np.arange(len(sizes)),
        seqs=np.arange(samples),
        group_sizes=np.array([len(group) for group in sizes], np.int32),
        ranks=np.zeros(sequences, np.int32),
        micro_batches=np.zeros(sequences, np.int32),
        version_steps={first + version: first + version for version in range(versions)},
        oldest_step=first,
        data_parallel=first,
        num_micro_batches=first,
        config_digest="d" * 64,
        chain="c" * 64,
        rows=np.ones(samples, np.int32) if sequences > samples else None,
        masked=np.arange(samples) if masks else None,
    )
    bound = plan_bytes(
        groups=len(sizes), samples=samples, sequences=sequences, versions=versions, masked=samples * masks
    )
    assert bound - 1024 - 17 * versions < len(encode_record(plan)) <= bound
    settle = Settle(epoch=first, reason="filtered:" + "r" * 200, tasks=plan.tasks, seqs=plan.seqs, step=first)
    assert len(encode_record(settle)) <= settle_bytes(groups=len(sizes), samples=samples)


def test_a_step_is_planned_with_as_many_groups_as_fit_in_a_message() -> None:
    pond = Pond(groups_per_step=8, max_lag=4)
    for one in pond.issue(*range(1, 17)):
        pond.complete(one)
    room = plan_bytes(groups=3, samples=6, sequences=6)
    pond.source.max_record_bytes = room
    plan = pond.take_plan()
    assert plan.tasks.tolist() == [1, 2, 3] and len(encode_record(plan)) <= room
    assert pond.source.left_out == 5, "which stay for the next step"
    pond.source.max_record_bytes = 1
    assert pond.take_plan().tasks.tolist() == [4], (
        "one group at least: the log refuses a record that is larger than a message"
    )
    pond.source.max_record_bytes = 0
    assert pond.take_plan().tasks.tolist() == [*range(5, 13)] and pond.source.left_out == 0


def test_sequences_and_masked_samples_count_for_the_room() -> None:
    def chosen(lengths: tuple[int, ...], masked: bool = False) -> int:
        """Return the number of groups of two samples that fit where three of a sequence each do."""
        groups = [SampleGroup(task=task(id), touched_s=0.0) for id in range(1, 9)]
        for group in groups:
            for index in range(2):
                one = index_of(2 * group.task.id + index, sample(group.task, index))
                one.sizes = tuple(SequenceSize(length, 1) for length in lengths)
                group.add(one)
            group.mask(frozenset(group.seqs) if masked else frozenset())
        return len(fit_groups(groups, plan_bytes(groups=3, samples=6, sequences=6)))

    assert [chosen((6,)), chosen((6,), masked=True), chosen((6, 6)), chosen((6, 6, 6, 6))] == [3, 2, 1, 1]


def test_many_tasks_are_given_up_in_records_that_fit_in_a_message() -> None:
    pond = Pond(groups_per_step=4, max_lag=1)
    for one in pond.issue(*range(1, 9)):
        pond.complete(one)
        pond.source.lost(one.id)
    pond.source.max_record_bytes = settle_bytes(groups=3, samples=6)
    settled = [pond.take_settle() for _ in range(3)]
    assert [len(one.tasks) for one in settled] == [3, 3, 2]
    assert sorted(id for one in settled for id in one.tasks.tolist()) == [*range(1, 9)]
    assert all(len(encode_record(one)) <= pond.source.max_record_bytes for one in settled)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_a_cursor_of_shards_has_the_settled_messages_and_no_others(
    count: int, messages: list[tuple[int, bool]]
) -> None:
    """A restart sees each message that was not settled, in the order of its shard, and no other."""
    shards = Shards(count)
    ids, next_local = SettledSamples(tuple(range(count))), [1] * count
    open_seqs: list[int] = []
    for number, is_settled in messages:
        shard = number % count
        seq = shards.seq(shard, next_local[shard])
        next_local[shard] += 1
        assert ids.see(seq) and not ids.see(seq)
        if is_settled:
            ids.settle(seq)
        else:
            open_seqs.append(seq)
    cursor = ids.cursor("now")
    again = SettledSamples(cursor.position, cursor.settled)
    read = [shards.seq(shard, local) for shard in range(count) for local in range(1, next_local[shard])]
    assert sorted(seq for seq in read if again.see(seq)) == sorted(open_seqs)
    assert cursor_of({"samples": dump_cursor(cursor)}) == cursor
    assert (count == 1) == (not cursor.floors)


def test_a_plan_has_the_samples_of_a_group_on_one_rank_where_prompts_are_shared() -> None:
    """Two prompts of 20 tokens with two responses each: whole sequences are spread by their lengths."""
    prompt = np.arange(20, dtype=np.int32)
    plans = []
    for shares in (False, True):
        pond = Pond(data_parallel=2, max_tokens_per_micro_batch=64, pair_tokens=8, shares_prompts=shares)
        for of in pond.issue(1, 2, prompt_tokens=prompt):
            for index, length in enumerate((of.id + 2, of.id + 4)):
                pond.add(sample(of, index, ((of.min_version, length),)))
        plans.append(pond.take_plan().ranks.tolist())
    (first, second, *_), together = plans
    assert first != second
    assert together in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_a_plan_counts_no_work_of_samples_that_ranks_leave_out() -> None:
    """The groups of equal rewards and the masked sample: the two samples with a gradient have a rank each."""
    plans = []
    for start in (0, 1, 2):
        pond = Pond(data_parallel=2, groups_per_step=3, filters="f", pair_tokens=8, leaves_out_from=start)
        for of, rewards in zip(pond.issue(1, 2, 3), ((1.0, 1.0), (0.0, 1.0), (0.0, 1.0)), strict=True):
            pond.complete(of, rewards=rewards)
            pond.source.judged(of.id, Verdict(masked=frozenset({0} if of.id > 1 else ())))
        plan = pond.take_plan()
        assert plan.masked is not None and plan.masked.tolist() == [3, 5]
        plans.append(dict(zip(plan.seqs.tolist(), plan.ranks.tolist(), strict=True)))
    never, at_once, later = plans
    assert never == later  # step 1 is complete
    assert at_once[4] != at_once[6] and never[4] == never[6]
    assert list(at_once.values()).count(0) == 3
