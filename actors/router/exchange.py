"""A proxied request and its answer, as middleware sees them. Knows no engine.

A middleware is ``async (request, handler) -> Answer``: it may change the request, call the handler any number of times,
change the answer, or return one of its own. The receiver of an Answer must leave it by ``async with``, read or not:
that releases the engine.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import msgspec

from tidemill.actors.errors import BadRequest, EngineError
from tidemill.actors.http_api import DONE, data_of, event, json_map
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

JSON, EVENTS = "application/json", "text/event-stream"
"""Types of content."""
SESSION_HEADERS = ("X-Session-Id", "X-SMG-Routing-Key")
"""Headers with a session id; the first that is set counts. (SGLang's own gateway has the second.)"""
SESSION_FIELD = "session_id"
REQUEST_HEADER = "X-Request-Id"
"""Header by which a client marks a request as safe to repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A client's request."""

    method: str
    path: str
    """Path that begins with a slash; decoded, without the query."""
    query: str = ""
    """Query string, encoded."""
    headers: Mapping[str, str]
    """Headers; the case of their names does not matter."""
    body: bytes = b""
    """The body as it was received; empty where it was made in this process."""
    session: str = ""
    """Session id. Requests of one session go to one engine, as long as it serves; empty = none."""
    id: str = ""
    """Id for the answer; empty = one is made."""
    value: JsonMapping | None = None
    """The body as a map, where it was read or made in this process; None = only ``body`` is known."""

    @property
    def content(self) -> bytes:
        return self.body if self.body or self.value is None else json.dumps(self.value).encode()

    def json(self) -> JsonObject:
        """Return a copy of the body's map. Raises BadRequest unless it is a JSON map that can be encoded again."""
        return json_map(self.body) if self.value is None else dict(self.value)

    @property
    def map(self) -> JsonObject:
        """The body as a JSON map; empty when it is no map, or one that engines refuse."""
        if self.value is None and not self.body.lstrip().startswith(b"{"):
            return {}
        try:
            return self.json()
        except BadRequest:
            return {}

    def field(self, name: str) -> object:
        """Return one field of the map; None when it is absent. A large body is parsed only if the name is in it."""
        return self.map.get(name) if self.value is not None or f'"{name}"'.encode() in self.body else None

    def with_body(self, body: Mapping[str, object], path: str | None = None) -> "Request":
        """Return the same request with another body, and another path if given."""
        return replace(self, body=b"", value=body, path=self.path if path is None else path)


class Answer:
    """Status, headers, and chunks that can be read once. Content made in this process is kept as a value, too."""

    def __init__(
        self, status: int, headers: Mapping[str, str], chunks: AsyncIterator[bytes], held: AsyncExitStack | None = None
    ) -> None:
        """``held`` has the resources, closed with the error, if there was one, when the answer is left."""
        self.status, self.headers, self.chunks = status, headers, chunks
        self.states: AsyncGenerator[JsonMapping, None] | None = None
        """The events of ``chunks`` as values, read instead of them; None = only the chunks are known."""
        self._content: object = None
        self._held = held or AsyncExitStack()

    @classmethod
    def of(cls, status: int, content: object) -> "Answer":
        """Return an answer with a JSON body."""
        answer = cls(status, {"Content-Type": JSON}, _encoded(content))
        answer._content = content
        return answer

    @classmethod
    def of_states(cls, status: int, states: AsyncGenerator[JsonMapping, None]) -> "Answer":
        """Return a stream of these events, with [DONE] at its end. Leaving it closes ``states``."""
        resources = AsyncExitStack()
        resources.push_async_callback(states.aclose)
        answer = cls(status, {"Content-Type": EVENTS}, _events(states), resources)
        answer.states = states
        return answer

    @property
    def streamed(self) -> bool:
        """True when the content is a stream of server-sent events."""
        return self.headers.get("Content-Type", "").startswith(EVENTS)

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks])

    async def json(self) -> Any:
        """Return the content as a value. Raises ValueError if it is no JSON."""
        return self._content if self._content is not None else json.loads(await self.read())

    def with_(self, chunks: AsyncIterator[bytes] | bytes) -> "Answer":
        """Return the same answer with other content. It takes over the resources: leaving it releases the engine."""
        headers = {name: value for name, value in self.headers.items() if name.lower() != "content-length"}
        resources = self._held.pop_all()
        if isinstance(chunks, AsyncGenerator):
            resources.push_async_callback(chunks.aclose)  # before its source is released
        return Answer(self.status, headers, once(chunks) if isinstance(chunks, bytes) else chunks, resources)

    def with_content(self, content: object) -> "Answer":
        """Return the same answer with another JSON body. It takes over the resources."""
        answer = self.with_(_encoded(content))
        answer._content = content
        return answer

    def with_states(self, states: AsyncGenerator[JsonMapping, None]) -> "Answer":
        """Return the answer as a stream of other events, with its resources. Leaving it closes ``states``."""
        answer = self.with_(_events(states))
        answer._held.push_async_callback(states.aclose)
        answer.states = states
        return answer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._held.__aexit__(kind, error, traceback)


