"""The engine port: the interface that an engine process serves, and the parts that the HTTP server and the handle
listener call.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from aiohttp import web

from tidemill.actors.generate_body import RequestLimits
from tidemill.actors.serving.authority import Authority
from tidemill.actors.text.text import Text
from tidemill.bus.http.access import Route
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.rows import Capabilities
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.format.manifest import Bucket
from tidemill.weightstore.transport.handles import Offered

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
    """Random text of this process: its answers to GET /health have it in a header, for callers that verify the address.
    """
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
        """Accept no more requests and finish the accepted ones. Returns False when some are left after
        ``timeout_s``.
        """

    async def close(self) -> None:
        """Stop listening and end the engine."""
        ...

    async def failed(self) -> None:
        """Wait until the engine cannot generate any more, for good; return or raise then."""

    def stats(self) -> dict[str, float]:
        """Return counters and gauges for the live row."""


Factory = Callable[..., ServedEngine]
"""``(model_dir, config, *, version, on_update, authority)``; ``version`` -1 = the version of the model directory is not
known yet.
"""


class Updates(Protocol):
    """The weight updates of an engine. Operations other than ``require_current_epoch`` are called through
    ``run_shielded``.

    They raise UpdateRefused; then the engine serves the weights before the update, or, where those were overwritten,
    none.
    """

    begun: int
    """Number of pushes that have begun here."""
    completed: int
    stall_s: float
    """Sum of the seconds for which updates have held up generation."""

    @property
    def version(self) -> int:
        """Version of the served weights; -1 = none are complete."""
        ...

    @property
    def epoch(self) -> int:
        """Highest learner epoch seen."""

    @property
    def whole(self) -> bool:
        """True when there are weights to serve."""

    @property
    def released(self) -> frozenset[str]:
        """Kinds of memory that are released: some of ``weights`` and ``kv_cache``."""

    def require_current_epoch(self, epoch: int | None, what: str) -> None:
        """Record the epoch. Raises StaleEpoch when a higher one was seen."""

    async def run_shielded(self, operation: Coroutine[object, None, Result]) -> Result:
        """Run an operation to its end even if the caller is cancelled. Returns its result, raises its errors."""

    async def join(self, body: Body) -> None:
        """Join the process group that the body of /init_weights_update_group names; one of the same name is left
        first.
        """

    async def leave(self, group_name: str) -> None:
        """Leave a process group, and discard an open update as ``sender_left``."""
        ...

    async def sender_left(self) -> None:
        """Discard an open update that is sent in messages: there will be no more of them."""

    async def begin(self, version: int | None, timeout_s: float = COMMAND_S) -> None:
        """Open an update; an unfinished one is discarded. Each operation that follows takes at most ``timeout_s``."""

    async def receive_bucket(self, body: Body, version: int | None) -> None:
        """Receive the tensors that the body of /update_weights_from_distributed names."""

    async def read_bucket(self, bucket: Bucket, offered: Offered, *, version: int | None, timeout_s: float) -> None:
        """Read one flat bucket from memory that processes of this host can read."""

    async def end(self, version: int | None) -> float:
        """Serve the received weights, if every tensor was received once. Returns the seconds for which generation was
        held up.
        """

    async def load_directory(self, directory: Path, version: int | None) -> float:
        """Load and serve all weights of a directory, or none. Returns seconds as ``end``."""

    async def serve_directory(self, directory: Path, version: int | None, *, begun: int) -> float | None:
        """Take released memory again, then load and serve a directory. Returns seconds as ``end``.

        Returns None, and loads nothing, when a push has begun since ``begun`` was read: a load would discard it.
        """

    async def arrived_meanwhile(self, version: int) -> bool:
        """Wait for an open update, within a bound. Returns whether this version, or a newer one, is served then."""

    async def checksums(self) -> dict[str, str]:
        """Return checksums of the served weights by name, as SGLang computes them."""

    async def checksum_report(self, *, of_update: bool) -> tuple[int | None, ChecksumReport]:
        """Return version and checksums of the served weights, or of the weights of the open update, which must be
        complete.
        """

    async def release(self, tags: frozenset[str]) -> None:
        """Release memory; with the memory of the weights an open update is discarded. Refused for unfinished requests
        without a pause.
        """

    async def resume(self, tags: frozenset[str]) -> None:
        """Take released memory again. Weights need an update then; keys and values are usable at once, and with them a
        pause ends.
        """

    async def pause(self, mode: str) -> None:
        """Pause generation: in_place keeps the running requests, retract sends them back to the queue, abort ends
        them.
        """

    async def continue_generation(self, body: Body) -> None:
        """Continue after a pause."""

    async def close(self) -> None:
        """End the operations under way; groups that this process has joined are left."""
        ...


class ExposedEngine(ServedEngine, Protocol):
    """An engine, as its HTTP server sees it."""

    model_dir: Path
    text: Text | None
    limits: RequestLimits
    authority: Authority

    @property
    def updates(self) -> Updates:
        """The engine's weight updates."""
        ...

    def require_servable(self) -> None:
        """Raise EngineUnavailable when the engine does not serve now."""


class Backend(Protocol):
    """Requests that each kind of engine answers in its own way. Keys, epochs and fields common to all kinds are checked
    before.
    """

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /generate, as JSON or as a stream of events. Raises BadRequest, EngineUnavailable,
        EngineFailed.
        """

    def states(self, body: Body) -> AsyncGenerator[Body, None]:
        """Yield the states of all responses to a body of /generate, as
        ``tidemill.actors.openai.openai_server.GenerateBackend`` wants.
        """
        ...

    async def abort(self, rid: str | None, body: Body) -> web.StreamResponse:
        """End the request or response ``rid`` with its tokens so far, or all (None)."""

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
        """Return routes that only this kind has; ``command`` checks the epoch of a learner's command and returns its
        body.
        """
