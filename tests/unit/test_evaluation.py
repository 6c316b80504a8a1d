"""Evaluation beside training: its settings, its rounds, its scores. No bus, no model."""

import itertools
import math
import typing
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import data_kit
from tests.metric_names import undocumented
from tidemill.bus.section import ShortNamed
from tidemill.bus.wire.messages import Kind, Sample, Status, Task
from tidemill.learner.data import DataConfig
from tidemill.learner.evaluation.config import EvalConfig, EvalSet
from tidemill.learner.evaluation.evaluations import versions_of
from tidemill.learner.evaluation.rounds import MARK, Result, Rounds, SetSize
from tidemill.learner.evaluation.scores import BestScore, ScoredResponse, bootstrap, pass_at, powers, scores


def size(name: str, rows: int, samples: int) -> SetSize:
    return SetSize(name=name, rows=tuple(range(rows)), samples=samples, passes_at=1.0, identity=f"file of {name}")


def made(*sets: SetSize, every: int = 10, **changes: Any) -> Rounds:
    values: dict[str, Any] = {"last_step": 35, "max_open_tasks": 3} | changes
    last_step = values.pop("last_step")
    config = EvalConfig(every=every, sets=ShortNamed({"a": EvalSet(path="a.jsonl")}), **values)
    return Rounds(sets or (size("a", 4, 2), size("b", 1, 1)), config, last_step=last_step)


