"""Chat messages and tools in one form: of rows, of requests of every API, and of environments. Knows no template and no
transport.

    role developer                            ->  system
    content null, or text parts               ->  a text
    arguments of calls as JSON text           ->  a map
    results with the id of their call alone   ->  with the tool's name, too
    tools with their name on top              ->  {"type": "function", "function": {"name": ..., ...}}

Chat templates and renderers read this form alone, so that the same messages and tools have the same tokens wherever
they come from.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonMapping, JsonObject, with_whole_characters

ASSISTANT, TOOL = "assistant", "tool"
ROLES = {"developer": "system"}  # Role in OpenAI's API -> the role that chat templates have for it; other roles stay
# Type of a content part -> its field with the text
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Keys of messages whose content may be null, by role; a message has one of them at least
WITHOUT_CONTENT = {
    ASSISTANT: frozenset(("content", "tool_calls", "refusal", "reasoning_content")),
    TOOL: frozenset(("content",)),
}
REFUSED = {
    "function_call": "tool_calls, which have replaced it",
    "audio": "text alone, which is all that the model reads",
}


def chat_messages(value: object, where: str = "messages") -> list[JsonObject]:
    """Return messages in the one form. Raises WireError, which names the message and its field.

    Contents are texts: text parts are joined, null is empty. Arguments of calls are maps. Fields that are null are left
    out, unknown ones stay. The result of a tool has the tool's name, if its call is among the messages.
    """
    if not isinstance(value, list | tuple) or not value:
        raise WireError(where, "a list of at least one message", _short(value))
    return _with_names([_message(message, f"{where}[{place}]") for place, message in enumerate(value)])


def chat_tools(value: object, where: str = "tools") -> list[JsonObject]:
    """Return tools in the one form. Raises WireError, which names the tool."""
    if not isinstance(value, list | tuple):
        raise WireError(where, "a list of tools", _short(value))
    return [_tool(tool, f"{where}[{place}]") for place, tool in enumerate(value)]


def _tool(value: object, where: str) -> JsonObject:
    tool = dict(value) if isinstance(value, Mapping) else {}
    if "function" not in tool:  # as of the Responses API: name and parameters beside the type
        tool = {"type": tool.pop("type", "function"), "function": tool}
    function = tool["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        want = 'a tool with a name: {"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise WireError(where, want, _short(value))
    return tool if "type" in tool else {"type": "function", **tool}


def text_of(content: object, where: str, kinds: Mapping[str, str] = TEXTS) -> str:
    """Return the text of a content: a text, or text parts of these ``kinds``. Raises WireError, for an image, too."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise WireError(where, "text or text parts (write other values as JSON text)", _short(content))
    return "".join(_text_of_part(part, f"{where}[{place}]", kinds) for place, part in enumerate(content))


def _text_of_part(part: object, where: str, kinds: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kinds[kind]) if isinstance(part, Mapping) and isinstance(kind, str) and kind in kinds else None
    if not isinstance(text, str):
        got = f"a part of type {kind}" if isinstance(kind, str) and kind not in kinds else _short(part)
        raise WireError(where, 'a text part, {"type": "text", "text": ...}, as the model reads text alone', got)
    return text


def _message(value: object, where: str) -> JsonObject:
    role = value.get("role") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(role, str) or not role:
        raise WireError(where, 'a map with text as "role", and with "content"', _short(value))
    fields = {name: field for name, field in value.items() if field is not None}
    _check_fields(fields, where)
    if "content" not in fields and WITHOUT_CONTENT.get(role, frozenset()).isdisjoint(value):
        raise WireError(f"{where}.content", "text or text parts", "null" if "content" in value else "no such key")
    refusal, calls = fields.pop("refusal", ""), fields.pop("tool_calls", ())
    content = text_of(fields.get("content", ""), f"{where}.content") or refusal
    message = {**fields, "role": ROLES.get(role, role), "content": content}
    if not isinstance(calls, list | tuple) or (calls and role != ASSISTANT):
        raise WireError(f"{where}.tool_calls", f"a list of calls, in messages of the {ASSISTANT} alone", _short(calls))
    if calls:
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return message


def _check_fields(fields: JsonMapping, where: str) -> None:
    for name, want in REFUSED.items():
        if name in fields:
            raise WireError(f"{where}.{name}", want, _short(fields[name]))
    for name in ("name", "tool_call_id", "refusal", "reasoning_content"):
        if not isinstance(fields.get(name, ""), str):
            raise WireError(f"{where}.{name}", "text", _short(fields[name]))


def _call(value: object, where: str) -> JsonObject:
    call = {name: field for name, field in value.items() if field is not None} if isinstance(value, Mapping) else {}
    if "function" not in call and "name" in call:  # name and arguments beside id and type
        call["function"] = {name: call.pop(name) for name in ("name", "arguments") if name in call}
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        want = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        raise WireError(where, want, _short(value))
    if not isinstance(call.get("id", ""), str):
        raise WireError(f"{where}.id", "text", _short(call["id"]))
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}}


def _arguments(value: Any, where: str) -> JsonMapping:
    arguments = {} if value is None else value
    try:
        if isinstance(value, str):
            arguments = with_whole_characters(json.loads(value)) if value.strip() else {}
        json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise WireError(where, "a map, or one as JSON text", _short(value))
    return arguments


def _with_names(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the messages, each result with the name of its tool: clients send the id of the call alone."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == TOOL and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return list(messages)


def _short(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 80 else f"{text[:80]}..."
