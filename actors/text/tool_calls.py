"""Parser of tool calls: splits generated text into content and calls; and the chat template, whose source shows the
form of its calls.

    tags    <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>      Hermes, Qwen2.5, Qwen3
    json    {"name": "add", "parameters": {"a": 3}}; {...}                     Llama 3.1 and later: nothing but calls

Text that only looks like a call (no JSON, no name, not closed) stays content: nothing is lost.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.actors.errors import BadRequest
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.rewards.model_text import MessageTemplate

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_BETWEEN = re.compile(r"\s*+(?:;\s*+)?")
ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments of a call."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call."""

    name: str
    arguments: str
    """JSON map of the arguments."""
    id: str = ""
    """Id that the model has given it, where its format has one, and results of tools are written with it; empty =
    none."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """Content and calls of a text. While the text grows, both only grow."""

    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""
    """Text in front of the content, which only renderers (``tidemill.actors.text.rendering``) separate from it."""
    malformed: int = 0
    """Number of calls that a renderer could not read; they are content."""


def form_of(template: str) -> str | None:
    """Return the format in which a model with this chat template writes calls: tags | json; None = unknown."""
    if OPENING in template:
        return "tags"
    return "json" if "<|python_tag|>" in template else None


def read(text: str, form: str, *, finished: bool) -> ParsedReply:
    """Return content and calls of a text in a ``form`` of ``form_of``; ``finished``: an unclosed call is content."""
    return _read_tags(text, finished) if form == "tags" else _read_json(text, finished)


def call_of(name: object, arguments: object) -> ToolCall | None:
    """Return the call with these arguments, a map or JSON; None if it is none, or cannot be encoded."""
    try:
        return _encoded(name, json.loads(arguments or "{}") if isinstance(arguments, str) else arguments)
    except (ValueError, TypeError, RecursionError):
        return None


def _read_tags(text: str, finished: bool) -> ParsedReply:
    parts: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while (opening := text.find(OPENING, at)) >= 0:
        _append(parts, text[at:opening], calls)
        closing = text.find(CLOSING, opening)
        if closing < 0:
            _append(parts, text[opening:] if finished else "", calls)
            return _result(parts, calls, finished)
        try:
            call = _call_from(json.loads(text[opening + len(OPENING) : closing]))
        except (ValueError, RecursionError):
            call = None
        at = closing + len(CLOSING)
        if call is None:
            parts.append(text[opening:at])
        else:
            calls.append(call)
            _strip_end(parts)
    _append(parts, text[at:] if finished else text[at : len(text) - _opening_prefix(text[at:])], calls)
    return _result(parts, calls, finished)


def _append(parts: list[str], text: str, calls: list[ToolCall]) -> None:
    """Append text to the content; blanks between calls are no content."""
    parts.append(text.lstrip() if calls and not any(parts) else text)


def _strip_end(parts: list[str]) -> None:
    """Remove blanks at the end of the content."""
    while parts:
        parts[-1] = parts[-1].rstrip()
        if parts[-1]:
            return
        parts.pop()


def _result(parts: list[str], calls: list[ToolCall], finished: bool) -> ParsedReply:
    """Return the result. Blanks at the end are held back while a call may follow, and dropped after one."""
    content = "".join(parts)
    return ParsedReply(content if finished and not calls else content.rstrip(), tuple(calls))


def _opening_prefix(text: str) -> int:
    """Return the number of characters at the end that may become an opening tag."""
    return next((size for size in range(min(len(OPENING) - 1, len(text)), 0, -1) if text.endswith(OPENING[:size])), 0)


def _read_json(text: str, finished: bool) -> ParsedReply:
    if not text.lstrip().startswith("{"):
        return ParsedReply(text if finished or text.strip() else "", ())
    calls = _calls(text) if finished else ()
    return ParsedReply(text if finished and not calls else "", calls)


def _calls(text: str) -> tuple[ToolCall, ...]:
    """Return the calls of a text that has nothing else; none for any other text."""
    decoder, calls, text, at = json.JSONDecoder(), [], text.strip(), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
            call = _call_from(value)
        except (ValueError, RecursionError):
            return ()
        if call is None:
            return ()
        calls.append(call)
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
    return tuple(calls)


def _call_from(value: object) -> ToolCall | None:
    """Return the call, None if it is none.

    Raises ValueError or RecursionError if it cannot be encoded: NaN and Infinity (no JSON, though Python reads them),
    lone surrogates, deep nesting.
    """
    if not isinstance(value, Mapping):
        return None
    return _encoded(value.get("name"), next((value[name] for name in ARGUMENTS if name in value), {}))


def _encoded(name: object, arguments: object) -> ToolCall | None:
    """Return the call, None if it is none. Raises as ``_call_from`` does."""
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return None
    call = ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    f"{call.name}{call.arguments}".encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
    return call


class ChatTemplate(MessageTemplate):
    """The chat template of a model. Thread-safe."""

    def __init__(self, source: str, special: Mapping[str, str], *, tool_use: str = "") -> None:
        super().__init__(source, special, tool_use=tool_use)
        self.form_of_calls = form_of(tool_use or source)
        """Format in which the model writes tool calls (``tidemill.actors.text.tool_calls``); None = unknown."""

    def render(
        self,
        messages: Sequence[JsonMapping],
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        **arguments: object,
    ) -> str:
        """Return the prompt as text. Raises BadRequest when the template refuses the messages."""
        try:
            return super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **arguments)
        except ValueError as error:
            raise BadRequest(str(error)) from error