class Run:
    """A feeder without a bus: it issues the wanted tasks and makes responses to all open ones."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds, self.tasks, self.ids = rounds, dict[int, Task](), itertools.count(1)
        self.results: list[Result] = []

    def issue(self) -> Task | None:
        place = self.rounds.wanted()
        if place is None:
            return None
        samples = {"a": 2, "b": 1}[place.set]
        metadata = {MARK: self.rounds.mark(place)}
        task = data_kit.task(
            next(self.ids),
            kind=Kind.EVAL,
            group_size=samples,
            offset=place.row,
            min_version=place.version,
            metadata=metadata,
        )
        assert self.rounds.issued(task)
        self.tasks[task.id] = task
        return task

    def sample(self, task: Task, index: int, **changes: Any) -> Sample:
        reward = float((task.offset + index) % 2)
        return data_kit.sample(task, index, ((task.min_version, 2 + index),), **({"reward": reward} | changes))

    def answer(self, id: int) -> None:
        task = self.tasks.pop(id)
        for index in range(task.group_size):
            self.rounds.arrived(self.sample(task, index))

    def finish(self) -> list[Result]:
        """Answer everything until the open round is over; return its results."""
        while not (results := self.rounds.results()):
            while self.issue():
                pass
            for id in list(self.tasks):
                self.answer(id)
        self.rounds.close()
        return results


def test_a_round_asks_every_prompt_of_every_set_once_and_at_most_three_at_a_time() -> None:
    run = Run(made())
    run.rounds.published(0, 0)
    issued = [run.issue(), run.issue(), run.issue()]
    assert run.issue() is None and run.rounds.results() == []
    assert run.rounds.open == "evaluation of version 0: 0 of 5 prompts"
    run.answer(issued[0].id)  # type: ignore[union-attr]
    assert run.issue() is not None and run.rounds.results() == []
    a, b = run.finish()
    assert (a.set, a.version, a.metrics["samples"], a.metrics["missing"]) == ("a", 0, 8.0, 0.0)
    assert (b.set, b.metrics["samples"], b.metrics["mean"]) == ("b", 1.0, 0.0)
    assert a.metrics["mean"] == 0.5 and a.metrics["pass_at_1"] == 0.5 and a.metrics["pass_at_2"] == 1.0
    assert run.rounds.idle and run.rounds.wanted() is None


def test_versions_that_are_due() -> None:
    rounds = made()
    due = [version for version in range(40) if rounds.due(version, version)]
    assert due == [0, 10, 20, 30, 35], "0 at the start, the multiples, the last step"
    assert [version for version in range(40) if made(at_start=False, at_end=False).due(version, version)] == [
        10,
        20,
        30,
    ]
    assert not any(made(every=0).due(version, version) for version in range(40))
    assert made().due(1, 0) and not made(every=1, at_start=False).due(1, 0), (
        "the first version of a run with other initial weights"
    )


def test_weights_that_are_published_again_are_evaluated_once_and_are_not_later_ones() -> None:
    """A start publishes the weights that it begins with under another version; tokens of a third version are later
    ones.
    """
    for later, expected in ((1, (0.0, 0.0)), (2, (2.0, 0.0)), (3, (3.0, 0.0))):
        run = Run(made(size("a", 2, 2), every=1))
        run.rounds.published(0, 0)
        task, other = run.issue(), run.issue()
        assert task is not None and other is not None
        run.rounds.arrived(run.sample(task, 0))
        again = made(size("a", 2, 2), every=1)
        again.load(run.rounds.dump())
        again.published(1, 0)
        assert again.pending_steps == {0}
        for one, index in ((task, 1), (other, 0), (other, 1)):
            spans = replace(data_kit.sample(one, index, ((later, 2),)), metadata={})
            assert again.arrived(spans)
        (result,) = again.results()
        assert (result.version, result.metrics["versions_later"], result.metrics["versions_later_min"]) == (
            0,
            *expected,
        )
        again.close()
        assert again.idle


def test_responses_without_a_token_of_the_version_say_so() -> None:
    run = Run(made(size("a", 1, 2)))
    run.rounds.published(10, 10)
    task = run.issue()
    assert task is not None
    for index, spans in enumerate((((11, 2), (12, 3)), ((13, 3),))):
        assert run.rounds.arrived(data_kit.sample(task, index, spans))
    (result,) = run.rounds.results()
    assert (result.metrics["versions_later"], result.metrics["versions_later_min"]) == (3.0, 1.0)


def test_a_version_that_is_due_while_a_round_is_open_waits_and_only_the_newest_does() -> None:
    run = Run(made(last_step=100))
    run.rounds.published(0, 0)
    for version in (10, 20, 20, 30):
        run.rounds.published(version, version)
    assert run.rounds.skipped == 2
    assert [result.version for result in run.finish()] == [0, 0]
    assert [result.version for result in run.finish()] == [30, 30]
    run.rounds.published(20, 20)
    assert run.rounds.idle, "an older version is not evaluated again"


def test_only_finished_responses_of_the_open_round_count_and_each_index_once() -> None:
    run = Run(made(size("a", 1, 2)))
    run.rounds.published(0, 0)
    task = run.issue()
    assert task is not None
    for status in (Status.FAILED, Status.ABORTED, Status.PENDING):
        assert not run.rounds.arrived(run.sample(task, 0, status=status))
    assert run.rounds.arrived(run.sample(task, 0, status=Status.TRUNCATED, reward=1.0))
    assert not run.rounds.arrived(run.sample(task, 0, reward=0.0)), "the first one counts"
    assert not run.rounds.arrived(replace(run.sample(task, 1), index=2, group_size=3))
    assert not run.rounds.arrived(run.sample(data_kit.task(99, kind=Kind.EVAL), 0))
    assert run.rounds.arrived(run.sample(task, 1, reward=0.0))
    (result,) = run.rounds.results()
    assert (result.metrics["mean"], result.metrics["truncated_share"], result.metrics["samples"]) == (0.5, 0.5, 2.0)


def test_tasks_of_a_round_that_is_over_are_passed_over() -> None:
    """A restart reads them again when an older task is not settled."""
    run = Run(made(size("a", 1, 2)))
    run.rounds.published(0, 0)
    task = run.issue()
    assert task is not None
    run.answer(task.id)
    run.finish()
    again = made(size("a", 1, 2))
    again.load(run.rounds.dump())
    assert not again.issued(task) and again.idle


def test_what_is_given_up_is_missing_and_in_no_mean() -> None:
    run = Run(made(size("a", 3, 2)))
    run.rounds.published(0, 0)
    dead, half, whole = run.issue(), run.issue(), run.issue()
    assert dead is not None and half is not None and whole is not None
    assert run.rounds.gone(dead.id) and not run.rounds.gone(dead.id) and not run.rounds.gone(77)
    run.rounds.arrived(run.sample(half, 0, reward=1.0))
    run.rounds.gone(half.id)
    run.answer(whole.id)
    (result,) = run.rounds.results()
    assert (result.metrics["prompts"], result.metrics["samples"], result.metrics["missing"]) == (2.0, 3.0, 3.0)
    assert result.metrics["mean"] == 0.75


def test_a_round_that_is_ended_has_the_scores_so_far() -> None:
    run = Run(made(size("a", 50, 2)))
    run.rounds.published(0, 0)
    first = run.issue()
    assert first is not None
    run.answer(first.id)
    run.issue()
    run.rounds.end()
    (result,) = run.rounds.results()
    assert (result.metrics["samples"], result.metrics["missing"]) == (2.0, 98.0)
    assert run.rounds.wanted() is None


@given(st.lists(st.sampled_from(["issue", "answer", "half", "restart", "publish"]), max_size=60), st.integers(1, 4))
def test_restarts_change_no_result(does: list[str], every: int) -> None:
    """A restart has the state of a checkpoint, reads the tasks again that were issued after it, and the samples after
    it.
    """
    run, whole = Run(made(every=every, last_step=1000)), Run(made(every=every, last_step=1000))
    for one in (run, whole):
        one.rounds.published(0, 0)
    version = 0
    kept, issued, arrived = run.rounds.dump(), list[Task](), list[Sample]()
    results: dict[int, list[Result]] = {}

    def collect() -> None:
        while found := run.rounds.results():
            results[found[0].version] = found
            run.rounds.close()

    def answer(count: int) -> None:
        if run.tasks:
            id = min(run.tasks)
            for index in range(min(count, run.tasks[id].group_size)):
                sample = run.sample(run.tasks[id], index)
                arrived.append(sample)
                run.rounds.arrived(sample)
            if count == 2:
                del run.tasks[id]
            collect()

    for what in does:
        if what == "issue" and (task := run.issue()) is not None:
            issued.append(task)
        elif what in ("answer", "half"):
            answer(2 if what == "answer" else 1)
        elif what == "publish":
            version += every
            run.rounds.published(version, version)
        elif what == "restart":
            run.rounds = made(every=every, last_step=1000)
            run.rounds.load(kept)
            for task in issued:
                run.rounds.issued(task)
            for sample in arrived:
                run.rounds.arrived(sample)
            run.rounds.published(version, version)
            collect()
            kept, issued, arrived = run.rounds.dump(), [], []
    while not run.rounds.idle:
        if run.issue() is None:
            answer(2)
    (expected,) = [whole.finish()]
    for found in results.values():
        assert [replace(one, version=0, step=0) for one in found] == expected
    assert results.keys() >= {0}
    ids = [task.id for task in issued]
    assert len(ids) == len(set(ids))


def test_the_state_of_other_sets_is_passed_over() -> None:
    run = Run(made())
    run.rounds.published(10, 10)
    task = run.issue()
    assert task is not None
    other = made(size("a", 4, 3))
    other.load(run.rounds.dump())
    assert other.idle and not other.issued(task)
    other.published(10, 10)
    assert other.idle, "version 10 has had its round, of the former sets"
    other.published(20, 20)
    assert not other.idle
    for mark in (
        None,
        3,
        {"digest": other.digest},
        {"digest": other.digest, "set": ["a"], "row": 0},
        {"digest": other.digest, "set": "a", "row": "0"},
    ):
        assert not other.issued(replace(task, metadata={MARK: mark}, min_version=20))


# ---- scores


def response(score: float, **changes: Any) -> ScoredResponse:
    return ScoredResponse(
        **({"score": score, "num_tokens": 3, "truncated": False, "oldest_version": 6, "newest_version": 7} | changes)
    )


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(total: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, total))
    k = data.draw(st.integers(1, total))
    draws = list(itertools.combinations(range(total), k))
    share = sum(any(one < passed for one in draw) for draw in draws) / len(draws)
    assert math.isclose(pass_at(k, total, passed), share, abs_tol=1e-12)


def test_powers() -> None:
    assert [powers(samples) for samples in (1, 2, 3, 4, 6, 64)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16, 32, 64],
    ]


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    """About 95 % of the intervals of 400 sets, of 60 prompts with a chance of 0.3, hold 0.3."""
    random = np.random.default_rng(3)
    intervals = [bootstrap((random.random(60) < 0.3).astype(np.float64)) for _ in range(400)]
    covered = np.mean([low <= 0.3 <= high for low, high in intervals])
    assert 0.90 <= covered <= 0.98
    same = np.full(5, 0.25)
    assert bootstrap(same) == (0.25, 0.25)


def test_the_scores_of_a_set() -> None:
    prompts = {
        0: [response(1.0), response(0.0, truncated=True)],
        1: [response(0.5), response(0.5, num_tokens=9)],
        2: [],
        3: [response(2.0)],
    }
    found = scores(prompts, num_prompts=4, samples=2, passes_at=0.5, versions=(5, 5))
    assert found["mean"] == pytest.approx((0.5 + 0.5 + 2.0) / 3)
    assert found["mean_low"] <= found["mean"] <= found["mean_high"]
    assert found["pass_at_1"] == pytest.approx((0.5 + 1.0 + 1.0) / 3) and found["pass_at_2"] == 1.0
    assert (found["prompts"], found["samples"], found["missing"]) == (3.0, 5.0, 3.0)
    assert (found["tokens_mean"], found["tokens_max"], found["truncated_share"]) == (4.2, 9.0, 0.2)
    assert (found["versions_later"], found["versions_later_min"]) == (2.0, 1.0)
    assert not undocumented(f"eval/{name}" for name in found)
    assert scores({}, num_prompts=4, samples=2, passes_at=1.0, versions=(5, 5)) == {
        "prompts": 0.0,
        "samples": 0.0,
        "missing": 8.0,
    }


# ---- settings


def test_sets_have_defaults() -> None:
    config = EvalConfig(every=5, sets={"gsm8k": {"path": "x.jsonl", "temperature": 0}})
    assert config.sets == {"gsm8k": EvalSet(path="x.jsonl", temperature=0)}
    assert EvalConfig().sets == {}


def test_a_set_has_its_own_prompts_or_those_settings_of_training() -> None:
    training = DataConfig(
        path="t.jsonl", system_prompt="Think.", template="Q: {prompt}", chat_template_args={"thinking": True}
    )
    assert EvalSet(path="x.jsonl").data(training) == replace(training, path="x.jsonl", shuffle=False)
    own = {"system_prompt": "", "template": "{prompt}", "chat_template_args": {"thinking": False}}
    assert EvalSet(path="x.jsonl", **own).data(training) == replace(training, path="x.jsonl", shuffle=False, **own)


def test_a_set_may_have_each_of_its_settings() -> None:
    """Read from a map, as from a file."""
    examples: dict[str, Any] = {
        "dict": {"thinking": False},
        "tuple[str": ["Q:", "A:"],
        "tuple[int": [7, 8],
        "int": 2,
        "float": 0.5,
        "str": "x",
    }
    kinds = typing.get_type_hints(EvalSet)
    values = {
        one.name: next(value for kind, value in examples.items() if kind in str(kinds[one.name]))
        for one in fields(EvalSet)
    }
    own = {**values, "stop": ("Q:", "A:"), "stop_token_ids": (7, 8)}
    assert EvalConfig(sets={"held": values}).sets == {"held": EvalSet(**own)}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"every": -1}, "every: want >= 0, got -1"),
        ({"every": 1}, "sets: want at least one held-out set with every > 0, got none"),
        (
            {"sets": {"a": {"path": "x", "chat_template_args": 3}}},
            "sets.a.chat_template_args: want a map, such as {name: value}, got 3",
        ),
        ({"sets": {"a": {"path": "x", "stop": "word"}}}, "sets.a.stop: want a list, such as [a, b], got 'word'"),
        (
            {"sets": {"a": {"path": "x", "stop": [""]}}},
            'sets.a.stop: want at most 16 strings of 1 to 200 letters, got [""]',
        ),
        ({"sets": {"a": {"path": "x", "stop_token_ids": [-1]}}}, "sets.a.stop_token_ids[0]: want >= 0, got -1"),
        (
            {"sets": {"a": {"path": "x", "stop_token_ids": [True]}}},
            "sets.a.stop_token_ids[0]: want a whole number, such as 3, got true",
        ),
        ({"max_open_tasks": 0}, "max_open_tasks: want > 0, got 0"),
        ({"stall_s": 0}, "stall_s: want > 0, got 0"),
        ({"stop_after": -1}, "stop_after: want >= 0, got -1"),
        ({"stop_after": 2}, "stop_after: want best: SET/METRIC with it, the score that is to rise, got 2 alone"),
        ({"best": "a/mean"}, "best: want every > 0 with it, got 'a/mean' and no evaluation"),
        (
            {"every": 1, "sets": {"a": {"path": "x"}}, "best": "b/mean"},
            "best: want SET/METRIC with a set of a, got 'b/mean'",
        ),
        (
            {"every": 1, "sets": {"a": {"path": "x"}}, "best": "a"},
            "best: want SET/METRIC with a metric of mean, pass_at_1, got 'a'",
        ),
        (
            {"every": 1, "sets": {"a": {"path": "x", "samples": 6}}, "best": "a/pass_at_3"},
            (
                "best: want SET/METRIC with a metric of mean, pass_at_1, pass_at_2, pass_at_4, pass_at_6, got "
                "'a/pass_at_3'"
            ),
        ),
        ({"sets": {"a b": {"path": "x"}}}, "sets.a b: want a name like"),
        ({"sets": {"a": "x.jsonl"}}, "sets.a: want a map of settings, such as {path: ...}, got 'x.jsonl'"),
        ({"sets": {"a": {}}}, "sets.a.path: want a value, got nothing"),
        ({"sets": {"a": {"path": ""}}}, "sets.a.path: want text of >= 1 characters, got ''"),
        ({"sets": {"a": {"path": "x", "smaples": 4}}}, "sets.a.smaples: no such setting; did you mean samples?"),
        ({"sets": {"a": {"path": "x", "zzz": 4}}}, "sets.a.zzz: no such setting; there are path, samples"),
        ({"sets": {"a": {"path": "x", "samples": 2.5}}}, "sets.a.samples: want a whole number, such as 3, got 2.5"),
        ({"sets": {"a": {"path": "x", "samples": True}}}, "sets.a.samples: want a whole number, such as 3, got true"),
        ({"sets": {"a": {"path": "x", "samples": 0}}}, "sets.a.samples: want >= 1, got 0"),
        (
            {"sets": {"a": {"path": "x", "temperature": "warm"}}},
            "sets.a.temperature: want a number, such as 0.5, got 'warm'",
        ),
        ({"sets": {"a": {"path": "x", "temperature": -1}}}, "sets.a.temperature: want 0, or 0.01 to 100, got -1"),
        (
            {"sets": {"a": {"path": "x", "temperature": 1e-300}}},
            "sets.a.temperature: want 0, or 0.01 to 100, got 1e-300",
        ),
        ({"sets": {"a": {"path": "x", "temperature": 0, "samples": 4}}}, "sets.a.samples: want 1 with temperature: 0"),
        ({"sets": {"a": {"path": "x", "top_p": 0}}}, "sets.a.top_p: want > 0, got 0"),
        ({"sets": {"a": {"path": "x", "top_k": 0}}}, "sets.a.top_k: want -1 or >= 1, got 0"),
        ({"sets": {"a": {"path": "x", "limit": -1}}}, "sets.a.limit: want >= 0, got -1"),
        ({"sets": {"a": {"path": "x", "max_new_tokens": 0}}}, "sets.a.max_new_tokens: want > 0, got 0"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        EvalConfig(**settings)
    assert str(refused.value).startswith(complaint)


# ---- the best version


def noted(best: BestScore, *values: float, first: int = 0) -> BestScore:
    for number, value in enumerate(values, first):
        best.note("a", 10 * number, 20 * number, {"mean": value})
    return best


def test_the_best_version_is_the_earliest_with_the_highest_score() -> None:
    best = noted(BestScore("a/mean"), 0.2, 0.5, 0.5, 0.1)
    assert [(one.version, one.step, one.value) for one in best.ranked][:2] == [(10, 20, 0.5), (20, 40, 0.5)]
    for name, metrics in (("b", {"mean": 1.0}), ("a", {"pass_at_1": 1.0}), ("a", {"mean": math.nan})):
        assert not best.note(name, 90, 90, metrics)
    assert best.ranked[0].version == 10


def test_the_run_is_stopped_after_evaluations_that_are_no_better() -> None:
    best = noted(BestScore("a/mean", stop_after=2), 0.2, 0.5, 0.5)
    assert not best.stopped
    best.note("a", 20, 40, {"mean": 0.5})
    assert not best.stopped, "a record that is repeated counts once"
    noted(best, 0.4, first=3)
    assert best.stopped == "no a/mean above 0.5 (version 10, step 20) in the 2 evaluations after it (eval.stop_after)"
    noted(best, 0.9, first=4)
    assert best.stopped, "a restart reads the score of the last version, too, and ends at the same step"
    assert best.ranked[0].version == 40
    assert not noted(BestScore("a/mean"), *[0.5] * 99).stopped


@pytest.mark.parametrize(
    ("step", "head", "push_every", "republished", "versions"),
    [
        (5, (4, 4), 1, False, (5,)),
        (6, (4, 4), 1, False, (6,)),
        (6, (5, 4), 1, True, (7, 8)),
        (8, (2, 4), 2, False, (4,)),
        (8, (3, 5), 2, False, (5,)),
        (7, (2, 4), 2, False, ()),
        (5, None, 1, True, ()),
        (3, (4, 4), 1, False, (3,)),
    ],
)
def test_the_version_of_a_step_is_known_before_it_is_published(
    step: int, head: tuple[int, int] | None, push_every: int, republished: bool, versions: tuple[int, ...]
) -> None:
    """Version 5 of the second example was published twice; step 5 of the fifth was the last that a start repeated."""
    known = {0: 0, 3: 3, 4: 4}
    assert (
        tuple(versions_of(step, versions=known, head=head, push_every=push_every, republished=republished)) == versions
    )