Handler = Callable[[Request], Awaitable[Answer]]
Middleware = Callable[[Request, Handler], Awaitable[Answer]]


def wrapped(handler: Handler, middleware: list[Middleware]) -> Handler:
    """Return the handler inside all middleware, the first one outermost."""
    for layer in reversed(middleware):
        handler = _around(layer, handler)
    return handler


def _around(layer: Middleware, inner: Handler) -> Handler:
    return lambda request: layer(request, inner)


def refusal(status: int, message: str, kind: str) -> Answer:
    """Return an error in a format that SGLang's and OpenAI's clients read."""
    return Answer.of(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})


async def once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _encoded(content: object) -> AsyncIterator[bytes]:
    try:
        yield msgspec.json.encode(content)  # many times as fast for lists of log-probs
    except ValueError:  # half an emoji in the JSON of an engine
        yield json.dumps(content).encode()


async def _events(states: AsyncIterator[JsonMapping]) -> AsyncGenerator[bytes, None]:
    async for state in states:
        yield event(state)
    yield DONE


class SentStates:
    """The states of a stream as its client was sent them. Each response is remembered once, as far as it was sent."""

    def __init__(self, remember: Callable[[int, JsonMapping], None], decode: Callable[[list[int]], str]) -> None:
        """``remember`` is called with the place of a response and its state."""
        self._remember, self._decode = remember, decode
        self._open: dict[int, JsonMapping] = {}
        """Newest state that was sent of each unfinished response, with its text as it was sent."""

    def take(self, state: JsonMapping) -> bool:
        """Return whether a state is the last one of its response, which is then remembered."""
        place = state.get("index", 0)
        if state["meta_info"].get("finish_reason") is None:
            return False
        self._open.pop(place, None)
        self._remember(place, state)
        return True

    def seen(self, state: JsonMapping, text: str) -> None:
        """Note that the client was sent an unfinished state, as this text."""
        if state["meta_info"].get("finish_reason") is None:
            self._open[state.get("index", 0)] = {**state, "text": text}

    def note_cut(self) -> None:
        """Remember the responses that the client has cut: the responses whose text it has seen to the last token."""
        for place, state in self._open.items():
            if state["text"] and self._decode(list(state["output_ids"])) == state["text"]:
                self._remember(place, state)
        self._open.clear()


async def states_in(chunks: AsyncIterator[bytes]) -> AsyncGenerator[JsonMapping, None]:
    """Yield the states and the errors of a stream. Raises EngineError for an event that is neither."""
    unended = b""
    async for chunk in chunks:
        *events, unended = (unended + chunk).split(b"\n\n")
        for line in events:
            if (state := state_in(line)) is not None:
                yield state
            elif b'"error"' in line and (data := data_of(line)) is not None:
                yield _decoded(data)


def state_in(line: bytes) -> JsonObject | None:
    """Return the response state in an event; None without one ([DONE], an error). Raises EngineError for no JSON."""
    if (data := data_of(line)) is None or not data.startswith(b"{"):
        return None
    state = _decoded(data)
    if "meta_info" not in state:
        return None
    if not isinstance(state["meta_info"], Mapping):
        raise EngineError(f"event of a stream: want a map in meta_info, got {state['meta_info']!r:.80}")
    return state


def _decoded(data: bytes) -> JsonObject:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"event of a stream: want JSON, got {data[:80]!r}: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"event of a stream: want a map, got {data[:80]!r}")
    return value
