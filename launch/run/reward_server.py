"""A server that hosts a reward: ``POST /score`` with a request as JSON, answered by ``{"reward": ...}`` or ``{"failed": reason}``.

Consumes requests of ``remote`` rewards and of any other client; runs the reward as an actor does, in child processes with limits.
"""

import hmac
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from bus.wire.messages import Status
from rewards.errors import RewardFailed
from rewards.port import RewardRequest, Scorer
from rewards.request_json import to_request
from weightstore.listener import Access, Listener

MAX_REQUEST_BYTES = 64 << 20
"""Size of the largest request that is read."""
MAX_WAITING = 4096
"""Calls at a time; a further one is answered by 503, which clients repeat later."""


class RewardServer:
    """The requests of one reward, and their counts."""

    def __init__(self, name: str, score: Scorer, *, token: str = "") -> None:
        """``token``: bearer token that requests must have; empty = none."""
        self._name, self._score, self._token = name, score, token
        self.counts: Counter[str] = Counter()
        """Requests by outcome: scored, failed, refused, busy."""
        self._running = 0

    def listener(self) -> Listener:
        """Return its routes as a listener."""
        routes = {"POST /score": self._answer, "GET /health": self._health}
        return Listener(routes, Access(None), max_body_bytes=MAX_REQUEST_BYTES)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"reward": self._name, "running": self._running, **self.counts})

    async def _answer(self, http: web.Request) -> web.Response:
        if self._token and not hmac.compare_digest(http.headers.get("Authorization", "").encode(), f"Bearer {self._token}".encode()):
            return self._reply(401, "refused", "want the header Authorization: Bearer with the server's token")
        try:
            request = request_in(json.loads(await http.read()))
        except (ValueError, RecursionError) as error:
            return self._reply(400, "refused", str(error)[:1000])
        if self._running >= MAX_WAITING:
            return self._reply(503, "busy", f"{self._running} calls are running")
        self._running += 1
        try:
            reward = await self._score(request)
        except TimeoutError:
            return self._reply(200, "failed", "no result in time")
        except RewardFailed as error:
            return self._reply(200, "failed", error.reason[:1000])
        finally:
            self._running -= 1
        self.counts["scored"] += 1
        return web.json_response({"reward": reward})

    def _reply(self, status: int, outcome: str, reason: str) -> web.Response:
        self.counts[outcome] += 1
        return web.json_response({"failed": reason}, status=status)


def request_in(found: Any) -> RewardRequest:
    """Return the request in decoded JSON; only ``prompt`` and ``response`` must be there. Raises ValueError naming the field."""
    if not isinstance(found, dict):
        raise ValueError(f"want a map, got {type(found).__name__}")
    wanted: dict[str, tuple[Any, str, Any]] = {
        "prompt": ((str, list), "text or messages", None),
        "response": (str, "text", None),
        "status": (str, "text", Status.COMPLETED.value),
        "tokens": (str, "base64", ""),
        "metadata": (dict, "a map", {}),
        "response_length": (int, "a whole number", 0),
    }
    values = {"label": found.get("label")}
    for name, (kind, words, default) in wanted.items():
        value = found.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name}: want {words}, got {value!r}"[:300])
        values[name] = value
    try:
        return to_request(values)
    except ValueError as error:  # of the status, or base64
        raise ValueError(f"status or tokens: {error}") from None


@asynccontextmanager
async def serving(server: RewardServer, host: str, port: int) -> AsyncIterator[str]:
    """Serve while entered; yields the URL. Raises OSError for an address that cannot be taken."""
    listener = server.listener()
    try:
        yield await listener.start(host, port, insecure=True)  # whether others may ask is the caller's choice
    finally:
        await listener.close()
