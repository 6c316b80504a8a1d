"""Original texts of responses with tool calls: clients send back parsed calls, which a chat template would render differently."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from tidemill.bus.wire.json_object import JsonMapping


class ToolCallCache:
    """Original texts by call id, at most ``max_text`` characters; the oldest are evicted first."""

    def __init__(self, max_text: int) -> None:
        self._max_text, self._size = max_text, 0
        self._by_id: OrderedDict[str, tuple[object, str]] = OrderedDict()
        """Id of the first call -> the message sent to the client, normalised, and the text it was parsed from."""

    def remember(self, message: JsonMapping, text: str) -> None:
        """Remember a finished response; one without calls is ignored."""
        if not message.get("tool_calls"):
            return
        self._by_id[message["tool_calls"][0]["id"]] = (comparable(message), text)
        self._size += len(text)
        while self._size > self._max_text and len(self._by_id) > 1:
            _, (_, oldest) = self._by_id.popitem(last=False)
            self._size -= len(oldest)

    def with_original_text(self, messages: Sequence[Mapping[str, object]]) -> tuple[Mapping[str, object], ...]:
        """Return the messages; those that the client sent back unchanged have the original text and no ``tool_calls``."""
        return tuple(map(self._original, messages))

    def _original(self, message: JsonMapping) -> Mapping[str, object]:
        calls = message.get("tool_calls")
        sent, text = self._by_id.get(str(calls[0].get("id")), (None, "")) if calls else (None, "")
        if sent is None or sent != comparable(message):
            return message
        return {"role": message["role"], "content": text}


def comparable(message: JsonMapping) -> object:
    """Return the parts of a message that must be equal; formatting of JSON and other fields may differ."""
    calls = [
        (call.get("id"), call["function"]["name"], _map(call["function"].get("arguments"))) for call in message.get("tool_calls") or ()
    ]
    return message.get("role"), message.get("content") or "", calls


def _map(arguments: object) -> object:
    return json.loads(arguments) if isinstance(arguments, str) else arguments
