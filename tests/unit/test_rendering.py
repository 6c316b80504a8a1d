"""Renderers without an engine: hostile output of a model, hostile messages of a program, names, and the memory of
chats.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from tests.examples import examples
from tests.refusals import refusal
from tests.tiny_models import EOS, OF_RENDERERS, write_tiny_tokenizer
from tidemill.actors.errors import BadRequest, NoRenderer
from tidemill.actors.openai.openai_api import parse
from tidemill.actors.router.chats import AskedChat, RenderedChats
from tidemill.actors.text.rendering import Renderer
from tidemill.actors.text.text import Text

for package in ("renderers", "httpx"):
    pytest.importorskip(package, reason="pip install 'tidemill[renderers]' (make setup installs it)")

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "3 + 4?"}]


def write_tokenizer(family: str, directory: Path) -> Path:
    write_tiny_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in OF_RENDERERS[family]])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Renderer, Text]]]:
    found = {}
    for family in OF_RENDERERS:
        directory = write_tokenizer(family, tmp_path_factory.mktemp("tokenizers") / family)
        text = Text.read(directory)
        assert text is not None
        found[family] = Renderer.read(family, {}, directory, text), text
    yield found


PIECES = [
    "{",
    "}",
    '"name"',
    '"arguments"',
    ":",
    '"add"',
    "NaN",
    '"\\ud800"',
    "[" * 2000,
    "9" * 5000,
    "\n",
    "a",
    "\ud7ff",
]


@settings(max_examples=examples(200))
@given(data=st.data())
@pytest.mark.parametrize("family", sorted(OF_RENDERERS))
def test_whatever_a_model_says_is_a_reply(
    family: str, rendered: dict[str, tuple[Renderer, Text]], data: st.DataObject
) -> None:
    renderer, text = rendered[family]
    special = [text.id_of(token) for token in (*OF_RENDERERS[family], EOS)]
    anything = st.integers(0, text.vocab_size - 1).map(lambda one: [one])
    parts = data.draw(
        st.lists(
            st.sampled_from(special).map(lambda one: [one]) | st.sampled_from(PIECES).map(text.encode) | anything,
            max_size=20,
        )
    )
    ids = [token for part in parts for token in part]
    arguments = {"tools": data.draw(st.sampled_from([None, [ADD]])), "add_generation_prompt": True}
    prompt = renderer.prompt(ASKED, arguments)
    reply = renderer.read_reply(text.decode(ids), ids, prompt, arguments)
    for call in reply.calls:
        assert isinstance(json.loads(call.arguments), dict)
    f"{reply.content}{reply.reasoning}{reply.calls}".encode()
    assert arguments["tools"] or not reply.calls
    following = renderer.next_prompt(
        prompt, ids, [{"role": "tool", "tool_call_id": "1", "content": "seven"}], arguments
    )
    assert following is None or following[: len(prompt) + len(ids)] == [*prompt, *ids]


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**33) | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["function", "name", "arguments", "type", "id"]), inner)
    ),
    max_leaves=5,
)
CALLS = st.fixed_dictionaries(
    {"id": VALUES, "function": st.fixed_dictionaries({"name": st.text(max_size=3), "arguments": VALUES})}
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
        "content": st.none() | st.text(max_size=5),
    },
    optional={name: VALUES for name in ("name", "tool_call_id", "reasoning_content")}
    | {"tool_calls": st.lists(CALLS, max_size=2) | VALUES},
)


@settings(max_examples=examples(200))
@given(
    messages=st.lists(MESSAGES, min_size=1, max_size=4),
    more=st.fixed_dictionaries(
        {}, optional={"tools": st.just([ADD]) | VALUES, "chat_template_kwargs": VALUES, "stop_token_ids": VALUES}
    ),
    generation=st.booleans(),
)
@pytest.mark.parametrize("family", sorted(OF_RENDERERS))
def test_whatever_a_program_sends_is_rendered_or_refused(
    family: str, rendered: dict[str, tuple[Renderer, Text]], messages: list[Any], more: dict[str, Any], generation: bool
) -> None:
    renderer, text = rendered[family]
    chats = RenderedChats(renderer, 1000)
    said = text.encode("hm</think>ok")
    meta = {"output_token_logprobs": [[-1.0, token, None] for token in said], "finish_reason": {"type": "stop"}}
    answer = {"text": "ok", "output_ids": said, "meta_info": meta}
    try:
        for story in (messages, [*messages, {"role": "assistant", "content": "ok"}, {"role": "tool", "content": "x"}]):
            parsed = parse({"messages": story, "add_generation_prompt": generation, **more}, chat=True).stopping_at(
                chats.stop_token_ids
            )
            asked_chat = asyncio.run(chats.ask(parsed, ""))
            assert asked_chat.ids and all(
                isinstance(token, int) and 0 <= token < text.vocab_size for token in asked_chat.ids
            )
            chats.remember(asked_chat, answer, {"role": "assistant", "content": "ok"})
    except BadRequest:
        pass


def answer_of(text: Text, thought: str) -> dict[str, Any]:
    """Return an engine's answer "ok" behind a thought."""
    ids = [*text.encode(f"<think>\n\n{thought}</think>ok"), *text.encode(EOS)]
    meta = {"output_token_logprobs": [[-1.0, token, None] for token in ids], "finish_reason": {"type": "stop"}}
    return {"text": "ok", "output_ids": ids, "meta_info": meta}


