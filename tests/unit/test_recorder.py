"""The recorder: every row of its table, and random conversations in which each delivered token is trained once behind
its own ids.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bus_kit import make_sample
from tests.examples import examples
from tests.refusals import refusal
from tidemill.actors.episodes.recorder import Sequences, TurnOutput, TurnRecorder
from tidemill.bus.wire.invariants import check_sample
from tidemill.bus.wire.messages import Sample, Span

UNKNOWN = int(np.iinfo(np.uint16).max)
"""Id of unknown experts."""


def output(ids: Sequence[int], *, version: int = 1, first: float = -0.5, **changes: Any) -> TurnOutput:
    """Return an output with log-probs that name the token's place in it."""
    values: dict[str, Any] = {
        "tokens": np.array(ids, np.int32),
        "log_probs": np.array([first - place / 64 for place in range(len(ids))], np.float32),
        "spans": (Span(version=version, num_tokens=len(ids)),) if ids else (),
    }
    return TurnOutput(**{**values, **changes})


def prompt(*ids: int) -> Any:
    return np.array(ids, np.int32)


def sample_of(found: Sequences) -> Sample:
    """Return the sample that the export makes, checked against every invariant of the wire."""
    sample = make_sample(
        rollout="r",
        tokens=found.tokens,
        response_length=found.response_length,
        sequences=found.sequences,
        rollout_log_probs=found.rollout_log_probs,
        loss_mask=found.loss_mask,
        spans=found.spans,
        turns=found.turns,
    )
    check_sample(sample)
    return sample


def rows(found: Sequences) -> list[tuple[list[int], list[int]]]:
    """Return (ids, mask of the response region) of every sequence."""
    sample_of(found)
    result, left, right = [], 0, 0
    for size in found.sequences:
        result.append((found.tokens[left : left + size[0]].tolist(), found.loss_mask[right : right + size[1]].tolist()))
        left, right = left + size[0], right + size[1]
    return result


def test_a_prompt_that_extends_the_last_end_stays_in_the_sequence() -> None:
    """Ids between are environment, of the version that read them."""
    recorder = TurnRecorder()
    recorder.record(prompt(1, 2, 3, 4), output([50, 51], version=5))
    recorder.record(prompt(1, 2, 3, 4, 50, 51, 90, 91), output([52, 53], version=6))
    found = recorder.export()
    assert rows(found) == [([1, 2, 3, 4, 50, 51, 90, 91, 52, 53], [1, 1, 0, 0, 1, 1])]
    assert [(span.version, span.num_tokens) for span in found.spans] == [(5, 2), (6, 2), (6, 2)]
    assert (found.turns.at.tolist(), found.turns.tokens.tolist(), found.numbers) == ([0, 4], [2, 2], (0, 1))
    assert recorder.branched == {"begins": 0, "forks": 0}


def test_parallel_answers_are_siblings_and_all_are_trained() -> None:
    """n > 1, best-of-n, also with equal outputs: selection belongs to the environment."""
    recorder = TurnRecorder()
    for ids in ([5, 6], [7], [5, 6]):
        recorder.record(prompt(1, 2), output(ids))
    recorder.record(prompt(1, 2, 7, 9), output([8]))
    assert rows(recorder.export()) == [([1, 2, 5, 6], [1, 1]), ([1, 2, 7, 9, 8], [1, 0, 1]), ([1, 2, 5, 6], [1, 1])]


def test_a_shared_turn_is_trained_by_the_first_path_that_has_it() -> None:
    recorder = TurnRecorder()
    recorder.record(prompt(1), output([2, 3]))
    recorder.record(prompt(1, 2, 3, 4), output([5]))
    recorder.record(prompt(1, 2, 3, 6), output([7, 8]))
    assert rows(recorder.export()) == [([1, 2, 3, 4, 5], [1, 1, 0, 1]), ([1, 2, 3, 6, 7, 8], [1, 1])]
    assert recorder.branched == {"begins": 0, "forks": 1}


