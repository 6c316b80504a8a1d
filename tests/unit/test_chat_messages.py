"""Chat messages in one form: notations that mean the same, and values that no notation has."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_kit import Conversation, conversations
from tests.examples import examples
from tidemill.bus.errors import WireError
from tidemill.bus.wire.chat_messages import chat_messages

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}


def call(**function: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "add", **function}}


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": "x", "name": None, "more": 1}, {"role": "user", "content": "x", "more": 1}),
        (said(content=None), said(content="")),
        (said(content=None, refusal="no"), said(content="no")),
        (said(content=[{"type": "refusal", "refusal": "no"}]), said(content="no")),
        (
            said(content="x", refusal=None, audio=None, tool_calls=None, annotations=[]),
            said(content="x", annotations=[]),
        ),
        (said(content="x", tool_calls=[]), said(content="x")),
        (said(content=None, reasoning_content="why"), said(content="", reasoning_content="why")),
        (said(tool_calls=[CALL]), said(content="", tool_calls=[CALL])),
        (said(content=None, tool_calls=[call(arguments='{"a": 3}')]), said(content="", tool_calls=[CALL])),
        (said(tool_calls=[{"name": "add", "arguments": {"a": 3}, "id": "1"}]), said(content="", tool_calls=[CALL])),
        (
            said(tool_calls=[{"id": "1", "function": {"name": "add", "arguments": '{"a":3}'}}]),
            said(content="", tool_calls=[CALL]),
        ),
        (said(tool_calls=[call()]), said(content="", tool_calls=[call(arguments={})])),
        (said(tool_calls=[call(arguments=" ")]), said(content="", tool_calls=[call(arguments={})])),
        (said(tool_calls=[call(arguments=None)]), said(content="", tool_calls=[call(arguments={})])),
        (
            said(tool_calls=[call(arguments='{"a": "\\ud83d", "\\ud800": [1]}')]),
            said(content="", tool_calls=[call(arguments={"a": "\ufffd", "\ufffd": [1]})]),
        ),
        ({"role": "tool", "content": None}, {"role": "tool", "content": ""}),
        ({"role": "observation", "content": "x"}, {"role": "observation", "content": "x"}),
    ],
)
def test_a_message_has_one_form(message: dict[str, Any], wanted: dict[str, Any]) -> None:
    (found,) = chat_messages([message])
    assert found == wanted
    assert chat_messages([found]) == [wanted], "the form of a message in that form is the same"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "m: want a list of at least one message, got []"),
        ("x", "m: want a list of at least one message, got 'x'"),
        ([5], 'm[0]: want a map with text as "role"'),
        ([{"content": "x"}], "m[0]: want a map"),
        ([{"role": 3, "content": "x"}], "m[0]: want a map"),
        ([{"role": "user"}], "m[0].content: want text or text parts, got 'no such key'"),
        ([{"role": "user", "content": None}], "m[0].content: want text or text parts, got 'null'"),
        ([{"role": "user", "text": "x"}], "m[0].content: "),
        ([said(value="x")], "m[0].content: want text or text parts, got 'no such key'"),
        ([{"role": "tool", "tool_call_id": "1"}], "m[0].content: "),
        (
            [{"role": "user", "content": 5}],
            "m[0].content: want text or text parts (write other values as JSON text), got 5",
        ),
        (
            [{"role": "tool", "content": {"a": 1}}],
            "m[0].content: want text or text parts (write other values as JSON text)",
        ),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "m[1].content[0]: ",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "as the model reads text alone, got 'a part of type image_url'",
        ),
        ([{"role": "user", "content": ["x"]}], "m[0].content[0]: want a text part"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "m[0].content[0]: want a text part"),
        ([said(content="", audio={"id": "1"})], "m[0].audio: want text alone"),
        (
            [said(content="", function_call={"name": "f"})],
            "m[0].function_call: want tool_calls, which have replaced it",
        ),
        ([said(content="", name=3)], "m[0].name: want text, got 3"),
        ([said(content="", reasoning_content=["x"])], "m[0].reasoning_content: want text"),
        ([{"role": "tool", "content": "", "tool_call_id": 3}], "m[0].tool_call_id: want text"),
        (
            [{"role": "user", "content": "x", "tool_calls": [CALL]}],
            "m[0].tool_calls: want a list of calls, in messages of the assistant",
        ),
        ([said(tool_calls=3)], "m[0].tool_calls: want a list"),
        ([said(tool_calls=[3])], 'm[0].tool_calls[0]: want {"id"'),
        ([said(tool_calls=[CALL, {"id": "2", "function": {"name": ""}}])], "m[0].tool_calls[1]: want"),
        ([said(tool_calls=[{**CALL, "id": 7}])], "m[0].tool_calls[0].id: want text, got 7"),
        *(
            (
                [said(tool_calls=[call(arguments=value)])],
                "m[0].tool_calls[0].function.arguments: want a map, or one as JSON text",
            )
            for value in ("{", "[1]", "null", "5", [1], 5, True, '{"a": NaN}', {"a": float("inf")}, "[" * 100_000)
        ),
    ],
)
def test_other_values_are_refused_by_message_and_field(messages: Any, complaint: str) -> None:
    with pytest.raises(WireError) as caught:
        chat_messages(messages, "m")
    assert complaint in str(caught.value) and len(str(caught.value)) < 400


def test_a_result_has_the_name_of_its_call() -> None:
    calls = [{"id": id, "function": {"name": name, "arguments": "{}"}} for id, name in (("1", "add"), ("2", "now"))]
    results = [{"role": "tool", "tool_call_id": id, "content": "x"} for id in ("2", "1", "3")]
    found = chat_messages(
        [said(tool_calls=calls), *results, {**results[0], "name": "own"}, {"role": "tool", "content": "x"}]
    )
    assert [message.get("name") for message in found[1:]] == ["now", "add", None, "own", None]


@settings(max_examples=examples(300))
@given(conversations())
def test_every_notation_has_the_same_form_and_changes_nothing_it_is_given(talk: Conversation) -> None:
    before = repr(talk.written)
    assert chat_messages(talk.written) == chat_messages(talk.plain) == talk.plain
    assert repr(talk.written) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["role", "content", "tool_calls", "function", "name", "arguments", "id", "type", "text", "refusal", "tool_call_id"]
)
MESSAGES = st.recursive(
    JSON | st.sampled_from(["assistant", "user", "tool", "text", "{}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=examples(600))
@given(MESSAGES | st.lists(st.dictionaries(FIELDS, MESSAGES)))
def test_any_value_has_a_form_or_is_refused(value: Any) -> None:
    try:
        found = chat_messages(value)
    except WireError:
        return
    assert chat_messages(found) == found and all(isinstance(message["content"], str) for message in found)
