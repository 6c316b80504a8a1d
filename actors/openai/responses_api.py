"""Translation of OpenAI's responses API into chat completions, and of the answers back. Pure: knows no HTTP and no
engine.

    {"instructions": ..., "input": [...], "tools": [...]}    ->  chat_of         ->  a chat completion's request
    {"output": [message, function_call, ...], "usage": ...}  <-  response_of     <-  its answer
    response.created, ..., response.completed                <-  ResponseEvents  <-  its chunks

Nothing is stored: a program sends the items of its history itself.
"""

from collections.abc import Iterator, Mapping, Sequence

from tidemill.actors.errors import BadRequest
from tidemill.actors.http_api import known_fields, need
from tidemill.actors.openai.openai_api import content_text
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "chat_template_kwargs", "min_version")
"""Fields that a chat completion takes under the same name."""
WITHOUT_EFFECT = {
    *("metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("store", "include", "reasoning", "truncation", "stream_options"),
}
"""Fields that are accepted and ignored: clients send them, and they have no effect here."""
REFUSED = {
    "previous_response_id": "responses are not stored; send the items of the history as input",
    "conversation": "conversations are not stored; send the items of the history as input",
    "background": "want an answer to the request itself",
    "prompt": "prompts are not stored; send instructions and input",
}
"""Fields that are not supported, with the reason."""
KNOWN = {*SAME, *WITHOUT_EFFECT, *REFUSED, "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text"}
ID = "resp_"
"""Beginning of an answer's id."""
_ROLES = ("user", "assistant", "system", "developer")
_THOUGHTS = {"reasoning_text": "text"}
"""Type of a part of reasoning -> its field with the text."""


def chat_of(body: JsonMapping) -> JsonObject:
    """Return the chat completion's request for a request of responses. Raises BadRequest."""
    fields = known_fields(body, KNOWN, {})
    for name in REFUSED:
        if fields.get(name):
            raise BadRequest(f"{name}: not supported: {REFUSED[name]}")
    chat: JsonObject = {name: fields[name] for name in SAME if name in fields}
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if tools := body.get("tools"):
        chat["tools"] = _tools(tools)
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = body["tool_choice"]
    if (form := _form(body.get("text"))) is not None:
        chat["response_format"] = form
    instructions = need({"instructions": "", **fields}, "instructions", str)
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = [*system, *_messages(body.get("input"))]
    return chat


def response_of(answer: JsonMapping, body: JsonMapping) -> JsonObject:
    """Return the response for a whole chat completion. ``body``: the request."""
    (choice,) = answer["choices"]
    message = choice["message"]
    output = [_reasoning(answer["id"], message["reasoning_content"])] if message.get("reasoning_content") else []
    output += [_message(answer["id"], message["content"], len(output))] if message.get("content") else []
    output += [_function_call(call) for call in message.get("tool_calls") or ()]
    return _response(answer, body, output, choice["finish_reason"], answer["usage"])


class ResponseEvents:
    """The events of one streamed response. An item is open until another one begins, or the response ends."""

    def __init__(self, body: JsonMapping) -> None:
        """``body``: the request."""
        self._body, self._head, self._number = body, dict[str, object](), 0
        self._text = ""
        """Text of the open message; empty = none is open."""
        self._output: list[JsonObject] = []
        self._finish, self._usage = "stop", JsonObject()

    def parts(self, chunk: JsonMapping) -> Iterator[JsonObject]:
        """Yield the events for a chunk of the chat completion."""
        if not self._head:
            self._head = {"id": chunk["id"], "created": chunk["created"], "model": chunk["model"]}
            begun = _response(self._head, self._body, [], None, None)
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                yield from self._end()
                yield from self._thought(delta["reasoning_content"])
            if delta.get("content"):
                yield from self._grow(delta["content"])
            for call in delta.get("tool_calls") or ():
                yield from self._end()
                yield from self._called(_function_call(call))
            self._finish = choice.get("finish_reason") or self._finish

    def last(self) -> Iterator[JsonObject]:
        """Yield the events that follow the last chunk."""
        yield from self._end()
        response = _response(self._head, self._body, self._output, self._finish, self._usage or None)
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: object) -> JsonObject:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _grow(self, text: str) -> Iterator[JsonObject]:
        item = _message(str(self._head["id"]), "", len(self._output))
        at = self._place(item)
        if not self._text:
            yield self._added({**item, "content": []})
            yield self._event("response.content_part.added", **at, part=item["content"][0])
        self._text += text
        yield self._event("response.output_text.delta", **at, delta=text, logprobs=[])

    def _end(self) -> Iterator[JsonObject]:
        if not self._text:
            return
        item = _message(str(self._head["id"]), self._text, len(self._output))
        at = self._place(item)
        yield self._event("response.output_text.done", **at, text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **at, part=item["content"][0])
        yield self._done(item)
        self._text = ""

    def _thought(self, text: str) -> Iterator[JsonObject]:
        """Yield the events of the model's reasoning, which comes as a whole."""
        item = _reasoning(str(self._head["id"]), text)
        at, (part,) = self._place(item), item["content"]
        yield self._added({**item, "content": []})
        yield self._event("response.content_part.added", **at, part={**part, "text": ""})
        yield self._event("response.reasoning_text.delta", **at, delta=text)
        yield self._event("response.reasoning_text.done", **at, text=text)
        yield self._event("response.content_part.done", **at, part=part)
        yield self._done(item)

    def _called(self, item: JsonObject) -> Iterator[JsonObject]:
        at = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._added({**item, "arguments": ""})
        yield self._event("response.function_call_arguments.delta", **at, delta=item["arguments"])
        yield self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        yield self._done(item)

    def _place(self, item: JsonObject) -> JsonObject:
        """Return the fields that name the only part of the item that is open."""
        return {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}

    def _added(self, item: JsonObject) -> JsonObject:
        item = {**item, "status": "in_progress"}
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: JsonObject) -> JsonObject:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)


