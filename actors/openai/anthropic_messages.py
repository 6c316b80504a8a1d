"""Translation of Anthropic's messages API into chat completions, and of the answers back. Pure: knows no HTTP and no
engine.

{"system": ..., "messages": [...], "max_tokens": 9, "tools": [...]}   ->  chat_of      ->  a chat completion's request
{"content": [{"type": "text"}, {"type": "tool_use"}], "usage": ...}   <-  message_of   <-  its answer
message_start, content_block_delta, ..., message_stop                 <-  MessageEvents <-  its chunks
"""

import json
from collections.abc import Iterator, Mapping

from tidemill.actors.errors import BadRequest
from tidemill.actors.http_api import known_fields
from tidemill.actors.openai.openai_api import content_text
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "min_version")
"""Fields that a chat completion takes under the same name."""
WITHOUT_EFFECT = {"metadata", "service_tier", "container", "context_management", "inference_geo"}
"""Fields that are accepted and ignored: clients send them, and they have no effect here."""
KNOWN = {*SAME, *WITHOUT_EFFECT, "thinking", "system", "messages", "stop_sequences", "tools", "tool_choice"}
ID = "msg_"
"""Beginning of an answer's id."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Finish reason of a chat -> stop reason."""


def chat_of(body: JsonMapping) -> JsonObject:
    """Return the chat completion's request for a request of messages. Raises BadRequest."""
    fields = known_fields(body, KNOWN, {})
    if "max_tokens" not in fields:
        raise BadRequest("max_tokens: want a number of tokens, got none")
    chat: JsonObject = {name: fields[name] for name in SAME if name in fields}
    if (stops := body.get("stop_sequences")) is not None:
        chat["stop"] = stops
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if tools := body.get("tools"):
        chat["tools"] = _tools(tools)
    chat["tool_choice"] = _choice(body.get("tool_choice"))
    system = content_text(body.get("system") or "", "system")
    chat["messages"] = [*([{"role": "system", "content": system}] if system else []), *_messages(body.get("messages"))]
    return chat


def message_of(answer: JsonMapping, body: JsonMapping) -> JsonObject:
    """Return the message for a whole chat completion. ``body``: the request."""
    (choice,) = answer["choices"]
    message = choice["message"]
    content: list[JsonObject] = []
    if message.get("reasoning_content") and _thinks(body):
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    content += [{"type": "text", "text": message["content"]}] if message.get("content") else []
    content += [_tool_use(call) for call in message.get("tool_calls") or ()]
    return {**_head(answer), "content": content, **_stop(choice), "usage": _usage(answer["usage"])}


