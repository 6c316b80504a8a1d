"""Pauses of a server's generation, requested by clients or needed by updates, and when they began and ended."""

import time

from tidemill.actors.errors import BadRequest, UpdateRefused
from tidemill.actors.serving.sglang.api import Api


class Pauses:
    """Pauses of one server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.mode: str | None = None
        """Mode of the pause; None = there is none."""
        self.began_s = 0.0
        """Time of time.perf_counter at which the newest pause began."""
        self.since_s, self.last_s = float("inf"), (float("inf"), 0.0)
        """Times of time.monotonic: earliest beginning of the pause, inf = there is none; beginning and end of the pause before."""

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
