"""The helper that compares errors by their fields fails where a field differs."""

import re

import pytest

from tests.refusals import refusal
from tidemill.bus.errors import StreamTrimmed


def test_declared_fields_are_compared() -> None:
    with refusal(StreamTrimmed, needed=1, first=7, stream=re.compile("SAMPLES$")) as caught:
        raise StreamTrimmed("TM_r_SAMPLES", 1, 7)
    assert caught.value.first == 7
    for fields in ({"needed": 2}, {"first": "7"}, {"stream": re.compile("^SAMPLES")}, {"place": "TM_r"}):
        with pytest.raises(AssertionError), refusal(StreamTrimmed, **fields):
            raise StreamTrimmed("TM_r_SAMPLES", 1, 7)


@pytest.mark.parametrize(
    ("message", "place", "got"),
    [
        ("rank: want 1 to 1, got 2", "rank", "2"),
        ("a.jsonl:2: answer: want text, got 'two'; mend it", "a.jsonl:2: answer", "'two'"),
        ("--bus: no password there", "--bus", None),
        ("gone", None, None),
    ],
)
def test_place_and_value_are_read_from_a_message_without_fields(
    message: str, place: str | None, got: str | None
) -> None:
    with refusal(ValueError, place=place, got=got):
        raise ValueError(message)
    for wrong in ({"place": "other"}, {"got": "other"}):
        with pytest.raises(AssertionError), refusal(ValueError, **wrong):
            raise ValueError(message)


def test_an_error_of_another_class_and_none_fail() -> None:
    with pytest.raises(KeyError), refusal(ValueError, place="a"):
        raise KeyError("a: want b, got c")
    with pytest.raises(pytest.fail.Exception), refusal(ValueError, place="a"):
        pass
