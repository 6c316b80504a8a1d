"""Buffer filters: results that a user's function may have, the groups they are called with, and how long a decision
holds.
"""

import json
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data_kit import sample, task
from tests.refusals import refusal
from tests.unit.test_datasource import Pond
from tidemill.bus.section import read
from tidemill.bus.wire.messages import Plan, Settle, Status
from tidemill.learner.buffer.groups import Verdict
from tidemill.learner.buffer.step_plan import Waits
from tidemill.learner.data import Filters
from tidemill.learner.feed.filtering import Filtering, OpenFilter
from tidemill.learner.filters import (
    BUFFER_FILTER,
    BufferGroup,
    BufferSample,
    Decision,
    FilterBuffer,
    buffer_group,
    decisions_in,
    decisions_of,
)
from tidemill.rewards.errors import RewardFailed

CHOOSING: dict[str, Any] = {"filters": "f", "buffer_filters": True}


def buffer(*tasks: int) -> FilterBuffer:
    return FilterBuffer(step=1, num_wanted=2, groups=tuple(BufferGroup(task=id, prompt="p") for id in tasks))


def choose(pond: Pond, **verdicts: Verdict) -> list[int]:
    """Decide on the groups that wait for the buffer filters, and return their tasks. ``t3``: of task 3; others are
    kept.
    """
    found = pond.source.unchosen()
    pond.source.chosen(
        pond.source.step + 1, [(of.id, seqs, verdicts.get(f"t{of.id}", Verdict())) for of, seqs, _ in found]
    )
    return [of.id for of, _, _ in found]


def complete(pond: Pond, *ids: int, priority: float = 0.0, **changes: Any) -> None:
    """Issue tasks with all their samples, which the filters of single groups keep."""
    for of in pond.issue(*ids, **changes):
        pond.complete(of)
        pond.source.judged(of.id, Verdict(priority=priority))


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (None, [Decision(), Decision()]),
        ([True, "too easy"], [Decision(), Decision(keep=False, reason="too_easy")]),
        (({"priority": 2}, None), [Decision(priority=2.0), Decision()]),
        ([Decision(priority=1.0), SimpleNamespace(keep=False)], [Decision(priority=1.0), Decision(keep=False)]),
    ],
)
def test_results_that_are_taken(result: object, found: list[Decision]) -> None:
    assert decisions_in("f", decisions_of("f", result), buffer(4, 7)) == found


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (True, r"buffer filter 'f': want a list with a result for each group, or None, got True"),
        ({4: True}, r"want a list with a result"),
        ([True], r"want a result for each of the 2 groups, got 1"),
        ([True] * 3, r"want a result for each of the 2 groups, got 3"),
        ([True, {"masked": [0]}], r"result 1: want no 'masked' from a buffer filter, which sees no tokens"),
        ([True, 3.5], r"want true, false, a reason or a map"),
        ([True, {"priority": float("nan")}], r"priority: want a number"),
    ],
)
def test_other_results_are_refused(result: object, words: str) -> None:
    with pytest.raises(RewardFailed, match=words):
        decisions_in("f", decisions_of("f", result), buffer(4, 7))


def test_an_empty_list_for_an_empty_buffer() -> None:
    assert decisions_in("f", decisions_of("f", []), buffer()) == []
    with refusal(RewardFailed, got="0"):
        decisions_in("f", decisions_of("f", []), buffer(1))


def test_a_group_tells_its_samples_without_tokens() -> None:
    of = task(3, metadata={"level": 2})
    samples = [
        sample(of, 0, ((0, 2), (2, 1)), reward={"score": 1.0, "form": 0.5}, metadata={"calls": 1}),
        sample(of, 1, ((1, 4),), reward=0.25, status=Status.TRUNCATED),
    ]
    group = buffer_group(of, samples, {0: 0, 1: 3, 2: 4}, 6, 1.5)
    assert (group.task, group.prompt, group.metadata, group.priority) == (3, of.prompt, {"level": 2}, 1.5)
    first, second = group.samples
    assert first == BufferSample(
        index=0,
        reward=1.0,
        parts={"score": 1.0, "form": 0.5},
        num_tokens=3,
        status=Status.COMPLETED,
        lag=5,
        metadata={"calls": 1},
    )
    assert (second.reward, second.parts, second.num_tokens, second.status, second.lag) == (
        0.25,
        {},
        4,
        Status.TRUNCATED,
        2,
    )
    whole = FilterBuffer(step=6, num_wanted=4, groups=(group,))
    assert BUFFER_FILTER.decode(json.loads(BUFFER_FILTER.encode(whole))) == whole


# ---- the DataSource


