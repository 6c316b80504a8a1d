"""Random conversations, each written in two ways that mean the same, and the token ids that every part of the program
makes of them.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tidemill.actors.openai import openai_api
from tidemill.actors.router.exchange import Answer, Request
from tidemill.actors.router.token_history import ModelText, TokenHistory
from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.data import Source
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.responses import RecordedResponse, RecordedRow, Recordings, prompt_tokens
from tidemill.learner.prompts.rows import PromptRow, row_in
from tidemill.learner.prompts.tokenizer import Tokenize, model_tokenizer

TEXTS = st.sampled_from(["", "seven", "über 八 😀", " a\n\nb ", '{"x": 1}', "<tool_call>", "é'\"\\"]) | st.text(
    max_size=12
)
WORDS = st.sampled_from(["What is 3 + 4?", "Œuvre: 八 😀", "go on"])
NAMES = st.sampled_from(["add", "look_up"])
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-9, 2**60)
    | st.sampled_from([0.5, "ü", 'a"b', "", ["x", {"y": 1}], {"z": None}])
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "größe", "a b"]), VALUES, max_size=3)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <ü>.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
WAYS = ("row", "before an answer", "engine", "router", "gateway")
"""Ways on which a conversation becomes token ids."""


@dataclass
class Conversation:
    """Messages in the form that templates read, and the same as clients and files have them."""

    plain: list[JsonObject] = field(default_factory=list)
    written: list[JsonObject] = field(default_factory=list)


@st.composite
def conversations(draw: st.DrawFn, *, most_calls: int = 3, with_text: bool = True) -> Conversation:
    """Draw a conversation that ends with a message of the user or of a tool. ``with_text``: calls may have content
    beside them.
    """
    talk = Conversation()
    if draw(st.booleans()):
        add(draw, talk, {"role": "system", "content": draw(WORDS)})
    for number in range(draw(st.integers(1, 3))):
        add(draw, talk, {"role": "user", "content": draw(WORDS)})
        if number and draw(st.booleans()):
            continue
        count = draw(st.integers(0, most_calls))
        names = [draw(NAMES) for _ in range(count)]
        calls = [
            {
                "id": f"call{number:04}{place}",
                "type": "function",
                "function": {"name": name, "arguments": draw(ARGUMENTS)},
            }
            for place, name in enumerate(names)
        ]
        said = draw(TEXTS) if with_text or not calls else ""
        add(draw, talk, {"role": "assistant", "content": said, **({"tool_calls": calls} if calls else {})})
        for call in draw(st.permutations(calls)):
            result = {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": draw(TEXTS),
            }
            add(draw, talk, result)
    if talk.plain[-1]["role"] == "assistant":
        add(draw, talk, {"role": "user", "content": draw(WORDS)})
    return talk


def add(draw: st.DrawFn, talk: Conversation, message: JsonObject) -> None:
    """Add a message, and another notation of it."""
    talk.plain.append(message)
    other = dict(message)
    content = message["content"]
    if message["role"] == "assistant" and not content and draw(st.booleans()):
        other["content"] = None
        if message.get("tool_calls") and draw(st.booleans()):
            del other["content"]
    elif draw(st.booleans()):
        cut = draw(st.integers(0, len(content)))
        other["content"] = [{"type": "text", "text": part} for part in (content[:cut], content[cut:])]
    elif message["role"] == "assistant" and draw(st.booleans()):
        other |= {"content": None, "refusal": content}
    if message["role"] == "system" and draw(st.booleans()):
        other["role"] = "developer"
    if "name" in message and draw(st.booleans()):
        del other["name"]
    if "tool_calls" in message:
        other["tool_calls"] = [as_text(call) if draw(st.booleans()) else call for call in message["tool_calls"]]
    elif message["role"] == "assistant" and draw(st.booleans()):
        other["tool_calls"] = draw(st.sampled_from([None, []]))
    for name in draw(
        st.sets(st.sampled_from(["refusal", "function_call", "audio", "reasoning_content", "weight", "name"]))
    ):
        other.setdefault(name, None)
    talk.written.append(dict(sorted(other.items())) if draw(st.booleans()) else other)


def as_text(call: JsonObject) -> JsonObject:
    """Return a call with its arguments as JSON text, as in OpenAI's API."""
    function = call["function"]
    return {
        **call,
        "function": {
            **function,
            "arguments": json.dumps(function["arguments"], ensure_ascii=bool(function["arguments"])),
        },
    }


