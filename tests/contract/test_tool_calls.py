"""Agents that call tools, with OpenAI's own client: on both kinds of engine, and token-exact through the router."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.engine_kinds import Kind
from tests.engine_serving import serving
from tests.reciting_model import CALLS, SAID, TEMPLATE, write_reciting_model
from tests.router_kit import routing
from tidemill.actors.router.chats import ToolCallCache
from tidemill.actors.text.tool_calls import ParsedReply, ToolCall, form_of, read

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
ASKED: list[Any] = [{"role": "user", "content": "3 + 4?"}]


@pytest.fixture(scope="module")
def dtype() -> str:
    return "float32"


@pytest.fixture(scope="module")
def first_model(model_dir: Path) -> Path:
    return model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_reciting_model(tmp_path_factory.mktemp("tools") / "model")


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Any]:
    import openai  # on use, as every worker of pytest imports every file of tests

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def said(client: Any, messages: list[Any], *, streamed: bool, **more: Any) -> tuple[dict[str, Any], str]:
    """Send messages. Returns (the message, the finish reason)."""
    asked = {"model": "m", "messages": messages, "temperature": 0, **more}
    if not streamed:
        (choice,) = (await client.chat.completions.create(**asked)).choices
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    content, calls, finish = "", list[Any](), ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.index == len(calls)
            calls.append(call.model_dump(exclude={"index"}))
        finish = choice.finish_reason or finish
    message = {
        "role": "assistant",
        **({"content": content} if content else {}),
        **({"tool_calls": calls} if calls else {}),
    }
    return message, finish


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_calls_a_tool_and_reads_its_result(kind: Kind, model_dir: Path, streamed: bool) -> None:
    async with kind.serving(model_dir) as served, client_of(served.engine.url) as client:
        message, finish = await said(client, ASKED, streamed=streamed, tools=[ADD])
        assert finish == "tool_calls"
        assert message["content"] == "I shall add."
        told = [
            (call["type"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message["tool_calls"]
        ]
        assert told == [("function", "add", {"a": 3, "b": 4}), ("function", "now", {})]
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2
        results = [{"role": "tool", "tool_call_id": id, "content": "7"} for id in ids]
        assert await said(client, [*ASKED, message, *results], streamed=streamed, tools=[ADD]) == (
            {"role": "assistant", "content": "It is seven."},
            "stop",
        )
        for nothing_to_call in ({}, {"tools": [ADD], "tool_choice": "none"}):
            assert await said(client, ASKED, streamed=streamed, **nothing_to_call) == (
                {"role": "assistant", "content": SAID},
                "stop",
            )
        cut, finish = await said(client, ASKED, streamed=streamed, tools=[ADD], max_tokens=4)
        assert (cut["content"], finish) == ("".join(CALLS[1:5]), "length"), "what is not closed is said"


@pytest.mark.parametrize("streamed", [False, True])
async def test_through_the_router_the_next_turn_has_the_ids_of_the_calls(model_dir: Path, streamed: bool) -> None:
    settings = {"middleware": ("tidemill.actors.router.token_history:TokenHistory",), "model": str(model_dir)}
    async with (
        serving(model_dir) as served,
        routing(served.engine.url, **settings) as door,
        client_of(door.url) as client,
    ):
        prompts: list[list[int]] = []
        queue = served.engine.scheduler.submit

        def submit(sequences: Any) -> Any:
            prompts.extend(sequence.prompt.tolist() for sequence in sequences)
            return queue(sequences)

        served.engine.scheduler.submit = submit  # type: ignore[method-assign]
        message, _ = await said(client, ASKED, streamed=streamed, tools=[ADD])
        story = [*ASKED, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}]
        assert (await said(client, story, streamed=streamed, tools=[ADD]))[0]["content"] == "It is seven."
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        sampled = [tokenizer.token_to_id(piece) for piece in CALLS[1:]]
        assert prompts[1][: len(prompts[0]) + len(sampled)] == prompts[0] + sampled
        changed = json.loads(json.dumps(story))
        changed[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 5}'
        await said(client, changed, streamed=streamed, tools=[ADD])
        assert '"arguments": {"a": 5}' in tokenizer.decode(prompts[2], skip_special_tokens=False), (
            "what a client changes is taken as changed"
        )


async def test_unsupported_tool_choices_are_refused(model_dir: Path) -> None:
    import openai

    async with serving(model_dir) as served, client_of(served.engine.url) as client:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await said(client, ASKED, streamed=False, tools=[ADD], tool_choice=choice)
        broken = {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{"}}],
        }
        with pytest.raises(
            openai.BadRequestError,
            match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments",
        ):
            await said(client, [*ASKED, broken], streamed=False, tools=[ADD])


def test_the_format_of_calls_follows_from_the_template() -> None:
    assert [form_of(template) for template in (TEMPLATE, "{{ '<|python_tag|>' }}", "{{ messages }}")] == [
        "tags",
        "json",
        None,
    ]


NUMBERS = tuple(f'{{"name": "f", "arguments": {{"x": [{number}]}}}}' for number in ("NaN", "-Infinity", "1e999"))
"""Calls with numbers that JSON does not have, or that only an infinite one stands for."""
ONE = '<tool_call>{"name": "f", "arguments": {"x": "</b>"}}</tool_call>'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("tags", "plain \n", "plain \n", []),
        ("tags", f" a {ONE}\n\n{ONE} ", " a", ["f", "f"]),
        ("tags", f"{ONE}\nthen", "then", ["f"]),
        ("tags", f"a \n{ONE}\nthen", "a\nthen", ["f"]),
        ("tags", f"<tool_call>nothing</tool_call> {ONE}", "<tool_call>nothing</tool_call>", ["f"]),
        ("tags", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        (
            "tags",
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            [],
        ),
        ("tags", f"{ONE}<tool_call>open", "<tool_call>open", ["f"]),
        ("tags", "a <tool_c", "a <tool_c", []),
        ("json", ' {"name": "f", "parameters": {"x": 1}}; {"name": "g"}', "", ["f", "g"]),
        ("json", '{"name": "f"} and so on', '{"name": "f"} and so on', []),
        ("json", "plain", "plain", []),
        *(
            (form, text, text, [])
            for opening in (
                '{"name": "f", "arguments": {"x": ' + "[" * 3000,
                '{"name": "f", "arguments": {"x": "\\ud83d"}}',
                *NUMBERS,
            )
            for form, text in (("tags", f"<tool_call>{opening}</tool_call>"), ("json", opening))
        ),
    ],
)
def test_texts_are_split_into_content_and_calls(form: str, text: str, content: str, calls: list[str]) -> None:
    whole = read(text, form, finished=True)
    assert (whole.content, [call.name for call in whole.calls]) == (content, calls)


@given(
    st.lists(
        st.sampled_from([ONE, "<tool_call>", "</tool_call>", "<tool", " ", "\n", "a", '{"name": "f"}', ";"]), max_size=8
    )
)
def test_streamed_content_is_never_retracted(parts: list[str]) -> None:
    text = "".join(parts)
    for form in ("tags", "json"):
        seen = ParsedReply("", ())
        for size in range(len(text) + 1):
            now = read(text[:size], form, finished=False)
            assert now.content.startswith(seen.content) and now.calls[: len(seen.calls)] == seen.calls
            seen = now
        whole = read(text, form, finished=True)
        assert whole.content.startswith(seen.content) and whole.calls[: len(seen.calls)] == seen.calls


def test_arguments_keep_their_letters() -> None:
    assert read('<tool_call>{"name": "f", "arguments": {"ü": 1}}</tool_call>', "tags", finished=True).calls == (
        ToolCall("f", '{"ü": 1}'),
    )


def test_the_cache_of_texts_is_bounded() -> None:
    texts = ToolCallCache(10)
    messages = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": str(number), "function": {"name": "f", "arguments": "{}"}}],
        }
        for number in range(3)
    ]
    for message in messages:
        texts.remember(message, "12345")
    assert [message["content"] for message in texts.with_original_text(messages)] == [None, "12345", "12345"]
