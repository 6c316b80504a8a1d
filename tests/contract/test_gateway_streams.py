"""Streams of the gateway: sent token by token, and recorded as they were sent."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.episode_kit import Client, Stage, chat, stage, task
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Sample, Status
from tidemill.bus.wire.task_settings import Budget

LONG, HELD = 900, 20
"""Tokens of a response, and decoding steps until it is held: it has not ended when its first token is read."""
ASKED = chat(("user", "What is three plus four?"), stream=True, return_token_ids=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("streams") / "model", max_position_embeddings=1024)


async def events(response: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream to its end."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def ids(event: dict[str, Any]) -> list[int]:
    return [token for choice in event["choices"] for token in choice.get("token_ids", ())]


async def made(scene: Stage, **options: Any) -> Sample:
    sample = (await scene.rollout.sample(task(**options), 0, "n")).sample
    check_sample(sample)
    return sample


def stream_of(client: Client, **more: Any) -> Any:
    return client.session.post(client.root + "/v1/chat/completions", json=ASKED | more)


async def test_tokens_are_sent_before_the_response_has_ended(model_dir: Path) -> None:
    received: list[int] = []

    async def program(client: Client) -> float:
        async with stream_of(client, no_such_field=1) as refused:
            assert refused.status == 400, "an error has a status, also of a stream"
        usage, gate = None, scene.served.hold(after=HELD)
        async with stream_of(client, stream_options={"include_usage": True}) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            async for each in events(answer):
                first, usage = not received, each.get("usage", usage)
                received.extend(ids(each))
                if first and received:
                    (open,) = scene.gateway.open_episodes.values()
                    assert not len(open.episode.recorder), "sent before the turn is whole"
                    gate.open()
        assert usage is not None and usage["completion_tokens"] == len(received)
        return 1.0

    async with stage(model_dir, program) as scene:
        sample = await made(scene, max_new_tokens=LONG)
    assert sample.turns is not None and sample.turns.finish[0] in ("stop", "length")
    assert sample.tokens.tolist()[-len(received) :] == received and sample.loss_mask.all()


async def test_a_stream_that_its_client_cuts_is_a_turn_up_to_the_last_token_sent(model_dir: Path) -> None:
    received: list[int] = []

    async def program(client: Client) -> float:
        scene.served.hold(after=HELD)
        async with stream_of(client) as answer:
            async for each in events(answer):
                received.extend(ids(each))
                if len(received) > 3:
                    break
            answer.close()
        return 1.0

    async with stage(model_dir, program) as scene:
        sample = await made(scene, max_new_tokens=LONG)
        assert sample.turns is not None and sample.turns.finish == ("cut",)
        assert sample.status is Status.COMPLETED and [each["role"] for each in sample.transcript] == [
            "user",
            "assistant",
        ]
        response = sample.tokens.tolist()[-sample.response_length :]
        assert response[: len(received)] == received and len(response) < LONG
        await scene.served.until(lambda: not scene.served.engine.scheduler.running)  # the engine makes no more of it


async def test_a_program_that_ends_beside_its_open_stream_is_trained_on_what_it_was_sent(model_dir: Path) -> None:
    received: list[int] = []
    held: list[Any] = []

    async def program(client: Client) -> float:
        scene.served.hold(after=HELD)
        held.append(await stream_of(client))
        async for each in events(held[0]):
            received.extend(ids(each))
            if received:
                return 1.0
        raise AssertionError("no token")

    async with stage(model_dir, program) as scene:
        sample = await made(scene, max_new_tokens=LONG)
        held[0].close()
    assert sample.turns is not None and sample.turns.finish == ("cut",)
    assert sample.tokens.tolist()[-sample.response_length :][: len(received)] == received


async def test_a_client_that_goes_before_the_first_token_leaves_no_turn(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        (open,) = scene.gateway.open_episodes.values()
        await scene.served.post("/pause_generation", {"mode": "in_place"})
        asked = asyncio.ensure_future(client.session.post(client.root + "/v1/chat/completions", json=ASKED))
        async with asyncio.timeout(LIMIT_S):
            await until(lambda: open.streams, every_s=0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.gather(*open.streams, return_exceptions=True)
        await scene.served.post("/continue_generation", {})
        await client.chat(("user", "Again."))
        return 1.0

    async with stage(model_dir, program) as scene:
        sample = await made(scene)
    assert sample.turns is not None and len(sample.turns.at) == 1 and sample.turns.finish[0] != "cut"


async def test_several_responses_of_a_stream_with_the_client_of_openai(model_dir: Path) -> None:
    import openai  # on use, as every worker of pytest imports every file of tests

    texts: dict[int, str] = {0: "", 1: "", 2: ""}

    async def program(client: Client) -> float:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as model:
            asked: Any = {"model": "model", "messages": ASKED["messages"], "stream": True, "n": 3}
            async for part in await model.chat.completions.create(**asked):
                for choice in part.choices:
                    texts[choice.index] += choice.delta.content or ""
            async for completion in await model.completions.create(
                model="model", prompt="One,", max_tokens=5, stream=True
            ):
                assert completion.id.startswith("cmpl-")
        return 1.0

    async with stage(model_dir, program) as scene:
        sample = await made(scene)
    assert sample.turns is not None and len(sample.turns.at) == 4 and len(set(sample.turns.id)) == 4
    assert all(texts.values())


async def test_states_of_generate_and_the_budget_of_a_stream(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        states = []
        body = {"text": "One, two,", "stream": True, "sampling_params": {"max_new_tokens": 6}}
        async with client.session.post(client.root + "/generate", json=body) as answer:
            states = [each async for each in events(answer)]
        assert states[-1]["meta_info"]["finish_reason"]["type"] and states[0]["output_ids"] == []
        async with stream_of(client) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (400, "context_length_exceeded")
        return 1.0

    async with stage(model_dir, program) as scene:
        sample = await made(scene, budget=Budget(turns=1))
    assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, "budget.turns")


async def test_the_gateway_alone_decides_whether_a_stream_is_sent_as_its_tokens_are_made(model_dir: Path) -> None:
    """It does not see a field with an escaped name, and then sends the stream when it is whole."""
    received: list[int] = []

    async def program(client: Client) -> float:
        body = json.dumps(ASKED).replace('"stream"', '"str\\u0065am"')
        async with client.session.post(client.root + "/v1/chat/completions", data=body) as answer:
            (open,) = scene.gateway.open_episodes.values()
            assert len(open.episode.recorder) == 1, "recorded before the first event is sent"
            async for each in events(answer):
                received.extend(ids(each))
        return 1.0

    async with stage(model_dir, program) as scene:
        sample = await made(scene)
    assert sample.turns is not None and len(sample.turns.at) == 1
    assert sample.tokens.tolist()[-len(received) :] == received
    assert [each["role"] for each in sample.transcript] == ["user", "assistant"]