def test_the_parent_is_the_deepest_and_of_equals_the_newest() -> None:
    recorder = TurnRecorder()
    for ids in ([2, 3], [2], [2, 3], [2]):
        recorder.record(prompt(1), output(ids))
    recorder.record(prompt(1, 2, 3, 9), output([4]))
    recorder.record(prompt(1, 2, 9), output([5]))
    ends = [row[0] for row in rows(recorder.export())]
    assert ends == [[1, 2, 3], [1, 2], [1, 2, 3, 9, 4], [1, 2, 9, 5]]
    assert recorder.export().turns.at.tolist() == [0, 2, 3, 7, 6, 9], (
        "turn 4 stands behind turn 2, turn 5 behind turn 3"
    )


@pytest.mark.parametrize(
    "history", [(1, 9), (2,), (1, 2, 3, 4, 60, 7), (1, 2, 3, 4)], ids=["compaction", "other", "drift", "dropped"]
)
def test_a_history_that_differs_begins_a_new_sequence(history: tuple[int, ...]) -> None:
    """Nothing is realigned and nothing masked: the first answer is trained as it was sampled."""
    recorder = TurnRecorder()
    recorder.record(prompt(1, 2, 3, 4), output([50, 51]))
    recorder.record(prompt(*history), output([52]))
    assert rows(recorder.export()) == [([1, 2, 3, 4, 50, 51], [1, 1]), ([*history, 52], [1])]


def test_a_cut_stream_is_a_turn_up_to_its_last_token() -> None:
    recorder = TurnRecorder()
    recorder.record(prompt(1), output([2, 3], finish="cut", id="t-0", agent="a", begin_s=1.5, seconds=0.25))
    turns = recorder.export().turns
    assert (turns.finish, turns.id, turns.agent) == (("cut",), ("t-0",), ("a",))
    assert (turns.begin_s.tolist(), turns.seconds.tolist()) == ([1.5], [0.25])


def test_trained_turns_that_do_not_go_on_from_the_last_one_are_counted() -> None:
    recorder = TurnRecorder()
    assert recorder.last_trained == -1
    recorder.record(prompt(8), output([9], trained=False))
    recorder.record(prompt(1), output([2]))
    recorder.record(prompt(7), output([9], trained=False))
    recorder.record(prompt(1, 2, 3), output([4]))
    assert recorder.branched == {"begins": 0, "forks": 0}
    recorder.record(prompt(1, 2, 5), output([6]))
    recorder.record(prompt(5), output([6]))
    assert (recorder.branched, recorder.last_trained) == ({"begins": 1, "forks": 1}, 5)
    recorder.record(prompt(7), output([]))
    assert recorder.last_trained == 5


def test_time_without_a_model_call_is_that_of_the_call_that_ended_last() -> None:
    """Two calls at once share no time of tools; an untrained call is one, too."""
    calls = ((0.0, 1.0, True), (3.0, 4.0, True), (3.5, 1.0, True), (9.0, 1.0, False), (10.5, 0.5, True))
    recorder = TurnRecorder()
    for number, (begin_s, seconds, trained) in enumerate(calls):
        recorder.record(prompt(1), output([number], begin_s=begin_s, seconds=seconds, trained=trained))
    assert recorder.export(ended_s=13.0).turns.tools_s.tolist() == [2.0, 2.0, 0.0, 2.0]
    assert recorder.export().turns.tools_s.tolist() == [2.0, 2.0, 0.0, 0.0]
    assert recorder.tools_s(13.0) == (0.0, [2.0, 2.0, 0.0, 0.5, 2.0])
    assert TurnRecorder().tools_s(3.0) == (3.0, [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trained": False}, "asked"),
        ({"log_probs": None}, "log_probs"),
        ({"log_probs": np.array([-1.0], np.float32)}, "log_probs"),
        ({"log_probs": np.array([-1.0, math.nan], np.float32)}, "log_probs"),
        ({"log_probs": np.array([-1.0, -math.inf], np.float32)}, "log_probs"),
        ({"log_probs": np.array([-1.0, 0.5], np.float32)}, "log_probs"),
    ],
)
def test_an_untrained_call_is_context(changes: dict[str, Any], reason: str) -> None:
    recorder = TurnRecorder()
    recorder.record(prompt(1), output([2]))
    recorder.record(prompt(1, 2, 3), output([4, 5], version=7, **changes))
    assert rows(recorder.export()) == [([1, 2], [1])], "nothing stands behind it, so no sequence needs it"
    recorder.record(prompt(1, 2, 3, 4, 5, 6), output([8], version=8))
    found = recorder.export()
    assert rows(found) == [([1, 2, 3, 4, 5, 6, 8], [1, 0, 0, 0, 0, 1])]
    assert found.numbers == (0, 2)
    assert {name: count for name, count in recorder.untrained.items() if count} == {reason: 1}


