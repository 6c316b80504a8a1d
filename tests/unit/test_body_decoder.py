"""Request bodies: one description, and errors that name the path, the values accepted there and the value received."""

from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from tidemill.actors.errors import BadRequest
from tidemill.actors.http_api import decode, known_fields, need


class Inner(Struct):
    size: Annotated[int, Meta(ge=1, lt=100)] = 1
    rate: Annotated[float, Meta(gt=0)] = 1.0
    names: list[Annotated[str, Meta(min_length=1)]] = []
    bias: dict[str, float] = {}

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ValueError("size: want another number, got 13")


class Outer(Struct):
    inner: Inner | list[Inner]
    stream: bool = False
    rid: str | list[str] | None = None


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"inner": {"size": 0}}, "inner.size: want an integer >= 1, got 0"),
        ({"inner": {"size": 2**70}}, "inner.size: want an integer <= 99, got 1180591620717411303424"),
        ({"inner": {"size": True}}, "inner.size: want an integer, got True"),
        ({"inner": {"size": 1.5}}, "inner.size: want an integer, got 1.5"),
        ({"inner": {"size": None}}, "inner.size: want an integer, got None"),
        ({"inner": {"size": 13}}, "inner.size: want another number, got 13"),
        ({"inner": [{}, {"size": 13}]}, "inner[1].size: want another number, got 13"),
        ({"inner": {"rate": float("nan")}}, "inner.rate: want a number > 0, got nan"),
        ({"inner": {"rate": 10**400}}, "inner.rate: want a number that 64 bits can hold, got 1000"),
        ({"inner": [{}, {"names": ["a", ""]}]}, "inner[1].names[1]: want a string of length >= 1, got ''"),
        ({"inner": {"bias": {"5": "x"}}}, "inner.bias: want a number, got {'5': 'x'}"),
        ({"inner": {"bias": {5: 1.0}}}, "inner.bias: want a string, got {5: 1.0}"),
        ({"inner": 5}, "inner: want a map or a list, got 5"),
        ({"inner": {}, "rid": 5}, "rid: want a string or a list, got 5"),
        ({"inner": {}, "stream": 1}, "stream: want true or false, got 1"),
        ({}, "inner: want a value, got none"),
        ([], "body: want a map, got []"),
        ({"inner": {"size": "x" * 10_000}}, "inner.size: want an integer, got 'xxx"),
    ],
)
def test_an_error_names_the_path_the_values_accepted_and_the_value_received(body: Any, error: str) -> None:
    with pytest.raises(BadRequest) as raised:
        decode(body, Outer)
    assert str(raised.value).startswith(error)
    assert len(str(raised.value)) < 200


def test_the_path_begins_where_the_body_is() -> None:
    with pytest.raises(BadRequest) as raised:
        decode({"size": 0}, Inner, "buckets[3]")
    assert str(raised.value) == "buckets[3].size: want an integer >= 1, got 0"
    for value in (None, True, 1.0, "1"):
        with pytest.raises(BadRequest) as raised:
            need({"pid": value}, "pid", int)
        assert str(raised.value) == f"pid: want an integer, got {value!r}"


def test_nulls_and_fields_without_effect_are_left_out_and_others_refused() -> None:
    neutral: dict[str, tuple[object, ...]] = {"min_p": (None, 0)}
    assert known_fields({"size": 1, "rate": None, "min_p": 0}, ("size", "rate"), neutral, "body") == {"size": 1}
    for body, error in (
        ({"min_p": 0.1}, "body.min_p: not supported; want 0, got 0.1"),
        ({"sise": 1}, "body.sise: unknown parameter; did you mean size?"),
        ({"q": 1}, "body.q: unknown parameter; known: min_p, rate, size"),
    ):
        with pytest.raises(BadRequest) as raised:
            known_fields(body, ("size", "rate"), neutral, "body")
        assert str(raised.value).startswith(error)
