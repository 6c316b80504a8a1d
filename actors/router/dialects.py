"""Other APIs than OpenAI's older ones by path, each made of chat completions."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from tidemill.actors.http_api import named_event
from tidemill.actors.openai import anthropic_messages, responses_api
from tidemill.bus.wire.json_object import JsonMapping, JsonObject


class Events(Protocol):
    """The events of one streamed answer, each with its ``type``."""

    def parts(self, chunk: JsonMapping) -> Iterator[JsonObject]:
        """Yield the events for a chunk of the chat completion."""
        ...

    def last(self) -> Iterator[JsonObject]:
        """Yield the events that follow the last chunk."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The translation of one API."""

    id: str
    """Beginning of an answer's id."""
    chat_of: Callable[[JsonMapping], JsonObject]
    """Request -> request of a chat completion. Raises BadRequest."""
    whole_of: Callable[[JsonMapping, JsonMapping], JsonObject]
    """Chat completion, request -> answer."""
    events: Callable[[JsonMapping], Events]
    """Request -> events of its streamed answer."""
    error: Callable[[JsonMapping], JsonObject]
    """OpenAI's error -> error."""

    async def stream(self, chunks: AsyncGenerator[JsonMapping, None], body: JsonMapping) -> AsyncGenerator[bytes, None]:
        """Yield the events of an answer, chunk by chunk. ``body``: the request. Raises as ``chunks`` does."""
        events = self.events(body)
        async with aclosing(chunks):
            async for chunk in chunks:
                if "error" in chunk:
                    yield named_event({"type": "error", **chunk})
                    return
                if parts := b"".join(map(named_event, events.parts(chunk))):
                    yield parts
        yield b"".join(map(named_event, events.last()))


DIALECTS = {
    "/v1/messages": Dialect(
        id=anthropic_messages.ID,
        chat_of=anthropic_messages.chat_of,
        whole_of=anthropic_messages.message_of,
        events=anthropic_messages.MessageEvents,
        error=lambda error: {"type": "error", **error},
    ),
    "/v1/responses": Dialect(
        id=responses_api.ID,
        chat_of=responses_api.chat_of,
        whole_of=responses_api.response_of,
        events=responses_api.ResponseEvents,
        error=dict,
    ),
}
"""Translation by path."""
