"""OpenAI's responses API with OpenAI's own client: at the gateway, where turns are recorded, and through the router."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engine_serving import serving
from tests.episode_kit import Client, stage, task
from tests.reciting_model import write_reciting_model
from tests.refusals import refusal
from tests.router_kit import faulty, routing
from tidemill.actors.errors import BadRequest
from tidemill.actors.http_api import DONE, event
from tidemill.actors.openai.responses_api import chat_of
from tidemill.bus.wire.codec import check_sample

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    "strict": False,
}
ASKED: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "3 + 4?"}]}]
MORE: Any = {"model": "m", "tools": [ADD], "instructions": "Be brief.", "max_output_tokens": 40}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_reciting_model(tmp_path_factory.mktemp("responses") / "model")


@asynccontextmanager
async def client_of(base_url: str, key: str = "none") -> AsyncIterator[Any]:
    import openai  # on use, as every worker of pytest imports every file of tests

    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        yield client


async def said(client: Any, items: Any, *, streamed: bool, **more: Any) -> Any:
    """Return the response, of a stream put together by the client."""
    if not streamed:
        return await client.responses.create(input=items, **MORE | more)
    deltas, arguments, numbers, response = "", "", [], None
    async with client.responses.stream(input=items, **MORE | more) as stream:
        async for each in stream:
            numbers.append(each.sequence_number)
            deltas += each.delta if each.type == "response.output_text.delta" else ""
            arguments += each.delta if each.type == "response.function_call_arguments.delta" else ""
            if each.type in ("response.completed", "response.incomplete"):
                response = each.response
    assert response is not None and arguments == "".join(
        item.arguments for item in response.output if item.type == "function_call"
    )
    assert deltas == response.output_text and numbers == list(range(len(numbers)))
    return response


async def play(client: Any, *, streamed: bool) -> list[str]:
    """Call the tools, and give their results; return the ids of both responses."""
    first = await said(client, ASKED, streamed=streamed)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert (first.status, first.output_text, first.usage.output_tokens > 5) == ("completed", "I shall add.", True)
    assert [(item.name, item.arguments) for item in first.output[1:]] == [("add", '{"a": 3, "b": 4}'), ("now", "{}")]
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "7"} for item in first.output[1:]]
    kept = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    second = await said(client, [*ASKED, *kept, *results], streamed=streamed)
    assert second.output_text == "It is seven."
    return [first.id, second.id]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_episode_by_responses_is_one_sequence(model_dir: Path, streamed: bool) -> None:
    ids: list[str] = []

    async def program(program: Client) -> float:
        async with client_of(program.base_url, program.api_key) as client:
            ids.extend(await play(client, streamed=streamed))
        return 1.0

    async with stage(model_dir, program) as scene:
        sample = (await scene.rollout.sample(task(max_new_tokens=40), 0, "n")).sample
    check_sample(sample)
    assert sample.turns is not None and list(sample.turns.id) == ids and all(id.startswith("resp_") for id in ids)
    assert len(sample.sizes) == 1, "the calls come back as the ids that were sampled"


@pytest.mark.parametrize("streamed", [False, True])
async def test_through_the_router_and_what_is_incomplete_or_refused(model_dir: Path, streamed: bool) -> None:
    import openai

    settings = {"middleware": ("tidemill.actors.router.token_history:TokenHistory",), "model": str(model_dir)}
    async with (
        serving(model_dir) as served,
        routing(served.engine.url, **settings) as door,
        client_of(door.url + "/v1") as client,
    ):
        await play(client, streamed=streamed)
        cut = await said(client, "3 + 4?", streamed=streamed, max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens) == (
            "incomplete",
            "max_output_tokens",
            2,
        )
        with refusal(openai.BadRequestError, param="previous_response_id"):
            await said(client, ASKED, streamed=streamed, previous_response_id="resp_1")


def state(text: str, finish: str | None = None) -> dict[str, Any]:
    """Return the state of a response of one token."""
    finished = None if finish is None else {"type": finish}
    meta = {
        "id": "x",
        "finish_reason": finished,
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "output_token_logprobs": [[-1.0, 5, None]],
    }
    return {"text": text, "output_ids": [5], "meta_info": meta}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
async def test_a_stream_that_its_engine_ends_too_early_breaks_off(model_dir: Path, path: str) -> None:
    settings = {"middleware": ("tidemill.actors.router.token_history:TokenHistory",), "model": str(model_dir)}
    chat = {"messages": [{"role": "user", "content": "3 + 4?"}], "max_tokens": 9}
    body = {"input": "3 + 4?"} if path == "/v1/responses" else chat
    async with faulty() as engine, routing(engine.url, **settings) as door:
        engine.does = "events"

        async def asked(*states: dict[str, Any]) -> bytes:
            """Return the whole stream that is made of an engine's."""
            engine.events = b"".join(map(event, states)) + DONE
            async with door.session.post(door.url + path, json={"model": "m", "stream": True, **body}) as answer:
                assert answer.status == 200
                return await answer.read()

        for states in ([], [state("a")]):
            with pytest.raises(aiohttp.ClientError):
                print(await asked(*states))
        whole = await asked(state("a"), state("a", "stop"))
        assert any(last in whole for last in (b"response.completed", b"message_stop", b"[DONE]"))
        assert b"no such luck" in await asked(state("a"), {"error": {"message": "no such luck"}}), (
            "an error ends a stream, too"
        )