def test_kept_groups_wait_for_the_buffer_filters_once_they_are_enough_for_a_step() -> None:
    pond = Pond(**CHOOSING, groups_per_step=2)
    complete(pond, 1)
    assert choose(pond) == [], "one group is not enough"
    assert pond.waits().text.startswith("1 more group for step 1")
    complete(pond, 2)
    waits = pond.waits()
    assert (waits.missing, waits.text) == (
        0,
        "the buffer filters for step 1, for 0 s; none in flight; 2 wait for the filters",
    )
    assert choose(pond) == [1, 2]
    assert choose(pond) == [], "all have a decision"
    assert pond.take_plan().tasks.tolist() == [1, 2]


def test_dropped_ones_are_settled_and_the_others_are_asked_about_again_when_more_have_come() -> None:
    pond = Pond(**CHOOSING, groups_per_step=2, max_lag=1)
    complete(pond, 1, 2)
    assert choose(pond, t1=Verdict(reason="filtered:all:easy")) == [1, 2]
    assert pond.take_settle().reason == "filtered:all:easy"
    assert pond.source.filtered == 1
    assert choose(pond) == [], "one is left, and it has a decision"
    complete(pond, 3)
    assert choose(pond, t2=Verdict(priority=-1.0)) == [2, 3], "the function sees the whole buffer again"
    assert pond.take_plan().tasks.tolist() == [3, 2]
    assert pond.source.accounting().dropped == {"filtered:all:easy": 2}


def test_a_group_that_would_be_too_old_is_waited_for_and_decided_on() -> None:
    pond = Pond(**CHOOSING, groups_per_step=1, max_lag=0, order_deadline_s=10.0)
    (first,) = pond.issue(1)
    complete(pond, 2)
    assert choose(pond) == [2]
    assert "would be too old for step 2" in pond.waits().text
    assert choose(pond) == [], "all that are there have a decision"
    pond.complete(first)
    pond.source.judged(1, Verdict())
    assert choose(pond) == [1, 2], (
        "the step waits for it, so it is decided on although there is one that could be taken"
    )
    assert pond.take_plan().tasks.tolist() == [1]


def test_groups_that_come_once_there_are_enough_do_not_delay_the_step() -> None:
    pond = Pond(**CHOOSING, groups_per_step=1, max_lag=2)
    complete(pond, 1)
    assert choose(pond) == [1]
    complete(pond, 2)
    assert choose(pond) == []
    assert pond.take_plan().tasks.tolist() == [1]


def test_a_decision_holds_for_one_step() -> None:
    pond = Pond(**CHOOSING, groups_per_step=1, max_lag=2)
    complete(pond, 1, 2)
    assert choose(pond, t2=Verdict(priority=1.0)) == [1, 2]
    assert pond.take_plan().tasks.tolist() == [2]
    assert pond.waits().missing == 0
    found = pond.source.unchosen()
    pond.source.chosen(1, [(of.id, seqs, Verdict(reason="filtered:late")) for of, seqs, _ in found])  # the step before
    assert choose(pond) == [1]
    assert pond.take_plan().tasks.tolist() == [1]


def test_priorities_of_groups_and_buffer_are_added_and_old_groups_come_first() -> None:
    pond = Pond(**CHOOSING, groups_per_step=1, max_lag=1)
    complete(pond, 1, priority=1.0)
    complete(pond, 2)
    assert [priority for _, _, priority in pond.source.unchosen()] == [1.0, 0.0]
    choose(pond, t2=Verdict(priority=0.5))
    assert pond.take_plan().tasks.tolist() == [1]
    pond.source.published(1, 1)
    for of in pond.issue(3):
        pond.complete(of, (1, 3))
        pond.source.judged(3, Verdict())
    choose(pond, t3=Verdict(priority=9.0))
    # Task 2 is of step 0: at step 2 it has lag 1, and at step 3 it would be too old, so no priority comes before it.
    assert pond.take_plan().tasks.tolist() == [2]


def test_a_group_with_another_sample_meanwhile_keeps_no_decision() -> None:
    """Of a dead task one sample is enough here, and the other one comes while the filter runs."""
    pond = Pond(**CHOOSING, groups_per_step=1, min_group_size=1)
    (of,) = pond.issue(1)
    pond.add(sample(of, 0, ((0, 3),)))
    pond.source.dead(1)
    pond.source.judged(1, Verdict())
    found = pond.source.unchosen()
    pond.add(sample(of, 1, ((0, 3),)))
    pond.source.judged(1, Verdict())
    pond.source.chosen(1, [(one.id, seqs, Verdict(reason="filtered:late")) for one, seqs, _ in found])
    assert isinstance(pond.source.plan(0.0), Waits)
    assert choose(pond) == [1]
    assert len(pond.take_plan().seqs) == 2


