"""Responses that called tools, as they were said: clients give back what they understood, which a chat template would spell anew."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any


class CalledTexts:
    """Holds at most ``max_text`` characters; the oldest go first."""

    def __init__(self, max_text: int) -> None:
        self._max_text, self._size = max_text, 0
        self._by_id: OrderedDict[str, tuple[Any, str]] = OrderedDict()
        """Id of the first call -> what the client was told, and the text it was made of."""

    def note(self, message: Mapping[str, Any], text: str) -> None:
        """A finished response; one without calls is passed over."""
        if not message.get("tool_calls"):
            return
        self._by_id[message["tool_calls"][0]["id"]] = (_understood(message), text)
        self._size += len(text)
        while self._size > self._max_text and len(self._by_id) > 1:
            _, (_, oldest) = self._by_id.popitem(last=False)
            self._size -= len(oldest)

    def as_said(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """The messages, with those that are given back unchanged as texts without ``tool_calls``."""
        return tuple(map(self._one, messages))

    def _one(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        told, text = self._by_id.get(str(calls[0].get("id")), (None, "")) if calls else (None, "")
        if told is None or told != _understood(message):
            return message
        return {"role": message["role"], "content": text}


def _understood(message: Mapping[str, Any]) -> Any:
    """What must be the same: spelling of JSON and further fields need not."""
    calls = [(call.get("id"), call["function"]["name"], _map(call["function"].get("arguments"))) for call in message["tool_calls"]]
    return message.get("role"), message.get("content") or "", calls


def _map(arguments: object) -> object:
    return json.loads(arguments) if isinstance(arguments, str) else arguments
