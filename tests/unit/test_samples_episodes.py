"""``tail`` and ``show`` of an episode: its response regions, with a rule between sequences."""

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from tests.bus_kit import make_episode, make_sample, make_turns
from tidemill.bus.streams.readers import StoredSample
from tidemill.bus.wire.messages import SequenceSize
from tidemill.launch.cli.show import Vocabulary, shaded, tokens_of
from tidemill.launch.samples.filters import Headline
from tidemill.launch.samples.search import FoundSample, as_map
from tidemill.launch.samples.text import block, conversation, facts, turns_in, turns_table

IDS = Vocabulary(None)
LINE = Headline(seq=3, stored_s=0.0, kind="train", actor="a")
STORED = StoredSample(seq=3, subject="", headers={}, data=b"", stored_s=0.0)


def shown(table: Table) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


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
    assert "8 tokens  3 turns in 2 sequences  " in facts(LINE, make_episode()).plain
    assert "sequence" not in facts(LINE, make_sample()).plain


def test_json_has_the_sequences_of_an_episode_only() -> None:
    found = as_map(3, make_episode())
    assert (found["sequences"], found["rollout"]) == ([[10, 6], [6, 2]], "calc")
    assert {"sequences", "rollout", "turns", "transcript"}.isdisjoint(as_map(3, make_sample()))


def test_json_has_turns_and_transcript() -> None:
    found = as_map(3, make_episode())
    assert found["transcript"] == [
        {"role": "user", "content": "12*7-5?"},
        {"role": "assistant", "turn": 0, "content": "84"},
    ]
    assert [(turn["at"], turn["tokens"], turn["id"], turn.get("reward")) for turn in found["turns"]] == [
        (0, 2, "t-0", None),
        (4, 2, "t-1", 0.1),
        (6, 2, "t-2", None),
    ]
    assert found["turns"][0]["tools_s"] == pytest.approx(0.3)


def test_columns_of_an_invalid_sample_do_no_harm() -> None:
    short = make_turns(seconds=np.array([1.0], np.float32), id=("a", "b"), rewards=((9, 1.0), (-1, 2.0)))
    assert [("id" in turn, "seconds" in turn, "reward" in turn) for turn in turns_in(short)] == [
        (True, True, False),
        (True, False, False),
        (False, False, False),
    ]
    assert len(shown(turns_table(short)).splitlines()) == 4


def test_a_table_has_a_line_for_each_turn() -> None:
    lines = shown(turns_table(make_turns(agent=("planner", "", "\x1b[2J")))).splitlines()
    assert len(lines) == 4 and lines[1].split() == ["0", "2", "0.000", "0.800", "0.300", "stop", "planner"]
    assert "\\x1b[2J" in lines[3] and lines[2].split()[5] == "0.100"


def test_a_conversation_is_shown_message_by_message() -> None:
    messages = (
        {"role": "user", "content": "12*7-5?"},
        {"role": "assistant", "reasoning_content": "first\nthen", "content": None, "tool_calls": [{"id": "c"}]},
        {"role": "tool", "content": [{"type": "text"}]},
        {"content": "\x1b[2J"},
    )
    assert conversation(messages).plain.splitlines() == [
        "user",
        "  12*7-5?",
        "assistant",
        "  first",
        "  then",
        '  {"tool_calls": [{"id": "c"}]}',
        "tool",
        '  [{"type": "text"}]',
        "?",
        "  \\x1b[2J",
    ]
    whole = block(FoundSample(line=LINE, stored=STORED, sample=make_episode(transcript=messages)), full=True).plain
    assert whole.endswith(conversation(messages).plain) and "┃" not in whole
    assert "┃" in block(FoundSample(line=LINE, stored=STORED, sample=make_episode(transcript=messages))).plain