def remember(chats: RenderedChats, text: Text, story: list[Any], thought: str) -> list[int]:
    """Answer a chat, and return the ids of its prompt and answer."""
    asked, answer = asyncio.run(chats.ask(parse({"messages": story}, chat=True), "")), answer_of(text, thought)
    chats.remember(asked, answer, {"role": "assistant", "content": "ok", "reasoning_content": thought})
    return [*asked.ids, *answer["output_ids"]]


def further(chats: RenderedChats, story: list[Any], **reasoning: Any) -> AskedChat:
    """Return the chat that goes on behind a result."""
    more = [{"role": "assistant", "content": "ok", **reasoning}, {"role": "tool", "content": "x"}]
    return asyncio.run(chats.ask(parse({"messages": [*story, *more]}, chat=True), ""))


def test_answers_that_differ_in_their_reasoning_are_told_apart(rendered: dict[str, tuple[Renderer, Text]]) -> None:
    renderer, text = rendered["qwen3"]
    chats = RenderedChats(renderer, 10_000)
    first, second = (remember(chats, text, ASKED, thought) for thought in ("hm", "ah"))
    assert further(chats, ASKED, reasoning_content="hm").ids[: len(first)] == first
    assert further(chats, ASKED, reasoning_content="ah").ids[: len(second)] == second
    assert further(chats, ASKED).ids[: len(second)] == second, "the newest, where the client has left it out"
    assert further(chats, ASKED, reasoning_content="oh").num_known == 0
    again = remember(chats, text, ASKED, "hm")
    assert further(chats, ASKED).ids[: len(again)] == again == first


def test_the_memory_of_chats_is_bounded(rendered: dict[str, tuple[Renderer, Text]]) -> None:
    renderer, text = rendered["qwen3"]
    stories = [[{"role": "user", "content": f"{number}?"}] for number in range(3)]

    def found(max_tokens: int) -> list[bool]:
        """Return which of three chats go on with the ids that were sampled."""
        chats = RenderedChats(renderer, max_tokens)
        for story in stories:
            remember(chats, text, story, "hm")
            remember(chats, text, story, "hm")
        return [further(chats, story).num_known > 0 for story in stories]

    one = len(remember(RenderedChats(renderer, 0), text, stories[0], "hm"))
    assert [found(count * one) for count in (3, 2, 1)] == [
        [True, True, True],
        [False, True, True],
        [False, False, True],
    ]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": ' + "[" * 5000,
        '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": 3, "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": "add", "arguments": 3}',
        "[]",
    ],
)
def test_calls_that_cannot_be_passed_on_are_text(rendered: dict[str, tuple[Renderer, Text]], call: str) -> None:
    renderer, text = rendered["qwen3"]
    ids = text.encode(f"<think>\nhm\n</think>\n<tool_call>{call}</tool_call>")
    reply = renderer.read_reply(text.decode(ids), ids, [], {"tools": [ADD]})
    assert not reply.calls and reply.malformed == 1 and call in reply.content


def test_a_renderer_that_cannot_be_used_is_refused(rendered: dict[str, tuple[Renderer, Text]], tmp_path: Path) -> None:
    _, text = rendered["qwen3"]

    def refused(name: str, directory: Path = tmp_path, **options: object) -> str:
        with pytest.raises(NoRenderer) as found:
            Renderer.read(name, options, directory, text)
        return str(found.value)

    assert "'qwen33'; fix the name" in refused("qwen33") and "glm-4.5" in refused("qwen33")
    assert "special token" in refused("glm-4.5") and "[gMASK]" in refused("glm-4.5")
    assert "want the vocabulary of gpt-oss, got another one" in refused(
        "gpt-oss", write_tokenizer("qwen3", tmp_path / "other")
    )
    assert "leave the setting empty" in refused("default")
    assert "OWNER/NAME" in refused("auto")
    assert refused("qwen3", no_such=1).startswith(
        "renderer_options: want fields of renderers.Qwen3RendererConfig, got "
    )


def test_calls_of_one_response_have_ids_of_their_own(rendered: dict[str, tuple[Renderer, Text]]) -> None:
    renderer, text = rendered["kimi-k2"]
    call = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    ids = text.encode(f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>")
    assert [each.id for each in renderer.read_reply("", ids, [], {"tools": [ADD]}).calls] == ["functions.add:0", ""]


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "models--Qwen--Qwen3-8B/snapshots/0123"])
def test_auto_is_the_renderer_of_the_public_name(
    rendered: dict[str, tuple[Renderer, Text]], tmp_path: Path, path: str
) -> None:
    assert Renderer.read("auto", {}, tmp_path / path, rendered["qwen3"][1]).name == "qwen3"


def test_messages_that_a_renderer_cannot_take_are_a_bad_request(rendered: dict[str, tuple[Renderer, Text]]) -> None:
    renderer, _ = rendered["deepseek-v3"]
    with refusal(BadRequest, place="messages", reason=re.compile("deepseek-v3")):
        renderer.prompt([{"role": "assistant", "content": "", "tool_calls": [3]}], {})
    with refusal(BadRequest, place=re.compile("^messages: .*: text$"), reason=re.compile(r"\\ud800")):
        renderer.prompt([{"role": "user", "content": "\ud800"}], {})
