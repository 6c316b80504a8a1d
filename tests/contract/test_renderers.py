"""Models with a tool format of their own, through the real gateway: messages that programs receive, and tokens that are
trained.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.check_kit import write_run
from tests.contract import test_anthropic_messages as messages_api
from tests.contract import test_responses_api as responses_api
from tests.episode_kit import Client, stage, task
from tests.reciting_model import write_chains
from tests.refusals import refusal
from tests.tiny_models import EOS, OF_RENDERERS
from tidemill.actors.config import GatewayConfig
from tidemill.actors.episodes.rollouts import open_rollouts
from tidemill.actors.errors import BadRow
from tidemill.actors.rollout_settings import RolloutPrograms
from tidemill.actors.text.rendering import Renderer
from tidemill.actors.text.text import Text
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Sample
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import load

for package in ("renderers", "httpx"):
    pytest.importorskip(package, reason="pip install 'tidemill[renderers]' (make setup installs it)")

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "3 + 4?"}]
THOUGHT = "I have to add."
SAID = {
    "qwen3": [
        "Ċ",
        "<think>",
        f"\n{THOUGHT}",
        "</think>",
        " \n",
        "<tool_call>",
        '{"name":  "add",',
        '"arguments": {"a":3}}',
        "</tool_call>",
        EOS,
    ],
    "glm-4.5": [
        *("<|assistant|>", "<think>", THOUGHT, "</think>", " \n", "<tool_call>", "add", "<arg_key>", "a", "</arg_key>"),
        *("<arg_value>", "3", "</arg_value>", "</tool_call>", "<|observation|>"),
    ],
    "deepseek-v3": [
        *(
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "function",
            "<｜tool▁sep｜>",
            "add\n```json\n",
        ),
        *('{"a":  3}', "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"),
    ],
}
"""Tokens that the model generates for every prompt, behind the last token of one. A template would write the calls with
other ids.
"""
BEHIND_RESULTS = {"deepseek-v3": "<｜tool▁outputs▁end｜>"}
"""Last token of a prompt that ends with the result of a tool, where it is another one."""
THOUGHTS = {"qwen3": THOUGHT, "glm-4.5": THOUGHT}
"""Reasoning in ``SAID``, by family."""
FAMILIES = tuple(SAID)


def model_of(family: str, directory: Path, said: list[str] | None = None) -> Path:
    chain = said or SAID[family]
    own = [piece for piece in chain if len(piece) > 1 and piece != EOS]
    chains = [chain, *([[BEHIND_RESULTS[family], chain[1]]] if family in BEHIND_RESULTS else [])]
    return write_chains(directory, chains, added=list(dict.fromkeys([*OF_RENDERERS[family], *own])), context=4096)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    yield {family: model_of(family, tmp_path_factory.mktemp("models") / family) for family in FAMILIES}


def renderer_of(family: str, directory: Path, **options: object) -> Renderer:
    text = Text.read(directory)
    assert text is not None
    return Renderer.read(family, options, directory, text)


async def asked(
    client: Client, messages: list[Any], *, streamed: bool = False, **more: Any
) -> tuple[dict[str, Any], str, Any]:
    """Return the message, the finish reason, and the answer, which is empty for a stream."""
    body = {"messages": messages, "tools": [ADD], "return_token_ids": True, **more}
    if not streamed:
        status, answer = await client.post("/v1/chat/completions", body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        return choice["message"], choice["finish_reason"], answer
    message: dict[str, Any] = {"role": "assistant", "content": None}
    finish = ""
    async with client.session.post(client.root + "/v1/chat/completions", json=body | {"stream": True}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                for name in ("content", "reasoning_content"):
                    if choice["delta"].get(name):
                        message[name] = (message.get(name) or "") + choice["delta"][name]
                for call in choice["delta"].get("tool_calls", ()):
                    assert call.pop("index") == len(message.setdefault("tool_calls", []))
                    message["tool_calls"].append(call)
                finish = choice["finish_reason"] or finish
    return message, finish, None


def result_of(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "seven"}


async def played(family: str, directory: Path, program: Any, **options: Any) -> Sample:
    async with stage(directory, program, renderer=renderer_of(family, directory, **options)) as scene:
        sample = (await scene.rollout.sample(task(max_new_tokens=40), 0, "n")).sample
    check_sample(sample)
    return sample


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keeps_reasoning", [True, False])
async def test_the_second_turn_begins_with_the_very_ids_of_the_first(
    family: str, models: dict[str, Path], keeps_reasoning: bool
) -> None:
    answers: list[Any] = []

    async def program(client: Client) -> float:
        message, finish, answer = await asked(client, ASKED)
        (call,) = message["tool_calls"]
        assert (message["role"], message["content"], message.get("reasoning_content")) == (
            "assistant",
            None,
            THOUGHTS.get(family),
        )
        assert (call["function"]["name"], json.loads(call["function"]["arguments"]), finish) == (
            "add",
            {"a": 3},
            "tool_calls",
        )
        kept = (
            message
            if keeps_reasoning
            else {name: value for name, value in message.items() if name != "reasoning_content"}
        )
        answers.extend([answer, (await asked(client, [*ASKED, kept, result_of(message)]))[2]])
        return 1.0

    sample = await played(family, models[family], program)
    tokenizer = Tokenizer.from_file(str(models[family] / "tokenizer.json"))
    said = [tokenizer.token_to_id(piece) for piece in SAID[family][1:]]
    first, second = answers
    assert [each["choices"][0]["token_ids"] for each in answers] == [said, said], (
        "the model's stop token ends a response"
    )
    begin = [*first["prompt_token_ids"], *said]
    assert second["prompt_token_ids"][: len(begin)] == begin
    between = second["prompt_token_ids"][len(begin) :]
    assert "seven" in tokenizer.decode(between) and len(between) > 5
    assert sample.tokens.tolist() == [*begin, *between, *said], "one sequence"
    assert sample.loss_mask.tolist() == [1] * len(said) + [0] * len(between) + [1] * len(said), (
        "all that was sampled, and nothing else"
    )
    assert not sample.rollout_log_probs[sample.loss_mask == 0].any()
    assert "malformed_calls" not in sample.metadata


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_stream_ends_with_reasoning_and_calls(family: str, models: dict[str, Path]) -> None:
    async def program(client: Client) -> float:
        message, finish, _ = await asked(client, ASKED, streamed=True)
        whole = (await asked(client, ASKED))[0]
        for each in (message, whole):
            each["tool_calls"][0].pop("id")
        assert (message, finish) == (whole, "tool_calls")
        message, _, _ = await asked(client, ASKED, streamed=True)
        await asked(client, [*ASKED, message, result_of(message)], streamed=True)
        return 1.0

    sample = await played(family, models[family], program)
    assert sample.turns is not None and len(sample.turns.at) == 4
    assert len(sample.sizes) == 3, "the last turn goes on with the third"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_other_apis_go_on_with_the_very_ids(models: dict[str, Path], path: str) -> None:
    async def of_messages(client: Client) -> float:
        ask = {"max_tokens": 40, "tools": [{"name": "add", "input_schema": ADD["function"]["parameters"]}]}
        status, answer = await client.post(path, {**ask, "messages": ASKED})
        (call,) = answer["content"]
        assert (status, call["type"], call["name"], call["input"], answer["stop_reason"]) == (
            200,
            "tool_use",
            "add",
            {"a": 3},
            "tool_use",
        )
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "seven"}]}
        assert (
            await client.post(path, {**ask, "messages": [*ASKED, {"role": "assistant", "content": [call]}, result]})
        )[0] == 200
        return 1.0

    async def of_responses(client: Client) -> float:
        ask = {"tools": [{"type": "function", **ADD["function"]}]}
        status, answer = await client.post(path, {**ask, "input": ASKED})
        thought, call = answer["output"]
        assert (status, thought["type"], thought["content"]) == (
            200,
            "reasoning",
            [{"type": "reasoning_text", "text": THOUGHT}],
        )
        assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 3})
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "seven"}
        assert (await client.post(path, {**ask, "input": [*ASKED, call, result]}))[0] == 200
        return 1.0

    sample = await played("qwen3", models["qwen3"], of_messages if path == "/v1/messages" else of_responses)
    assert sample.turns is not None and len(sample.turns.at) == 2 and len(sample.sizes) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_is_delivered_to_the_clients_of_other_apis_and_comes_back(
    models: dict[str, Path], streamed: bool
) -> None:
    async def program(client: Client) -> float:
        async with messages_api.client_of(client.root, client.api_key) as anthropic:
            story = await messages_api.said(
                anthropic, ASKED, streamed=streamed, thinking={"type": "enabled", "budget_tokens": 1024}
            )
            thought, call = [block.model_dump(exclude_none=True) for block in story.content]
            assert (thought["type"], thought["thinking"], call["type"]) == ("thinking", THOUGHT, "tool_use")
            result = {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "seven"}],
            }
            await messages_api.said(
                anthropic, [*ASKED, {"role": "assistant", "content": [thought, call]}, result], streamed=streamed
            )
        async with responses_api.client_of(client.base_url, client.api_key) as openai:
            response = await responses_api.said(openai, ASKED, streamed=streamed)
            assert [item.type for item in response.output] == ["reasoning", "function_call"]
            assert response.output[0].content[0].text == THOUGHT
            kept = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            result = {"type": "function_call_output", "call_id": kept[1]["call_id"], "output": "seven"}
            await responses_api.said(openai, [*ASKED, *kept, result], streamed=streamed)
        return 1.0

    sample = await played("qwen3", models["qwen3"], program)
    assert sample.turns is not None and len(sample.turns.at) == 4 and len(sample.sizes) == 2


async def test_a_conversation_is_found_by_its_messages(models: dict[str, Path]) -> None:
    """``/retrieve_from_text`` gives the sampled tokens of a conversation that the gateway has rendered."""

    async def program(client: Client) -> float:
        message, _, answer = await asked(client, ASKED)
        status, found = await client.post("/retrieve_from_text", {"messages": [*ASKED, message], "tools": [ADD]})
        said = answer["choices"][0]["token_ids"]
        assert status == 200 and found["tokens"] == [*answer["prompt_token_ids"], *said]
        assert found["loss_mask"] == [0] * len(answer["prompt_token_ids"]) + [1] * len(said)
        assert THOUGHT in found["response"] and "3 + 4?" in found["response"]
        return 1.0

    await played("qwen3", models["qwen3"], program)


async def test_a_call_has_the_id_that_the_model_has_given_it(tmp_path: Path) -> None:
    """Kimi K2 writes the results of tools with it."""
    call = ["<|tool_call_begin|>", "functions.add:0", "<|tool_call_argument_begin|>", '{"a":  3}', "<|tool_call_end|>"]
    said = ["<|im_middle|>", "Now ", "<|tool_calls_section_begin|>", *call, "<|tool_calls_section_end|>", EOS]
    ids: list[Any] = []

    async def program(client: Client) -> float:
        message, _, answer = await asked(client, ASKED)
        assert [each["id"] for each in message["tool_calls"]] == ["functions.add:0"]
        further = (await asked(client, [*ASKED, message, result_of(message)]))[2]
        ids.extend(further["prompt_token_ids"][len(answer["prompt_token_ids"]) + len(said) - 1 :])
        return 1.0

    directory = model_of("kimi-k2", tmp_path / "model", said)
    sample = await played("kimi-k2", directory, program)
    assert len(sample.sizes) == 1
    assert "## Return of functions.add:0\nseven" in Tokenizer.from_file(str(directory / "tokenizer.json")).decode(ids)


async def test_each_of_several_answers_can_be_gone_on_with(models: dict[str, Path]) -> None:
    async def program(client: Client) -> float:
        _, answer = await client.post(
            "/v1/chat/completions", {"messages": ASKED, "tools": [ADD], "n": 2, "return_token_ids": True}
        )
        messages = [choice["message"] for choice in answer["choices"]]
        assert len({message["tool_calls"][0]["id"] for message in messages}) == 2
        for message, choice in zip(messages, answer["choices"], strict=True):
            begin = [*answer["prompt_token_ids"], *choice["token_ids"]]
            further = (await asked(client, [*ASKED, message, result_of(message)]))[2]
            assert further["prompt_token_ids"][: len(begin)] == begin
        return 1.0

    await played("qwen3", models["qwen3"], program)


async def test_what_a_client_changes_is_rendered_as_changed(models: dict[str, Path]) -> None:
    prompts: list[list[int]] = []

    async def program(client: Client) -> float:
        message, _, _ = await asked(client, ASKED)
        for change in ({"reasoning_content": "Other."}, {"content": "other"}, {"tool_calls": None}):
            answer = (await asked(client, [*ASKED, {**message, **change}, result_of(message)]))[2]
            prompts.append(answer["prompt_token_ids"])
        multiply = {"type": "function", "function": {"name": "multiply"}}
        answer = (await asked(client, [*ASKED, message, result_of(message)], tools=[ADD, multiply]))[2]
        prompts.append(answer["prompt_token_ids"])
        return 1.0

    await played("qwen3", models["qwen3"], program)
    tokenizer = Tokenizer.from_file(str(models["qwen3"] / "tokenizer.json"))
    texts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
    assert "\nOther.\n</think>" in texts[0] and THOUGHT not in texts[0]
    assert f"{THOUGHT}\n</think>\n\nother\n<tool_call>" in texts[1]
    assert texts[2].count("<tool_call>") == texts[0].count("<tool_call>") - 1
    assert "multiply" in texts[3]


async def test_a_new_question_leaves_out_the_reasoning_unless_it_is_retained(models: dict[str, Path]) -> None:
    async def program(client: Client) -> float:
        message, _, _ = await asked(client, ASKED)
        await asked(client, [*ASKED, message, result_of(message), {"role": "user", "content": "Sure?"}])
        return 1.0

    assert len((await played("qwen3", models["qwen3"], program)).sizes) == 2, "as the model's template does"
    assert len((await played("qwen3", models["qwen3"], program, thinking_retention="all")).sizes) == 1


async def test_a_malformed_call_is_text_and_counted(tmp_path: Path) -> None:
    said = ["Ċ", "<think>", "hm", "</think>", " \n", "Now", "<tool_call>", '{"name": ', "</tool_call>", EOS]

    async def program(client: Client) -> float:
        message, finish, _ = await asked(client, ASKED)
        assert message == {
            "role": "assistant",
            "content": 'Now\n<tool_call>{"name": </tool_call>',
            "reasoning_content": "hm",
        }
        assert finish == "stop"
        return 1.0

    sample = await played("qwen3", model_of("qwen3", tmp_path / "model", said), program)
    assert sample.metadata["malformed_calls"] == 1


async def test_without_tools_calls_are_text(models: dict[str, Path]) -> None:
    async def program(client: Client) -> float:
        message, finish, _ = await asked(client, ASKED, tools=None)
        assert (message["content"], finish) == ('<tool_call>{"name":  "add","arguments": {"a":3}}</tool_call>', "stop")
        assert "tool_calls" not in message
        return 1.0

    assert "malformed_calls" not in (await played("qwen3", models["qwen3"], program)).metadata


async def test_requests_may_name_arguments_of_the_renderer_and_stops(models: dict[str, Path]) -> None:
    async def program(client: Client) -> float:
        off = (await asked(client, ASKED, chat_template_kwargs={"enable_thinking": False}))[2]
        on = (await asked(client, ASKED))[2]
        assert len(off["prompt_token_ids"]) > len(on["prompt_token_ids"])
        for wrong in (
            {"chat_template_kwargs": {"no_such": 1}},
            {"messages": [{"role": "observer", "content": "x"}]},
            {"tools": 3},
        ):
            status, refused = await client.post("/v1/chat/completions", {"messages": ASKED} | wrong)
            assert status == 400 and refused["error"]["param"] in (
                "chat_template_kwargs",
                "messages[0].role",
                "tools",
            ), refused
        message, finish, _ = await asked(client, ASKED, stop=[" to add"])
        assert (message, finish) == ({"role": "assistant", "content": "", "reasoning_content": "\nI have"}, "stop")
        message, finish, _ = await asked(client, ASKED, stop=['"add"'])
        assert (message["content"], message["reasoning_content"], finish) == ('<tool_call>{"name":  ', THOUGHT, "stop")
        return 1.0

    await played("qwen3", models["qwen3"], program)


def test_the_check_of_a_run_makes_the_renderer(models: dict[str, Path], tmp_path: Path) -> None:
    def found(renderer: str, *settings: str) -> list[tuple[str, str]]:
        file = write_run(tmp_path)
        report = check(
            load(file, [f"model.path={models['qwen3']}", f"actor.gateway.renderer={renderer}", *settings]), Purpose()
        )
        return [(one.level, one.text) for one in report.findings if "renderer" in one.text]

    assert found("qwen3") == [("ok", "renderer: qwen3, its responses end with <|im_end|> <|endoftext|>")]
    ((level, text),) = found("glm-4.5")
    assert level == "error" and text.startswith(
        "--set: actor.gateway.renderer: want a tokenizer with the special tokens of glm-4.5, got "
    )
    ((level, text),) = found("qwen3", "actor.gateway.renderer_options={no_such: 1}")
    assert level == "error" and "actor.gateway.renderer_options: want fields of" in text
    _, (level, text) = found("qwen3", "actor.gateway.renderer_options={enable_thinking: false}")
    assert level == "warning" and "got '<think>\\n\\n</think>\\n\\n' instead of '' behind '<|im_start|>user" in text
    held = f"{{held: {{path: {tmp_path / 'held.jsonl'}, chat_template_args: {{no_such: 1}}}}}}"
    (level, text), _ = found("qwen3", "eval.every=1", f"eval.sets={held}")
    assert level == "error" and "eval.sets.held.chat_template_args: want arguments that the renderer qwen3 has" in text
    (level, text), _ = found("qwen3", "data.chat_template_args={no_such: 1}")
    assert (
        level == "error"
        and "data.chat_template_args: want arguments that the renderer qwen3 has, got chat_template_kwargs: " in text
    )
    assert [level for level, _ in found("qwen3", "data.chat_template_args={enable_thinking: true}")] == ["ok"]
    of_deepseek = found("deepseek-v3", f"model.path={models['deepseek-v3']}")
    assert [level for level, text in of_deepseek if "want a renderer that writes the tools of a request" in text] == [
        "warning"
    ]


async def test_an_actor_refuses_a_renderer_that_does_not_fit(models: dict[str, Path]) -> None:
    async def none(client: Client) -> None:
        raise AssertionError("nothing is played")

    directory = models["qwen3"]
    async with stage(directory, none) as scene:
        with refusal(
            BadRow, place="actor.gateway.renderer", got="Special token '[gMASK]' not found in tokenizer vocabulary"
        ):
            programs = RolloutPrograms(rollouts={}, model=str(directory))
            async with open_rollouts(programs, scene.responses, gateway_config=GatewayConfig(renderer="glm-4.5")):
                pass