def test_an_empty_output_is_context_and_adds_nothing() -> None:
    recorder = TurnRecorder()
    recorder.record(prompt(1), output([2]))
    recorder.record(prompt(1, 2, 3), output([]))
    recorder.record(prompt(1, 2, 3, 4), output([5], version=9))
    found = recorder.export()
    assert rows(found) == [([1, 2, 3, 4, 5], [1, 0, 0, 1])]
    assert [span.version for span in found.spans] == [1, 9, 9, 9], (
        "what the empty turn has read was read by the next one, too"
    )
    assert recorder.untrained["empty"] == 1


def test_an_episode_without_a_sampled_token_is_none() -> None:
    recorder = TurnRecorder()
    recorder.record(prompt(1), output([]))
    with refusal(ValueError, place="episode", got="none"):
        recorder.export()


@pytest.mark.parametrize(
    ("ids", "changes", "said"),
    [
        ((), {}, {"place": "prompt", "got": "none"}),
        ((1,), {"spans": (Span(version=1, num_tokens=1),)}, {"place": "spans", "got": "1"}),
    ],
)
def test_a_turn_that_cannot_be_is_refused_and_leaves_no_trace(
    ids: tuple[int, ...], changes: dict[str, Any], said: dict[str, Any]
) -> None:
    recorder = TurnRecorder()
    with refusal(ValueError, **said):
        recorder.record(prompt(*ids), output([2, 3], **changes))
    assert len(recorder) == 0


# ---- random conversations


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[int], list[int], int, bool]]:
    """Draw turns (prompt, output, version, trained): they extend, fork from, cut short or alter earlier turns, with a
    vocabulary of 2.
    """
    ids = st.lists(st.integers(0, 1), max_size=3)
    turns: list[tuple[list[int], list[int], int, bool]] = []
    for _ in range(draw(st.integers(1, 9))):
        history = draw(st.sampled_from([[], *(before + after for before, after, _, _ in turns)]))
        kind = draw(st.sampled_from(["extend", "extend", "extend", "again", "shorter", "altered"]))
        if kind == "again" and turns:
            history = draw(st.sampled_from(turns))[0]
        elif kind == "shorter":
            history = history[: draw(st.integers(0, len(history)))]
        elif kind == "altered" and history:
            place = draw(st.integers(0, len(history) - 1))
            history = [*history[:place], 1 - history[place], *history[place + 1 :]]
        asked = history + draw(ids) or [draw(st.integers(0, 1))]
        turns.append((asked, draw(ids), draw(st.integers(0, 3)), draw(st.sampled_from([True, True, True, False]))))
    return turns


def recorded(turns: Sequence[tuple[list[int], list[int], int, bool]]) -> TurnRecorder:
    recorder = TurnRecorder()
    for number, (asked, answered, version, trained) in enumerate(turns):
        recorder.record(prompt(*asked), output(answered, version=version, first=-1.0 - number, trained=trained))
    return recorder


def trained_tokens(found: Sequences) -> list[tuple[tuple[int, ...], float, int]]:
    """Return (ids up to and with the token, its log-prob, its version) of every trained token."""
    versions = [span.version for span in found.spans for _ in range(span.num_tokens)]
    result, left, right = [], 0, 0
    for length, response in found.sequences:
        for place in range(response):
            if found.loss_mask[right + place]:
                ids = found.tokens[left : left + length - response + place + 1]
                result.append(
                    (tuple(ids.tolist()), float(found.rollout_log_probs[right + place]), versions[right + place])
                )
        left, right = left + length, right + response
    return sorted(result)