@pytest.mark.parametrize("sent", [b"{", b"{" * 100_000, b'{"meta_info": 1}', b'["error"]', b'"error" x'])
async def test_an_event_of_an_engine_that_is_no_state_breaks_a_stream_off_with_the_reason(
    model_dir: Path, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    settings = {"middleware": ("tidemill.actors.router.token_history:TokenHistory",), "model": str(model_dir)}
    async with faulty() as engine, routing(engine.url, **settings) as door:
        engine.does, engine.events = "events", event(state("a")) + b"data: " + sent + b"\n\n" + DONE
        asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "3 + 4?"}]}
        with pytest.raises(aiohttp.ClientError):
            async with door.session.post(door.url + "/v1/chat/completions", json=asked) as answer:
                await answer.read()
    assert "answer broken off path=/v1/chat/completions error=event of a stream: want" in caplog.text


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"input": []}, {"place": "input", "got": "[]"}),
        ({"input": [{"type": "reasoning", "summary": []}]}, {"place": "input", "got": "reasoning alone"}),
        (
            {"input": [{"type": "reasoning", "content": [{"type": "image"}]}]},
            {"place": "input[0].content[0]"},
        ),
        ({"input": [{"type": "file_search_call"}]}, {"place": "input[0]"}),
        ({"input": [{"role": [], "content": "x"}]}, {"place": "input[0]"}),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            {"place": "input[0].content[0]"},
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]},
            {"place": "input[0].output[0]", "got": "'a part of type input_image'"},
        ),
        ({"tools": [{"type": "web_search"}]}, {"place": "tools[0]", "got": "{'type': 'web_search'}"}),
        ({"max_tokens": 3}, {"place": "max_tokens"}),
        ({"text": {"format": {"type": "grammar"}}}, {"place": "text", "got": "{'format': {'type': 'grammar'}}"}),
        ({"instructions": 3}, {"place": "instructions", "got": "3"}),
    ],
)
def test_bad_requests_name_the_field(changes: dict[str, Any], error: dict[str, Any]) -> None:
    with refusal(BadRequest, **error):
        chat_of({"input": ASKED, **MORE, **changes})


def test_text_and_calls_in_a_row_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
    result = {"type": "function_call_output", "call_id": "1", "output": "7"}
    chat = chat_of({**MORE, "input": [{"role": "developer", "content": "x"}, said, call, call, result]})
    assert [message["role"] for message in chat["messages"]] == ["system", "developer", "assistant", "tool"]
    assert len(chat["messages"][2]["tool_calls"]) == 2 and chat["messages"][2]["content"] == "So."


def test_reasoning_belongs_to_the_message_or_call_behind_it() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"id": "rs_1", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    hidden = {
        "id": "rs_2",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "s"}],
        "encrypted_content": "x",
    }
    said = {"role": "assistant", "content": "So."}
    asked = {"role": "user", "content": "?"}
    chat = chat_of(
        {
            "input": [
                asked,
                thought("a"),
                said,
                call,
                thought("b"),
                call,
                hidden,
                said,
                thought("c"),
                asked,
                thought("d"),
            ]
        }
    )
    found = [(one["role"], one.get("reasoning_content"), len(one.get("tool_calls", ()))) for one in chat["messages"]]
    ends = [("assistant", None, 0), ("assistant", "c", 0), ("user", None, 0), ("assistant", "d", 0)]
    assert found == [("user", None, 0), ("assistant", "a", 1), ("assistant", "b", 1), *ends]