def test_a_sample_that_comes_after_the_decision_takes_it_back() -> None:
    pond = Pond(**CHOOSING, groups_per_step=1, min_group_size=1)
    (of,) = pond.issue(1)
    pond.add(sample(of, 0, ((0, 3),)))
    pond.source.dead(1)
    pond.source.judged(1, Verdict())
    assert choose(pond) == [1]
    pond.add(sample(of, 1, ((0, 3),)))
    pond.source.judged(1, Verdict())
    assert isinstance(pond.source.plan(0.0), Waits)
    assert choose(pond) == [1]


def test_a_short_last_step_is_chosen_from() -> None:
    pond = Pond(**CHOOSING, groups_per_step=4, num_epochs=1)
    complete(pond, 1, 2)
    pond.source.passed(1)
    assert choose(pond) == [1, 2]
    assert len(pond.take_plan().tasks) == 2


@pytest.mark.parametrize("rejected", [0.5, 0.99])
def test_no_share_of_rejected_groups_stops_a_run(rejected: float) -> None:
    chance = random.Random(round(1000 * rejected))
    pond = Pond(**CHOOSING, steps=8, groups_per_step=4, max_lag=1, over_sampling=1.0, max_refill=4.0, gate="drop")
    issued = dropped = trained = 0
    for _ in range(20_000):
        if pond.source.step == 8:
            break
        while (wanted := pond.source.wanted()) is not None:
            issued += 1
            changes = (
                {"reissue_of": wanted.reissue_of, "reissues": wanted.reissues} if wanted.reissue_of is not None else {}
            )
            complete(pond, issued, prompt_epoch=wanted.prompt_epoch, offset=wanted.offset, **changes)
        found = pond.source.unchosen()
        verdicts = [
            Verdict(reason="filtered:all") if chance.random() < rejected else Verdict(priority=chance.random())
            for _ in found
        ]
        choices = [(of.id, seqs, verdict) for (of, seqs, _), verdict in zip(found, verdicts, strict=True)]
        pond.source.chosen(pond.source.step + 1, choices)
        pond.now += 100
        record = pond.source.plan(pond.now)
        if not isinstance(record, Waits):
            pond.records += 1
            pond.source.apply(record, pond.records)
            if isinstance(record, Plan):
                trained += len(record.tasks)
                pond.source.published(record.step, record.step)
            elif isinstance(record, Settle):
                dropped += len(record.tasks)
        books = pond.source.accounting()
        assert books.balanced
        assert books.issued == trained + dropped + books.open
    assert pond.source.step == 8, pond.source.plan(pond.now)


# ---- several filters


async def verdicts(
    functions: Sequence[tuple[dict[str, Any], Callable[[FilterBuffer], object]]],
) -> tuple[Filtering, dict[int, Verdict]]:
    """Call filters with these settings on the groups 1 to 4."""
    opened = []
    for number, (changes, function) in enumerate(functions):
        (config,) = tuple(
            read(Filters, {f"f{number}": {"use": "m:f", "scope": "buffer"} | changes}, "filters").values()
        )

        async def judge(
            of: FilterBuffer, name: str = config.name, function: Callable[[FilterBuffer], object] = function
        ) -> Any:
            return decisions_of(name, function(of))

        opened.append(OpenFilter(config, judge))
    pond = Pond(**CHOOSING)
    filtering = Filtering(opened, pond.source, may_plan=lambda: True, decide=lambda: None)
    return filtering, await filtering.choices(buffer(1, 2, 3, 4))


async def test_each_filter_sees_what_the_ones_before_have_kept_and_given() -> None:
    seen: list[list[tuple[int, float]]] = []

    def first(of: FilterBuffer) -> object:
        return [group.task != 2 and {"priority": group.task} for group in of.groups]

    def second(of: FilterBuffer) -> object:
        seen.append([(group.task, group.priority) for group in of.groups])
        return ["enough" if place else {"priority": 0.5} for place in range(len(of.groups))]

    filtering, found = await verdicts(
        [({}, first), ({"count_only": True}, lambda of: [False] * len(of.groups)), ({}, second)]
    )
    assert seen == [[(1, 1.0), (3, 3.0), (4, 4.0)]]
    assert {id: (verdict.reason, verdict.priority) for id, verdict in found.items()} == {
        1: ("", 1.5),
        2: ("filtered:f0", 0.0),
        3: ("filtered:f2:enough", 3.0),
        4: ("filtered:f2:enough", 4.0),
    }
    assert filtering.load() == {"filter.f0": 1.0, "filter.f1": 3.0, "filter.f2": 2.0}


async def test_one_that_fails_drops_all_and_the_next_is_not_called() -> None:
    def fails(of: FilterBuffer) -> object:
        raise RewardFailed("m:f", "KeyError: 'x'", "buffer filter")

    def never(of: FilterBuffer) -> object:
        raise AssertionError("called with nothing")

    filtering, found = await verdicts([({}, fails), ({}, never)])
    assert {verdict.reason for verdict in found.values()} == {"filtered:f0:failed"}
    assert filtering.trouble == "filter f0: KeyError: 'x'"
