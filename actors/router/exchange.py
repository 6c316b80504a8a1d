"""A proxied request and its answer, as middleware sees them. Knows no engine.

A middleware is ``async (request, handler) -> Answer``: it may change the request, call the handler any number of times, change the answer,
or return one of its own. The receiver of an Answer must leave it by ``async with``, read or not: that releases the engine.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from actors.errors import BadRequest
from actors.http_api import json_map
from bus.wire.json_object import JsonObject

SESSION_HEADERS = ("X-Session-Id", "X-SMG-Routing-Key")
"""Headers with a session id; the first that is set counts. (The second is that of SGLang's own gateway.)"""
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
    session: str = ""
    """Session id. Requests of one session go to one engine, as long as it serves; empty = none."""
    id: str = ""
    """Id for the answer; empty = one is made."""

    @property
    def map(self) -> JsonObject:
        """The body as a JSON map; empty when it is no map, or one that engines refuse."""
        if not self.body.lstrip().startswith(b"{"):
            return {}
        try:
            return json_map(self.body)
        except BadRequest:
            return {}

    def field(self, name: str) -> object:
        """Return one field of the map; None when it is absent. A large body is parsed only if the name is in it."""
        return self.map.get(name) if f'"{name}"'.encode() in self.body else None

    def with_body(self, body: Mapping[str, object], path: str | None = None) -> "Request":
        """Return the same request with another body, and another path if given."""
        return replace(self, body=json.dumps(body).encode(), path=self.path if path is None else path)


class Answer:
    """Status, headers, and chunks that can be read once."""

    def __init__(self, status: int, headers: Mapping[str, str], chunks: AsyncIterator[bytes], held: AsyncExitStack | None = None) -> None:
        """``held`` has the resources, closed with the error, if there was one, when the answer is left."""
        self.status, self.headers, self.chunks = status, headers, chunks
        self._held = held or AsyncExitStack()

    @classmethod
    def of(cls, status: int, content: object) -> "Answer":
        """Return an answer with a JSON body."""
        return cls(status, {"Content-Type": "application/json"}, _once(json.dumps(content).encode()))

    @property
    def streamed(self) -> bool:
        """True when the content is a stream of server-sent events."""
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    async def read(self) -> bytes:
        """Return the whole content."""
        return b"".join([chunk async for chunk in self.chunks])

    def with_(self, chunks: AsyncIterator[bytes] | bytes) -> "Answer":
        """Return the same answer with other content. It takes over the resources: leaving it releases the engine."""
        headers = {name: value for name, value in self.headers.items() if name.lower() != "content-length"}
        return Answer(self.status, headers, _once(chunks) if isinstance(chunks, bytes) else chunks, self._held.pop_all())

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
    async def handle(request: Request) -> Answer:
        """Return the middleware's answer; ``inner`` is the handler that it calls."""
        return await layer(request, inner)

    return handle


def refusal(status: int, message: str, kind: str) -> Answer:
    """Return an error in a format that SGLang's and OpenAI's clients read."""
    return Answer.of(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
