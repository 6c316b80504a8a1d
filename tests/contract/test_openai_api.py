"""OpenAI's paths of both kinds of engine, over plain HTTP, against the results of /generate and the tokenizer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine_kinds import Kind
from tests.engine_serving import Served
from tests.refusals import refusal
from tests.skips import inapplicable
from tests.tiny_models import CHAT_TEMPLATE, EOS, write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.errors import BadRequest
from tidemill.actors.openai import openai_api
from tidemill.actors.openai.openai_answers import ResponseBuilder
from tidemill.actors.text.tool_calls import ChatTemplate

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is three plus four?"}]
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is three plus "
    "four?<|im_end|>\n<|im_start|>assistant\n"
)  # by hand
TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "blocks": (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content | trim }}\n  {% endif %}\n{% endfor "
        "%}\n{{ eos_token }}"
    ),
    "tools": "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}{{ messages | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "arguments": (
        "{{ thinking is defined and thinking }}{{ add_generation_prompt }}{{ messages[0]['content'].split(' ')[-1] }}"
    ),
}


@pytest.fixture(scope="module")
def dtype() -> str:
    return "float32"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("openai") / "model")


@pytest.fixture(scope="module")
def first_model(model_dir: Path) -> Path:
    return model_dir


async def until_unfinished(served: Served, requests: int) -> None:
    """Wait until the engine has this many unfinished requests."""
    async with asyncio.timeout(LIMIT_S):
        await until(
            lambda: served.engine.stats()["running"] + served.engine.stats().get("waiting", 0) == requests,
            every_s=0.005,
        )


SGLANG_CAN = ({"response_format": {"type": "json_object"}}, {"regex": "a+"}, {"frequency_penalty": 0.5})
SGLANGS_OWN = ({"temperature": -1},)
"""Requests that SGLang itself refuses."""


async def asked(served: Served, path: str, body: dict[str, Any]) -> Any:
    status, answer = await served.post(path, body)
    assert status == 200, answer
    return answer


async def events(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    async with served.session.post(served.engine.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        told = (await response.text()).split("\n\n")
    assert told[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in told[:-2]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_transformers_renders_them(name: str, model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tools = (
        [{"type": "function", "function": {"name": "add", "description": "a < b & ü", "parameters": {}}}]
        if name == "tools"
        else None
    )
    wanted = tokenizer.apply_chat_template(
        CHAT, tools=tools, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True, thinking=True
    )
    assert ChatTemplate(TEMPLATES[name], {"eos_token": EOS}).render(CHAT, tools=tools, thinking=True) == wanted


def test_a_template_is_found_where_models_keep_it(tmp_path: Path) -> None:
    config = {
        "eos_token": {"content": "<e>"},
        "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "{{ eos_token }}"}],
    }
    assert ChatTemplate.read(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate.read(tmp_path)
    assert found is not None and found.render([]) == "<e>"
    (tmp_path / "chat_template.jinja").write_text("alone {{ messages | length }}")
    found = ChatTemplate.read(tmp_path)
    assert found is not None and found.render([]) == "alone 0"
    (tmp_path / "chat_template.jinja").write_text("a\n{% for %}")
    with refusal(ValueError, place=str(tmp_path)):
        ChatTemplate.read(tmp_path)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no system') }}", "{{ messages[7].content }}", "{{ ''.__class__.__mro__ }}"]
)
def test_a_chat_that_the_template_rejects_is_a_client_error(source: str) -> None:
    with pytest.raises(BadRequest, match="rejected by the model's chat template"):
        ChatTemplate(source, {}).render(CHAT)


async def test_a_chat_is_its_rendered_text_generated(kind: Kind, model_dir: Path) -> None:
    async with kind.serving(model_dir) as served:
        text = served.engine.text
        assert text is not None
        prompt = text.encode(RENDERED)
        heat = 0.7 if kind.seeds else 0
        whole = await served.generate(
            prompt, max_new_tokens=9, sampling_seed=4, temperature=heat, top_p=0.9, top_k=50, ignore_eos=True
        )
        body = {
            "model": "m",
            "messages": CHAT,
            "max_tokens": 9,
            "seed": 4,
            "temperature": heat,
            "top_p": 0.9,
            "top_k": 50,
            "ignore_eos": True,
        }
        answer = await asked(
            served, "/v1/chat/completions", {**body, "logprobs": True, "return_token_ids": True, "user": "u"}
        )
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": whole["text"]}
        assert (choice["index"], choice["finish_reason"]) == (0, "length")
        assert (answer["object"], answer["model"]) == ("chat.completion", "m")
        assert answer["id"].startswith("chatcmpl-")
        assert {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 9,
            "total_tokens": len(prompt) + 9,
        }
        log_probs = [entry[0] for entry in whole["meta_info"]["output_token_logprobs"]]
        assert choice["token_ids"] == whole["output_ids"]
        np.testing.assert_allclose(choice["token_logprobs"], log_probs, atol=1e-5)
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 9}]
        told = choice["logprobs"]["content"]
        np.testing.assert_allclose([each["logprob"] for each in told], log_probs, atol=1e-5)
        pieces = [text.decode([token], skip_special=False) for token in whole["output_ids"]]
        assert [each["token"] for each in told] == pieces
        assert [each["bytes"] for each in told] == [
            None if "\ufffd" in piece else list(piece.encode()) for piece in pieces
        ]
        parts = [
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            CHAT[1],
        ]
        again = await asked(served, "/v1/chat/completions", {**body, "messages": parts})
        assert again["choices"][0]["message"] == choice["message"]
        assert again["choices"][0]["logprobs"] is None


async def test_completions_take_text_token_ids_and_several_prompts(kind: Kind, model_dir: Path) -> None:
    async with kind.serving(model_dir) as served:
        text = served.engine.text
        assert text is not None
        heat = 1.0 if kind.seeds else 0
        body = {"max_tokens": 6, "seed": 7, "ignore_eos": True, "n": 2, "temperature": heat}
        prompts = ["What is", "The answer"]
        answer = await asked(served, "/v1/completions", {**body, "prompt": prompts, "logprobs": 0})
        assert (answer["object"], answer["model"]) == ("text_completion", "model")
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        for place, choice in enumerate(answer["choices"]):
            params = {"max_new_tokens": 6, "sampling_seed": 7 + place % 2, "ignore_eos": True, "temperature": heat}
            one = await served.generate(text.encode(prompts[place // 2]), **params)
            assert choice["text"] == one["text"]
            told = choice["logprobs"]
            np.testing.assert_allclose(
                told["token_logprobs"], [entry[0] for entry in one["meta_info"]["output_token_logprobs"]], atol=1e-5
            )
            assert told["text_offset"] == [len("".join(told["tokens"][:at])) for at in range(6)]
        num_prompt = sum(len(text.encode(prompt)) for prompt in prompts)
        assert answer["usage"]["prompt_tokens"] == num_prompt, "a prompt counts once, however many responses it has"
        assert answer["usage"]["completion_tokens"] == 24
        as_ids = await asked(served, "/v1/completions", {**body, "prompt": [text.encode(prompt) for prompt in prompts]})
        assert [choice["text"] for choice in as_ids["choices"]] == [choice["text"] for choice in answer["choices"]]
        default = await asked(served, "/v1/completions", {"prompt": "a", "ignore_eos": True})
        assert default["usage"]["completion_tokens"] == 16
        room = await asked(served, "/v1/chat/completions", {"messages": CHAT, "ignore_eos": True})
        assert room["usage"]["total_tokens"] in ((256,) if kind.name == "builtin" else (254, 255, 256)), (
            "a chat may fill the context"
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_adds_up_to_the_whole(kind: Kind, model_dir: Path, path: str) -> None:
    async with kind.serving(model_dir) as served:
        body: dict[str, Any] = {"max_tokens": 40, "seed": 3, "n": 2, "ignore_eos": True, "return_token_ids": True}
        body |= {} if kind.seeds else {"temperature": 0}
        body |= {"messages": CHAT} if "chat" in path else {"prompt": RENDERED}
        whole = await asked(served, path, body)
        told = await events(served, path, {**body, "stream_options": {"include_usage": True}})
        assert told[-1]["choices"] == []
        assert told[-1]["usage"] == whole["usage"] | {
            "prompt_tokens_details": told[-1]["usage"]["prompt_tokens_details"]
        }
        assert {event["object"] for event in told} == {"chat.completion.chunk" if "chat" in path else "text_completion"}
        assert len({event["id"] for event in told}) == 1
        for place in range(2):
            choices = [event["choices"][0] for event in told[:-1] if event["choices"][0]["index"] == place]
            text = "".join(
                choice["delta"].get("content", "") if "chat" in path else choice["text"] for choice in choices
            )
            expected = whole["choices"][place]
            assert text == (expected["message"]["content"] if "chat" in path else expected["text"])
            assert [token for choice in choices for token in choice.get("token_ids", ())] == expected["token_ids"]
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
            if "chat" in path:
                assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        without = await events(served, path, body)
        assert all(event["choices"] for event in without)


async def test_stop_strings_end_a_response_and_are_never_shown(kind: Kind, model_dir: Path) -> None:
    async with kind.serving(model_dir) as served:
        body = {
            "messages": CHAT,
            "max_tokens": 60,
            "seed": 3,
            "ignore_eos": True,
            "temperature": 1.0 if kind.seeds else 0,
        }
        free = (await asked(served, "/v1/chat/completions", body))["choices"][0]["message"]["content"]
        stop = next(free[at : at + 3] for at in range(8, 50) if "\ufffd" not in free[at : at + 3])
        stopped = (await asked(served, "/v1/chat/completions", {**body, "stop": stop}))["choices"][0]
        assert (stopped["message"]["content"], stopped["finish_reason"]) == (free[: free.find(stop)], "stop")
        told = await events(served, "/v1/chat/completions", {**body, "stop": ["never seen", stop]})
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in told) == free[: free.find(stop)]


def test_responses_of_one_seed_have_a_seed_each() -> None:
    """With one seed, a server may give the same response n times."""
    asked = openai_api.parse({"prompt": [[5], [6]], "n": 2, "seed": 7}, chat=False)
    body = asked.generate([[5], [6]], max_context=9)
    assert body["input_ids"] == [[5], [5], [6], [6]]
    assert [(params["n"], params["sampling_seed"]) for params in body["sampling_params"]] == [
        (1, 7),
        (1, 8),
        (1, 7),
        (1, 8),
    ]


def test_formats_become_schemas() -> None:
    def schema(response_format: Any) -> Any:
        asked = openai_api.parse({"prompt": "a", "response_format": response_format}, chat=False)
        return asked.generate([[5]], max_context=9)["sampling_params"].get("json_schema")

    assert [schema(None), schema({"type": "text"}), schema({"type": "json_object"})] == [
        None,
        None,
        '{"type": "object"}',
    ]
    assert (
        schema({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}})
        == '{"type": "boolean"}'
    )
    with refusal(BadRequest, place="response_format", got="{'type': 'json_schema', 'json_schema': {'name': 'a'}}"):
        schema({"type": "json_schema", "json_schema": {"name": "a"}})


def test_text_that_may_be_part_of_a_stop_string_is_held_back() -> None:
    """A part of a character or of a stop string is held back, and sent once it has turned out to be neither."""
    told = ResponseBuilder(
        openai_api.parse({"prompt": "a", "stop": "</end>"}, chat=False), chat_id="i", model="m", created=0, piece=None
    )

    def shown(text: str, finish: str | None = None) -> str:
        meta = {"prompt_tokens": 1, "completion_tokens": 1, "finish_reason": finish and {"type": finish}}
        return "".join(
            part["choices"][0]["text"] for part in told.parts({"text": text, "output_ids": [1], "meta_info": meta})
        )

    assert [shown(text) for text in ("one\ufffd", "oneü <", "oneü </en", "oneü </er", "oneü </er<")] == [
        "one",
        "ü ",
        "",
        "</er",
        "",
    ]
    assert shown("oneü </er</end") == "", "what ends with a stop string's beginning is not told before its end"
    assert shown("oneü </er</ends", "length") == "</ends"


async def test_models_are_named(kind: Kind, model_dir: Path) -> None:
    async with kind.serving(model_dir) as served:
        status, answer = await served.get("/v1/models")
        assert (status, answer["object"], [model["id"] for model in answer["data"]]) == (200, "list", ["model"])


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("chat/completions", {"messages": None}, "messages"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "messages[0]"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ("chat/completions", {"max_tokns": 3}, "max_tokns"),
        ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("chat/completions", {"response_format": {"type": "structural_tag"}}, "response_format"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("completions", {"regex": "a+"}, "regex"),
        ("chat/completions", {"temperature": -1}, "temperature"),
        ("chat/completions", {"temperature": "hot"}, "temperature"),
        ("chat/completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("chat/completions", {"n": 0}, "n"),
        ("chat/completions", {"lora_path": "a"}, "lora_path"),
        ("chat/completions", {"stream": "yes"}, "stream"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {"prompt": [299]}, "prompt"),
        ("completions", {"prompt": [[1], [-1]]}, "prompt[1]"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"logprobs": 5}, "logprobs"),
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"stop": [""]}, "stop[0]"),
    ],
)
async def test_refusals_have_openais_shape_and_name_the_parameter(
    kind: Kind, model_dir: Path, path: str, change: dict[str, Any], param: str
) -> None:
    if kind.name == "sglang" and change in SGLANG_CAN:
        inapplicable("SGLang can")
    async with kind.serving(model_dir) as served:
        body = {"messages": CHAT} if "chat" in path else {"prompt": "a"}
        status, answer = await served.post(f"/v1/{path}", {**body, **change})
        assert status == 400, answer
        error = answer["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", 400), answer
        if kind.name == "sglang" and change in SGLANGS_OWN:
            assert param in error["message"], "in SGLang's words"
            return
        assert (error["param"], error["message"].startswith(f"{param}: ")) == (param, True), answer


async def test_an_engine_that_does_not_serve_answers_503_and_a_client_that_disconnects_frees_it(
    kind: Kind, model_dir: Path
) -> None:
    async with kind.serving(model_dir) as served:
        served.engine.phase = "stale"
        status, answer = await served.post("/v1/chat/completions", {"messages": CHAT})
        assert (status, answer["error"]["type"], answer["unavailable"]) == (503, "server_error", "EngineUnavailable")
        served.engine.phase = "serving"
        await served.client.pause("in_place")
        waiting = [
            asyncio.create_task(
                served.post("/v1/chat/completions", {"messages": CHAT, "ignore_eos": True, "stream": streamed})
            )
            for streamed in (False, True)
        ]
        await until_unfinished(served, 2)
        for each in waiting:
            each.cancel()
        await until_unfinished(served, 0)
        await served.client.resume()
