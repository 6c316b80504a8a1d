"""The engine port: the interfaces that an engine process serves, and that its HTTP server calls."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from aiohttp import web

from tidemill.bus.http.access import Route
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.rows import Capabilities

PHASES = ("joining", "catching up", "serving", "stale", "draining")
"""Phases of an engine; it accepts requests only in ``serving``."""
COMMAND_S = 60.0
"""Time-out of one operation of an update, unless its request has another."""
Result = TypeVar("Result")
Body = JsonMapping


class ServedEngine(Protocol):
    """An engine, as the process that serves it sees it."""

    phase: str
    url: str
    nonce: str
    """Random text of this process, in a header of its answers to GET /health: callers verify the address by it."""
    handles: str
    """URL of the socket for pushes by handles; "" = the engine takes no handles."""

    @property
    def version(self) -> int:
        """Version of the served weights; -1 = none are complete."""
        ...

    @property
    def whole(self) -> bool:
        """True when there are weights to serve: not from the release of their memory until an update."""

    @property
    def epoch(self) -> int:
        """Highest learner epoch seen; 0 before the first."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Kinds of push that the engine accepts now, and whether its peers can fetch its weights."""

    def load(self) -> None:
        """Read the model directory (blocking)."""

    async def start(self) -> str:
        """Listen, and return the URL. Nothing is generated before the phase is ``serving``."""

    async def load_snapshot(self, directory: Path, version: int, epoch: int) -> object:
        """Load and serve the weights of a directory, all of them or none. Its result is ignored."""

    async def probe(self) -> None:
        """Generate one token. Raises EngineFailed when that fails."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and finish the accepted ones. Returns False when some are left after ``timeout_s``."""

    async def close(self) -> None:
        """Stop listening and end the engine."""
        ...

    async def failed(self) -> None:
        """Wait until the engine cannot generate any more, for good; return or raise then."""

    def stats(self) -> dict[str, float]:
        """Return counters and gauges for the live row."""


Factory = Callable[..., ServedEngine]
"""``(model_dir, config, *, version, on_update, authority)``; ``version`` -1 = not known yet."""


class Backend(Protocol):
    """Requests that each kind of engine answers in its own way; keys, epochs and common fields are checked before."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /generate, as JSON or events. Raises BadRequest, EngineUnavailable, EngineFailed."""

    def states(self, body: Body) -> AsyncGenerator[Body, None]:
        """Yield SGLang's JSON of all responses in order; or, streamed, of each as it grows, with its ``index``.

        A response that fails among others is ``{"error": {"message": ..., "code": ...}}``. Closing it early drops the
        unfinished responses. Raises BadRequest, EngineUnavailable, EngineFailed; BadRequest before the first state.
        """
        ...

    async def abort(self, rid: str | None, body: Body) -> web.StreamResponse:
        """End the request or response ``rid`` with its tokens so far, or all (None)."""

    @property
    def adapters(self) -> Collection[str]:
        """Names of the loaded adapters, which requests of OpenAI's API choose as their ``model``."""
        ...

    async def model_info(self) -> Body:
        """Return the answer of GET /model_info."""
        ...

    async def server_info(self) -> Body:
        """Return the answer of GET /server_info; no key of the server is in it."""
        ...

    async def loads(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /v1/loads: running and waiting requests."""
        ...

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        """Answer /flush_cache: drop cached keys and values; HTTP 400 when requests still need them."""
        ...

    def own_routes(self, command: Callable[[web.Request], Awaitable[Body]]) -> Mapping[str, Route]:
        """Return further routes of this kind; ``command`` checks the epoch of a command and returns its body."""
