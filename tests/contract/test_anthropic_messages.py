"""Anthropic's messages API with Anthropic's own client: at the gateway, where turns are recorded, and through the
router.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine_serving import serving
from tests.episode_kit import Client, stage, task
from tests.reciting_model import write_reciting_model
from tests.refusals import refusal
from tests.router_kit import routing
from tidemill.actors.errors import BadRequest
from tidemill.actors.openai.anthropic_messages import chat_of
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Status
from tidemill.bus.wire.task_settings import Budget

if TYPE_CHECKING:
    import anthropic

ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
}
ASKED: list[Any] = [{"role": "user", "content": "3 + 4?"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 1_000_000}}
MORE: Any = {"model": "m", "max_tokens": 40, "tools": [ADD], "system": [{"type": "text", "text": "Be brief."}]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_reciting_model(tmp_path_factory.mktemp("messages") / "model")


@asynccontextmanager
async def client_of(url: str, key: str = "none") -> "AsyncIterator[anthropic.AsyncAnthropic]":
    import anthropic  # on use, as every worker of pytest imports every file of tests

    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


async def said(client: "anthropic.AsyncAnthropic", messages: list[Any], *, streamed: bool, **more: Any) -> Any:
    """Return the message, of a stream put together by the client."""
    if not streamed:
        return await client.messages.create(messages=messages, **MORE | more)
    async with client.messages.stream(messages=messages, **MORE | more) as stream:
        return await stream.get_final_message()


async def play(client: "anthropic.AsyncAnthropic", *, streamed: bool) -> list[str]:
    """Call the tools, and give their results; return the ids of both messages."""
    first = await said(client, ASKED, streamed=streamed)
    assert first.stop_reason == "tool_use" and first.usage.output_tokens > 5 and first.usage.input_tokens > 5
    blocks = [block.model_dump(exclude_none=True) for block in first.content]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    assert blocks[0]["text"] == "I shall add."
    assert [(block["name"], block["input"]) for block in blocks[1:]] == [("add", {"a": 3, "b": 4}), ("now", {})]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "7"} for block in blocks[1:]]
    story = [*ASKED, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    second = await said(client, story, streamed=streamed)
    assert (second.stop_reason, [block.text for block in second.content]) == ("end_turn", ["It is seven."])
    return [first.id, second.id]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_episode_by_messages_is_one_sequence(model_dir: Path, streamed: bool) -> None:
    ids: list[str] = []

    async def program(program: Client) -> float:
        async with client_of(program.root, program.api_key) as client:
            ids.extend(await play(client, streamed=streamed))
        return 1.0

    async with stage(model_dir, program) as scene:
        sample = (await scene.rollout.sample(task(max_new_tokens=40), 0, "n")).sample
    check_sample(sample)
    assert sample.turns is not None and list(sample.turns.id) == ids and all(id.startswith("msg_") for id in ids)
    assert len(sample.sizes) == 1, "the calls come back as the ids that were sampled"
    roles = ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [message["role"] for message in sample.transcript] == roles, "as a chat has them"


@pytest.mark.parametrize("streamed", [False, True])
async def test_through_the_router(model_dir: Path, streamed: bool) -> None:
    import anthropic

    settings = {"middleware": ("tidemill.actors.router.token_history:TokenHistory",), "model": str(model_dir)}
    async with (
        serving(model_dir) as served,
        routing(served.engine.url, **settings) as door,
        client_of(door.url) as client,
    ):
        await play(client, streamed=streamed)
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await said(client, ASKED, streamed=streamed, tool_choice={"type": "any"})


@pytest.mark.parametrize("streamed", [False, True])
async def test_how_a_message_stops_and_what_is_refused(model_dir: Path, streamed: bool) -> None:
    import anthropic

    async def program(program: Client) -> float:
        async with client_of(program.root, program.api_key) as client:
            stopped = await said(client, ASKED, streamed=streamed, stop_sequences=["add"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "add")
            cut = await said(client, ASKED, streamed=streamed, max_tokens=2)
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
            with pytest.raises(anthropic.BadRequestError) as refused:
                await said(client, ASKED, streamed=streamed)
            body: Any = refused.value.body
            assert (body["type"], body["error"]["code"]) == ("error", "context_length_exceeded")
        return 1.0

    async with stage(model_dir, program) as scene:
        sample = (await scene.rollout.sample(task(max_new_tokens=40, budget=Budget(turns=2)), 0, "n")).sample
    assert sample.status is Status.TRUNCATED


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_tokens": None}, {"place": "max_tokens", "got": "none"}),
        ({"stop_sequence": ["a"]}, {"place": "stop_sequence"}),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            {"place": "tools[0]", "got": "{'type': 'web_search_20250305', 'name': 'web_search'}"},
        ),
        ({"messages": []}, {"place": "messages", "got": "[]"}),
        (
            {"messages": [{"role": "system", "content": "x"}]},
            {"place": "messages[0]", "got": "{'role': 'system', 'content': 'x'}"},
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            {
                "got": "{'type': 'image', 'source': {'type': 'base64', 'media_type': 'image/png', 'data'",
                "place": "messages[0].content[0]",
            },
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}
                ]
            },
            {"place": "messages[0].content[0].content[0]", "got": "'a part of type image'"},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            {"place": "messages[0].content[0]", "got": "{'type': 'tool_use', 'id': '1', 'name': 'f', 'input': {}}"},
        ),
        ({"system": 3}, {"place": "system", "got": "3"}),
    ],
)
def test_bad_requests_name_the_field(changes: dict[str, Any], error: dict[str, Any]) -> None:
    with refusal(BadRequest, **error):
        chat_of({"messages": ASKED, **MORE, **changes})


def test_thinking_of_the_model_is_its_reasoning() -> None:
    content = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "So."},
    ]
    chat = chat_of({**MORE, "messages": [*ASKED, {"role": "assistant", "content": content}]})
    assert chat["messages"][-1] == {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    with refusal(BadRequest, place="messages[0].content[0]"):
        chat_of({**MORE, "messages": [{"role": "user", "content": content}]})


def test_results_of_tools_are_messages_in_front_of_the_text() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "7"}]}
    chat = chat_of({**MORE, "messages": [{"role": "user", "content": [{"type": "text", "text": "And?"}, result]}]})
    assert json.loads(json.dumps(chat["messages"])) == [
        {"role": "system", "content": "Be brief."},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
        {"role": "user", "content": "And?"},
    ]