@settings(max_examples=examples(400))
@given(conversations())
def test_every_token_is_trained_once_behind_the_ids_it_was_sampled_behind(
    turns: list[tuple[list[int], list[int], int, bool]],
) -> None:
    wanted = sorted(
        (tuple(asked + answered[: place + 1]), -1.0 - number - place / 64, version)
        for number, (asked, answered, version, trained) in enumerate(turns)
        if trained
        for place in range(len(answered))
    )
    recorder = recorded(turns)
    if not wanted:
        with refusal(ValueError, place="episode", got="none"):
            recorder.export()
        return
    found = recorder.export()
    sample_of(found)
    assert trained_tokens(found) == wanted
    for _, mask in rows(found):
        assert mask[0] == mask[-1] == 1, "a region begins and ends with a trained token"
    assert found.numbers == tuple(
        number for number, (_, answered, _, trained) in enumerate(turns) if trained and answered
    )


@settings(max_examples=examples(400))
@given(conversations(), st.sets(st.integers(0, 8), max_size=3))
def test_a_trained_token_has_the_experts_of_the_pass_that_sampled_it(turns: list[Any], lacking: set[int]) -> None:
    """Every row names its turn and place; ``lacking``: turns without experts, such as those of a log."""
    recorder = TurnRecorder()
    for number, (asked, answered, version, trained) in enumerate(turns):
        length = len(asked) + len(answered)
        experts = np.array([[[1000 * number + place]] for place in range(length - 1)] + [[[UNKNOWN]]], np.uint16)
        more = {"trained": trained, "routed_experts": None if number in lacking else experts}
        recorder.record(prompt(*asked), output(answered, version=version, first=-1.0 - number, **more))
    if not any(trained and answered for _, answered, _, trained in turns):
        return
    found = recorder.export()
    if lacking >= {*range(len(turns))}:
        assert found.routed_experts is None
        return
    given = (
        np.full(len(found.tokens), UNKNOWN)
        if found.routed_experts is None
        else found.routed_experts[:, 0, 0].astype(int)
    )
    assert len(given) == len(found.tokens)
    left = right = 0
    for length, response in found.sequences:
        ids, rows_L = found.tokens[left : left + length].tolist(), given[left : left + length]
        for place, row in enumerate(rows_L):
            if row != UNKNOWN:  # computed for these very ids
                number, at = divmod(row, 1000)
                assert at == place and (turns[number][0] + turns[number][1])[: at + 1] == ids[: at + 1]
        for place in range(response):
            number = -int(np.ceil(found.rollout_log_probs[right + place])) - 1
            if found.loss_mask[right + place] and number not in lacking:
                at = length - response + place
                assert rows_L[at - 1] == 1000 * number + at - 1
        assert lacking or UNKNOWN not in rows_L[:-1]
        left, right = left + length, right + response


@settings(max_examples=examples(100))
@given(conversations(), st.randoms())
def test_the_order_of_unrelated_turns_does_not_change_what_is_trained(turns: list[Any], random: Any) -> None:
    """Any order trains the same tokens, though perhaps in other sequences."""
    marked = [(turn, number) for number, turn in enumerate(turns)]
    random.shuffle(marked)
    recorder = TurnRecorder()
    for (asked, answered, version, trained), number in marked:
        recorder.record(prompt(*asked), output(answered, version=version, first=-1.0 - number, trained=trained))
    if any(trained and answered for _, answered, _, trained in turns):
        assert trained_tokens(recorder.export()) == trained_tokens(recorded(turns).export())


def test_experts_of_another_number_of_tokens_are_refused() -> None:
    with refusal(ValueError, place="routed_experts", got="2"):
        TurnRecorder().record(prompt(1, 2), output([3], routed_experts=np.zeros((2, 1, 1), np.uint8)))


def test_memory_is_linear_in_the_new_tokens() -> None:
    """1,000 turns to 100,000 ids: whole prompts would be 50 million."""
    recorder, history = TurnRecorder(), np.arange(100, dtype=np.int32)
    for _ in range(1000):
        answer = output(list(range(60)))
        recorder.record(history, answer)
        history = np.concatenate([history, answer.tokens, np.arange(40, dtype=np.int32)])
    assert sum(len(node.ids) for node in recorder._nodes) == 4 * (len(history) - 40)
    assert recorder.sampled_tokens == 60_000
    found = recorder.export()
    assert (len(found.sequences), found.response_length) == (1, len(history) - 40 - 100)