def _response(
    answer: JsonMapping, body: JsonMapping, output: Sequence[JsonObject], finish: str | None, usage: JsonMapping | None
) -> JsonObject:
    """Return a response; ``finish``: None = it is in progress."""
    status = "in_progress" if finish is None else "incomplete" if finish == "length" else "completed"
    return {
        "id": ID + str(answer["id"]).removeprefix("chatcmpl-"),
        "object": "response",
        "created_at": answer["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "model": answer["model"],
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "metadata": body.get("metadata") or {},
        "usage": None if usage is None else _usage(usage),
    }


def _usage(usage: JsonMapping) -> JsonObject:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _message(chat_id: str, text: str, place: int) -> JsonObject:
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    name = f"msg_{chat_id.removeprefix('chatcmpl-')}_{place}"
    return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": [content]}


def _reasoning(chat_id: str, text: str) -> JsonObject:
    name = f"rs_{chat_id.removeprefix('chatcmpl-')}"
    return {
        "id": name,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": "completed",
    }


def _function_call(call: JsonMapping) -> JsonObject:
    function = call["function"]
    return {
        "id": "fc_" + str(call["id"]).removeprefix("call_"),
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }


def _tools(tools: object) -> list[JsonObject]:
    if not isinstance(tools, list):
        raise BadRequest(f"tools: want a list, got {tools!r}")
    functions = []
    for place, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            want = 'want {"type": "function", "name": ..., "parameters": ...}'
            raise BadRequest(f"tools[{place}]: {want}, got {tool!r}")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    return functions


def _form(text: object) -> JsonObject | None:
    """Return the response format of a chat for ``text.format``; None = plain text."""
    match text:
        case None | {"format": None | {"type": "text"}}:
            return None
        case {"format": {"type": "json_object"}}:
            return {"type": "json_object"}
        case {"format": {"type": "json_schema", "schema": dict(schema)}}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        case {"verbosity": _, **more} if not more:
            return None
    want = 'want {"format": {"type": "text"}}, json_object, or json_schema with a schema'
    raise BadRequest(f"text: {want}, got {text!r}")


def _messages(items: object) -> list[JsonObject]:
    """Return items as messages of a chat. Reasoning, a text and the calls that follow it are one message."""
    if isinstance(items, str) and items:
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise BadRequest(f"input: want text or a list of at least one item, got {items!r}")
    messages: list[JsonObject] = []
    thought = ""
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if isinstance(item, Mapping) and item.get("type") == "reasoning":
            thought += content_text(item.get("content") or "", f"{where}.content", _THOUGHTS)
            continue
        message = _of_item(item, where)
        before = messages[-1] if messages else {}
        if not thought and message["role"] == "assistant" == before.get("role") and message.get("tool_calls"):
            before.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            if thought and message["role"] == "assistant":
                message["reasoning_content"] = thought
            elif thought:  # an answer that ended within it
                messages.append(_thought(thought))
            messages.append(message)
        thought = ""
    if thought:
        messages.append(_thought(thought))
    if not messages:
        raise BadRequest("input: want at least one message, got reasoning alone")
    return messages


def _thought(text: str) -> JsonObject:
    return {"role": "assistant", "content": "", "reasoning_content": text}


def _of_item(item: object, where: str) -> JsonObject:
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            return {"role": "tool", "tool_call_id": call_id, "content": content_text(output, f"{where}.output")}
    if isinstance(item, Mapping) and item.get("type", "message") == "message":
        role = item.get("role")
        if isinstance(role, str) and role in _ROLES:
            return {"role": role, "content": content_text(item.get("content"), f"{where}.content")}
    raise BadRequest(f"{where}: want a message, reasoning, function_call or function_call_output, got {item!r:.80}")
