"""Multi-turn clients that work with text: the engine's prompt contains the sampled ids, id for id."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine_serving import Served, serving
from tests.refusals import refusal
from tests.router_kit import Door, faulty, routing
from tests.tiny_models import EOS, write_tiny_model
from tidemill.actors.config import RouterConfig
from tidemill.actors.router.token_history import TokenHistory
from tidemill.actors.text.text import Text

EXACT = "tidemill.actors.router.token_history:TokenHistory"
PROMPT, MORE = "What is three plus four?", " And five plus six?"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("exact") / "model", max_position_embeddings=1024)


class Heard:
    """An engine that records the ids of its prompts."""

    def __init__(self, served: Served) -> None:
        self.served, self.prompts = served, list[list[int]]()
        engine = served.engine
        queue = engine.scheduler.submit

        def submit(sequences: Any) -> Any:
            self.prompts += [sequence.prompt.tolist() for sequence in sequences]
            return queue(sequences)

        engine.scheduler.submit = submit  # type: ignore[method-assign]


@asynccontextmanager
async def heard(model_dir: Path, *, exact: bool = True, **config: Any) -> AsyncIterator[tuple[Door, Heard]]:
    settings = {"middleware": (EXACT,), "model": str(model_dir), **config} if exact else config
    async with serving(model_dir) as served, routing(served.engine.url, **settings) as door:
        yield door, Heard(served)


def text_of(model_dir: Path) -> Text:
    text = Text.read(model_dir)
    assert text is not None
    return text


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_next_turn_is_sent_with_the_sampled_ids(model_dir: Path, streamed: bool) -> None:
    text = text_of(model_dir)
    async with heard(model_dir, exact=False) as (door, plain):
        first = await turn(door, PROMPT, streamed)
        again = text.encode(PROMPT + first["text"] + MORE)
        await turn(door, PROMPT + first["text"] + MORE, streamed)
        assert plain.prompts[1] == again
        assert again != text.encode(PROMPT) + first["output_ids"] + text.encode(MORE), "without: not what was sampled"
    async with heard(model_dir) as (door, exact):
        story, ids = PROMPT, text.encode(PROMPT)
        mask, log_probs = [0] * len(ids), [0.0] * len(ids)
        for _ in range(3):
            answer = await turn(door, story, streamed)
            assert exact.prompts[-1] == ids
            story += answer["text"] + MORE
            made, put = answer["output_ids"], text.encode(MORE)
            ids += made + put
            mask += [1] * len(made) + [0] * len(put)
            log_probs += [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] + [0.0] * len(put)
        status, told = await door.post("/retrieve_from_text", {"text": story})
        assert status == 200
        assert (told["tokens"], told["loss_mask"], told["rollout_logp"]) == (ids, mask, log_probs)
        assert told["versions"] == [0 if made else -1 for made in mask]
        assert (told["response"], told["token_length"], told["loss_mask_length"]) == (story, len(ids), len(ids))


async def turn(door: Door, text: str, streamed: bool = False, session: str = "", **params: Any) -> Any:
    sampling = {"max_new_tokens": 24, "sampling_seed": 11, "ignore_eos": True, **params}
    body = {"text": text, "sampling_params": sampling, "return_logprob": True, "stream": streamed}
    status, answer = await door.post("/generate", body, headers={"X-Session-Id": session} if session else {})
    assert status == 200, answer
    if not streamed:
        return answer
    events = [event for event in answer.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    return json.loads(events[-2][6:])


async def test_the_end_of_a_response_is_found_when_the_client_sends_it_back(model_dir: Path) -> None:
    text = text_of(model_dir)
    async with heard(model_dir) as (door, engine):
        ender = text.encode("7")[0]
        params = {"ignore_eos": False, "stop_token_ids": [ender], "max_new_tokens": 400}
        answer = await turn(door, PROMPT, **params)
        made = answer["output_ids"]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": made[-1]}
        ended = text.decode(made[-1:], skip_special=False)
        await turn(door, PROMPT + answer["text"] + ended + MORE)
        assert engine.prompts[-1] == text.encode(PROMPT) + made + text.encode(MORE)
        await turn(door, PROMPT + answer["text"] + MORE)
        assert engine.prompts[-1] == text.encode(PROMPT) + made[:-1] + text.encode(MORE), (
            "not put back: it is not there"
        )


async def test_a_stop_string_is_cut_off_and_found_again(model_dir: Path) -> None:
    text = text_of(model_dir)
    async with heard(model_dir) as (door, engine):
        shown = (await turn(door, PROMPT, max_new_tokens=60))["text"]
        stop = next(
            shown[at : at + 2]
            for at in range(20, 60)
            if shown[at : at + 2].isprintable() and "\ufffd" not in shown[at : at + 2]
        )
        answer = await turn(door, PROMPT, max_new_tokens=60, stop=[stop])
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        whole = text.decode(answer["output_ids"])
        await turn(door, PROMPT + whole + MORE)
        assert engine.prompts[-1] == text.encode(PROMPT) + answer["output_ids"] + text.encode(MORE)


async def test_two_sessions_with_one_text_keep_their_own_ids(model_dir: Path) -> None:
    """Constructs the same text from different ids: a random model does not produce it on demand."""
    text = text_of(model_dir)
    exact = TokenHistory(RouterConfig(model=str(model_dir)))
    joined = [3 + 256 + 5]  # one of the tokenizer's merges
    word = text.decode(joined)
    split = [text.encode(letter)[0] for letter in word]
    assert text.decode(split) == word and len(split) > 1
    for session, ids in (("one", split), ("other", joined)):
        exact.remember(await exact.pieces(PROMPT, session), answer_of(ids, word), session)
    for session, ids in (("one", split), ("other", joined)):
        pieces = await exact.pieces(PROMPT + word + MORE, session)
        assert [token for piece in pieces for token in piece.tokens] == text.encode(PROMPT) + ids + text.encode(MORE)


def answer_of(ids: list[int], text: str, **meta: Any) -> dict[str, Any]:
    entries = [[-1.0, token, None] for token in ids]
    return {
        "output_ids": ids,
        "text": text,
        "meta_info": {"output_token_logprobs": entries, "weight_version": "4", **meta},
    }


async def test_versions_that_changed_midway_are_returned_per_token(model_dir: Path) -> None:
    exact = TokenHistory(RouterConfig(model=str(model_dir)))
    ids = text_of(model_dir).encode("abcd")
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": len(ids)}]
    exact.remember(await exact.pieces(PROMPT), answer_of(ids, "abcd", weight_versions=spans))
    assert (await exact.pieces(PROMPT + "abcd"))[-1].versions == (3, *(5,) * (len(ids) - 1))
    short = answer_of(ids, "xyz")
    short["meta_info"]["output_token_logprobs"].pop()
    exact.remember(await exact.pieces(PROMPT), short)
    assert not (await exact.pieces(PROMPT + "xyz"))[-1].sampled, (
        "without a log-prob for each token it is not remembered"
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_chats_are_rendered_by_the_router_and_sent_with_the_sampled_ids(model_dir: Path, streamed: bool) -> None:
    text = text_of(model_dir)
    begin = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    end = f"{EOS}\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    async with heard(model_dir) as (door, engine):
        messages = [{"role": "user", "content": "hi"}]
        content, made = await chat(door, messages, streamed)
        assert engine.prompts[-1] == text.encode(begin)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
        await chat(door, messages, streamed)
        assert engine.prompts[-1] == text.encode(begin) + made + text.encode(end)
        assert engine.prompts[-1] != text.encode(begin + content + end), "tokenised anew it would be another prompt"
        status, told = await door.post(
            "/retrieve_from_text", {"messages": messages[:2]}, headers={"X-Session-Id": "chat"}
        )
        assert status == 200
        assert told["tokens"][: len(text.encode(begin)) + len(made)] == text.encode(begin) + made
        assert sum(told["loss_mask"]) == len(made)


async def chat(door: Door, messages: list[dict[str, str]], streamed: bool) -> tuple[str, list[int]]:
    body = {
        "messages": messages,
        "max_tokens": 24,
        "seed": 5,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": streamed,
    }
    status, answer = await door.post("/v1/chat/completions", {**body, "session_id": "chat"})
    assert status == 200, answer
    if not streamed:
        assert answer["usage"]["completion_tokens"] == 24
        return answer["choices"][0]["message"]["content"], answer["choices"][0]["token_ids"]
    events = [event for event in answer.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    choices = [json.loads(event[6:])["choices"][0] for event in events[:-1]]
    return (
        "".join(choice["delta"].get("content", "") for choice in choices),
        [token for choice in choices for token in choice.get("token_ids", ())],
    )


async def test_completions_of_several_prompts_and_responses_keep_the_sampled_ids(model_dir: Path) -> None:
    text = text_of(model_dir)
    async with heard(model_dir) as (door, engine):
        body = {
            "prompt": [PROMPT, MORE],
            "n": 2,
            "max_tokens": 16,
            "seed": 5,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, answer = await door.post("/v1/completions", body)
        assert status == 200, answer
        for place, choice in enumerate(answer["choices"]):
            prompt = (PROMPT, PROMPT, MORE, MORE)[place]
            await turn(door, prompt + choice["text"] + "!")
            assert engine.prompts[-1] == text.encode(prompt) + choice["token_ids"] + text.encode("!")


async def test_a_chat_without_a_limit_may_fill_the_context_of_the_engine(model_dir: Path) -> None:
    settings = {"middleware": (EXACT,), "model": str(model_dir)}
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    async with serving(model_dir, max_context=48) as served, routing(served.engine.url, **settings) as door:
        limits = []
        queue = served.engine.backend.submit
        served.engine.backend.submit = lambda generate: (
            limits.append(generate.params[0].max_new_tokens),
            queue(generate),
        )[1]  # type: ignore[method-assign]
        for _ in range(2):
            status, answer = await door.post("/v1/chat/completions", messages)
            assert status == 200, answer
            assert limits.pop() == 48 - answer["usage"]["prompt_tokens"]
    async with faulty() as engine, routing(engine.url, **settings) as door:  # this engine does not state its limit
        status, answer = await door.post("/v1/chat/completions", {**messages, "stop": "x"})
        assert engine.paths == ["/v1/models", "/generate"]
    async with routing(**settings, wait_s=0.1) as door:
        status, answer = await door.post("/v1/chat/completions", messages)
        assert (status, "waited" in answer["error"]["message"]) == (503, True)


async def test_more_responses_than_an_engine_gives_are_refused_by_it_and_cost_nothing(model_dir: Path) -> None:
    async with heard(model_dir) as (door, engine):
        await turn(door, PROMPT)
        tracemalloc.start()
        try:
            for count in (4161, 20_000_000):
                for path, body in (
                    ("/generate", {"text": PROMPT, "sampling_params": {"n": count}}),
                    ("/v1/completions", {"prompt": PROMPT, "n": count}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "n": count}),
                ):
                    status, answer = await door.post(path, body)
                    assert (
                        status,
                        f"n: want at most 4160 responses to a request, got {count}" in answer["error"]["message"],
                    ) == (
                        400,
                        True,
                    )
            assert tracemalloc.get_traced_memory()[1] < 20_000_000, (
                "bytes: the count was followed before it was refused"
            )
        finally:
            tracemalloc.stop()
        assert len(engine.prompts) == 1


async def test_texts_beyond_the_bound_are_tokenised_like_any_other(model_dir: Path) -> None:
    text = text_of(model_dir)
    async with heard(model_dir, max_text=10) as (door, engine):
        answer = await turn(door, PROMPT)
        await turn(door, PROMPT + answer["text"])
        assert engine.prompts[-1] == text.encode(PROMPT + answer["text"])


async def test_refusals_name_the_expected_value(model_dir: Path) -> None:
    async with heard(model_dir) as (door, _):
        status, answer = await door.post("/v1/chat/completions", {"messages": [], "max_tokens": 2})
        assert (status, answer["error"]["type"], answer["error"]["param"]) == (400, "invalid_request_error", "messages")
        status, answer = await door.post("/v1/completions", {"prompt": "a", "max_tokens": -3})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        for path, body in (
            ("/generate", {"text": 3}),
            ("/retrieve_from_text", {"text": None}),
            ("/retrieve_from_text", []),
        ):
            assert (await door.post(path, body))[0] == 400
    with refusal(ValueError, place="router.model"):
        await asyncio.to_thread(TokenHistory, RouterConfig(model=str(model_dir.parent)))
