"""Calls to an SGLang server, with its failures as our errors, and the pauses of its generation."""

import time
from collections.abc import Mapping

from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, EngineUnavailable, UpdateRefused
from tidemill.actors.serving.port import COMMAND_S
from tidemill.bus.http.client import CONNECT_S, ApiClient, CallFailed, Failure


class Aborted(BadRequest):
    """A client aborted the request before it began (HTTP 499)."""


class Api(ApiClient):
    """One server at ``url``, with its ``key``, if it has one. Calls raise EngineUnavailable (HTTP 408, 429, 502 to 504,
    or no answer), BadRequest (other 4xx), EngineFailed (other 5xx).
    """

    def __init__(self, url: str, key: str = "") -> None:
        async def headers() -> Mapping[str, str]:
            return {"Authorization": f"Bearer {key}"} if key else {}

        super().__init__(url, _error, headers=headers)

    async def command(self, path: str, body: Mapping[str, object], *, timeout_s: float = COMMAND_S) -> None:
        """Send a command of an update. Raises UpdateRefused when it fails in whatever way."""
        try:
            answer = await self.call("POST", path, body, timeout_s=timeout_s)
        except BadRequest as error:
            raise UpdateRefused(error.reason) from error
        except EngineError as error:
            raise UpdateRefused(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UpdateRefused(f"{path}: {answer.get('message')}")

    async def healthy(self) -> bool:
        """Return whether /health answers 200 within ``CONNECT_S`` seconds."""
        try:
            await self.call("GET", "/health", timeout_s=CONNECT_S)
        except EngineError:
            return False
        return True


def _error(failed: CallFailed) -> EngineError:
    reason = f"{failed.path}: {failed.reason}"
    match failed.failure:
        case Failure.NOT_CONNECTED | Failure.NO_ANSWER | Failure.BROKEN | Failure.UNAVAILABLE:
            return EngineUnavailable(failed.url, reason)
        case Failure.UNREADABLE | Failure.FAILED:
            return EngineFailed(failed.url, reason)
        case Failure.ABORTED:
            return Aborted(reason)
        case Failure.UNAUTHORIZED | Failure.STALE | Failure.REFUSED:
            return BadRequest(reason)


class Pauses:
    """Pauses of one server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.mode: str | None = None
        """Mode of the pause; None = there is none."""
        self.began_s = 0.0
        """Time of time.perf_counter at which the newest pause began."""
        self.since_s, self.last_s = float("inf"), (float("inf"), 0.0)
        """By time.monotonic: earliest beginning of the pause (inf = none); beginning and end of the pause before."""

    async def pause(self, mode: str) -> None:
        """Pause at a client's request."""
        before, self.mode = self.mode, mode  # the requests that it ends are answered before it is
        try:
            await self._send(mode)
        except UpdateRefused:
            self.mode = before
            raise
        if before is None:
            self.began_s = time.perf_counter()

    async def hold(self, mode: str) -> None:
        """Pause for an update. The pause is reckoned from here, and is none if the server refuses it."""
        begun_s = time.perf_counter()
        await self._send(mode)
        if self.mode is None:
            self.began_s = begun_s
        self.mode = mode

    async def resume(self) -> None:
        """Continue generation."""
        await self._api.command("/continue_generation", {"torch_empty_cache": False})
        self.ended()

    def ended(self) -> None:
        """Record that the server generates."""
        self.mode = None
        if self.since_s < float("inf"):
            self.since_s, self.last_s = float("inf"), (self.since_s, time.monotonic())

    async def _send(self, mode: str) -> None:
        before = self.since_s
        self.since_s = min(before, time.monotonic())
        try:
            await self._api.command("/pause_generation", {"mode": mode})
        except UpdateRefused as error:
            if isinstance(error.__cause__, BadRequest):  # otherwise the server may be paused all the same
                self.since_s = before
            raise