class MessageEvents:
    """The events of one streamed message. A content block is open until another one begins, or the message ends."""

    def __init__(self, body: JsonMapping) -> None:
        """``body``: the request."""
        self._begun, self._places, self._open, self._thinks = False, 0, False, _thinks(body)
        self._stop: JsonObject = {}
        self._counts: JsonObject = {"input_tokens": 0, "output_tokens": 0}

    def parts(self, chunk: JsonMapping) -> Iterator[JsonObject]:
        """Yield the events for a chunk of the chat completion."""
        if not self._begun:
            self._begun = True
            message = {**_head(chunk), "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._counts}
            yield {"type": "message_start", "message": message}
        if chunk.get("usage"):
            self._counts = _usage(chunk["usage"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning_content") and self._thinks:  # it comes as a whole
                thought = delta["reasoning_content"]
                deltas = [{"type": "thinking_delta", "thinking": thought}, {"type": "signature_delta", "signature": ""}]
                yield from self._block({"type": "thinking", "thinking": "", "signature": ""}, *deltas)
            if delta.get("content"):
                if not self._open:
                    yield self._start({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": delta["content"]})
            for call in delta.get("tool_calls") or ():
                arguments = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
                yield from self._block({**_tool_use(call), "input": {}}, arguments)
            if choice.get("finish_reason") is not None:
                self._stop = _stop(choice)

    def last(self) -> Iterator[JsonObject]:
        """Yield the events that follow the last chunk."""
        yield from self._end()
        yield {"type": "message_delta", "delta": self._stop, "usage": self._counts}
        yield {"type": "message_stop"}

    def _block(self, block: JsonObject, *deltas: JsonObject) -> Iterator[JsonObject]:
        """Yield the events of a whole block, and of the end of an open one."""
        yield from self._end()
        yield self._start(block)
        yield from map(self._delta, deltas)
        yield from self._end()

    def _start(self, block: JsonObject) -> JsonObject:
        self._open = True
        return {"type": "content_block_start", "index": self._places, "content_block": block}

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._places, "delta": delta}

    def _end(self) -> Iterator[JsonObject]:
        if self._open:
            yield {"type": "content_block_stop", "index": self._places}
            self._open, self._places = False, self._places + 1


def _thinks(body: JsonMapping) -> bool:
    """Return whether the client wants the reasoning. Others may take the first block for the text."""
    match body.get("thinking"):
        case {"type": "enabled" | "adaptive"}:
            return True
    return False


def _head(answer: JsonMapping) -> JsonObject:
    message_id = ID + str(answer["id"]).removeprefix("chatcmpl-")
    return {"id": message_id, "type": "message", "role": "assistant", "model": answer["model"]}


def _stop(choice: JsonMapping) -> JsonObject:
    """Return the stop reason. A stop string is one of ``stop_sequences``; a token that ended the response is not."""
    matched, finish = choice.get("matched_stop"), choice["finish_reason"]
    if finish == "stop" and isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _REASONS.get(finish, finish), "stop_sequence": None}


def _usage(usage: JsonMapping) -> JsonObject:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _tool_use(call: JsonMapping) -> JsonObject:
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": json.loads(call["function"]["arguments"]),
    }


def _tools(tools: object) -> list[JsonObject]:
    if not isinstance(tools, list):
        raise BadRequest(f"tools: want a list, got {tools!r}")
    functions = []
    for place, tool in enumerate(tools):
        is_custom = isinstance(tool, Mapping) and tool.get("type", "custom") == "custom"
        if not is_custom or not isinstance(tool.get("name"), str):
            want = 'want {"name": ..., "input_schema": ...}, a tool that the client runs'
            raise BadRequest(f"tools[{place}]: {want}, got {tool!r}")
        function: JsonObject = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
        if tool.get("description"):
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function})
    return functions


def _choice(choice: object) -> str:
    match choice:
        case None | {"type": "auto"}:
            return "auto"
        case {"type": "none"}:
            return "none"
    raise BadRequest(f'tool_choice: not supported; want {{"type": "auto"}} or {{"type": "none"}}, got {choice!r}')


def _messages(messages: object) -> list[JsonObject]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages: want a list of at least one message, got {messages!r}")
    return [turn for place, message in enumerate(messages) for turn in _chat_messages(message, f"messages[{place}]")]


def _chat_messages(message: object, where: str) -> list[JsonObject]:
    """Return a message as messages of a chat: each result of a tool is one of its own, before the user's text."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
        raise BadRequest(f'{where}: want {{"role": "user" or "assistant", "content": ...}}, got {message!r:.80}')
    role, content = message["role"], message.get("content")
    is_reply = role == "assistant"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where}.content: want text or a list of content blocks, got {content!r:.80}")
    texts, thoughts, calls, results = list[str](), list[str](), list[JsonObject](), list[JsonObject]()
    for place, block in enumerate(content):
        at = f"{where}.content[{place}]"
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)} if is_reply:
                thoughts.append(text)
            case {"type": "redacted_thinking"} if is_reply:
                pass
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": Mapping() as arguments} if (
                is_reply
            ):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case {"type": "tool_result", "tool_use_id": str(call_id)} if not is_reply:
                result = content_text(block.get("content") or "", f"{at}.content")
                results.append({"role": "tool", "tool_call_id": call_id, "content": result})
            case _:
                # An image may have megabytes, so a part of the block stands for it.
                want = "want a block of type text, thinking, tool_use (assistant) or tool_result (user)"
                raise BadRequest(f"{at}: {want}, as the model reads text alone, got {block!r:.80}")
    if is_reply:
        reply: JsonObject = {"role": role, "content": "".join(texts)}
        reply |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        return [reply | ({"tool_calls": calls} if calls else {})]
    return [*results, *([{"role": role, "content": "".join(texts)}] if texts else [])]
