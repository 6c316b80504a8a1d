"""``tail`` and ``show`` of an episode: its response regions, with a rule between sequences."""

from bus.wire.episodes import SequenceSize
from launch.samples.block import facts
from launch.samples.filters import Headline
from launch.samples.search import as_map
from launch.samples.show import shaded, tokens_of
from launch.samples.tokens import Vocabulary
from tests.bus_kit import make_episode, make_sample

IDS = Vocabulary(None)


def test_the_response_regions_are_shown_not_the_end_of_all_tokens() -> None:
    tokens = tokens_of(make_episode(), IDS)
    assert [token.id for token in tokens] == [50, 51, 90, 91, 52, 53, 54, 55]
    assert [token.sequence for token in tokens] == [0] * 6 + [1] * 2
    assert [token.sampled for token in tokens] == [True, True, False, False, True, True, True, True]


def test_a_rule_stands_between_sequences() -> None:
    shown = shaded(tokens_of(make_episode(), IDS)).plain
    assert shown.count("────") == 2
    assert shown.index("⟨53⟩") < shown.index("──── sequence 2 ────") < shown.index("⟨54⟩")
    assert "────" not in shaded(tokens_of(make_sample(), IDS)).plain


def test_sizes_of_an_invalid_sample_do_no_harm() -> None:
    for sizes in ((SequenceSize(-5, 9), SequenceSize(99, -3)), (SequenceSize(2**40, 2**41),) * 2):
        tokens_of(make_episode(sequences=sizes), IDS)


def test_the_line_of_facts_counts_turns_and_sequences() -> None:
    line = Headline(seq=3, stored_s=0.0, kind="train", actor="a")
    assert "8 tokens  3 turns in 2 sequences  " in facts(line, make_episode()).plain
    assert "sequence" not in facts(line, make_sample()).plain


def test_json_has_the_sequences_of_an_episode_only() -> None:
    found = as_map(3, make_episode())
    assert (found["sequences"], found["rollout"]) == ([[10, 6], [6, 2]], "calc")
    assert {"sequences", "rollout"}.isdisjoint(as_map(3, make_sample()))