def in_openais_form(message: JsonObject, *, empty: str | None) -> JsonObject:
    """Return a message with the arguments of its calls as JSON text, as some templates want them, and ``empty`` in
    place of no content.
    """
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


class Paths:
    """All ways on which a conversation becomes token ids."""

    def __init__(self, directory: Path, template_args: JsonObject | None = None) -> None:
        self.args = template_args or {}
        self.model = ModelText.read(str(directory), "model.path")
        self.tokenize: Tokenize = model_tokenizer(str(directory), template_args=self.args)
        self._recordings = Recordings(
            self.tokenize, rollouts=("answers",), end_ids=self.model.text.eos_ids, max_tokens=1 << 20
        )

    def ids(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> dict[str, list[int] | None]:
        """Return the ids by way; None = the chat template refuses the messages."""
        row, body = self.row(messages, tools), self.body(messages, tools)
        ways: tuple[Callable[[], Sequence[int]], ...] = (
            lambda: self._prompt_ids(row()),
            lambda: self._before_an_answer(row()),
            lambda: openai_api.prompt_ids(openai_api.parse(body, chat=True), self.model.text, self.model.template)[0],
            lambda: asyncio.run(self.sent(body, TokenHistory(self.model))),
            lambda: asyncio.run(
                self.sent({**body, "chat_template_kwargs": {}}, TokenHistory(self.model, template_args=self.args))
            ),
        )
        found: dict[str, list[int] | None] = {}
        for name, path in zip(WAYS, ways, strict=True):
            try:
                found[name] = list(path())
            except ValueError as error:  # of rows PromptError, of servers BadRequest
                if "chat template" not in str(error):
                    raise
                found[name] = None
        return found

    def row(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> Any:
        values = json.loads(json.dumps({"prompt": messages, "label": None, "tools": tools}))
        source = Source(path=Path("rows.jsonl"), tools_key="tools" if tools else "")
        return lambda: row_in(source, 0, values)

    def body(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> JsonObject:
        body = {"messages": messages, "chat_template_kwargs": self.args, **({"tools": tools} if tools else {})}
        made: JsonObject = json.loads(json.dumps(body))
        return made

    def _prompt_ids(self, row: PromptRow) -> Sequence[int]:
        return prompt_tokens(self.tokenize, row.prompt, row.tools)

    def _before_an_answer(self, row: PromptRow) -> list[int]:
        """Return the prompt's ids of a written answer."""
        responses = (RecordedResponse(text="seven"),)
        answered = RecordedRow(prompt=row.prompt, tools=row.tools, where=row.where, responses=responses)
        (sequence,) = self._recordings.sequences(answered)
        return [int(token) for token in sequence.prompt_tokens]

    async def sent(self, body: JsonObject, history: TokenHistory) -> list[int]:
        """Return the ids that an engine gets for a chat. Raises PromptError for a chat that is refused."""
        seen: list[JsonObject] = []

        async def engine(request: Request) -> Answer:
            seen.append(request.json())
            return Answer.of(503, openai_api.error("none", 503))

        request = Request(
            method="POST", path="/v1/chat/completions", headers={}, body=json.dumps({**body, "max_tokens": 1}).encode()
        )
        async with await history(request, engine) as answer:
            if not seen:
                raise PromptError("chat", "an answer", (await answer.read()).decode())
        ids: list[int] = seen[0]["input_ids"]
        return ids
