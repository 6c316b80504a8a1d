"""A server that hosts rewards, those of ``tidemill scorer`` and of ``tidemill reward-server``.

    POST /score        a request as JSON                                   {"reward": ...} or {"failed": reason}
    POST /score_group  {"samples": [request, ...], "rewards": [...]}       {"rewards": [...]} or {"failed": reason}
    GET /health        counts of requests by outcome

Consumes requests of actors, of ``remote`` rewards and of any other client; runs the reward as an actor does, with the same limits.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tidemill.bus.http.access import Access, Route, TokenAccess
from tidemill.bus.http.bodies import body_in, json_in
from tidemill.bus.http.listener import Listener
from tidemill.bus.system.coroutines import Waiter, ended
from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import GroupRequest
from tidemill.rewards.port import RewardRequest, Scorer
from tidemill.rewards.registry import MAX_THREADS, checked
from tidemill.rewards.request_json import to_request
from tidemill.rewards.scorers.groups import GroupScorer

SCORE, SCORE_GROUP = "/score", "/score_group"
MAX_WAITING = 4096
"""Calls at a time; a further one is answered by 503, which clients repeat later."""
MAX_RUNNING = MAX_THREADS
"""Calls of the reward at a time; further ones wait, since a reward in threads fails beyond its limit."""
ALIVE_S = 5.0
"""Seconds after which, and between, blanks that show a client that its call is alive."""
NO_RESULT = "no result in time"


class RewardServer:
    """The requests of one reward, or of a reward of groups, or of both; and their counts."""

    def __init__(
        self, name: str, score: Scorer | None, group_score: GroupScorer | None = None, *, token: str = "", access: Access | None = None
    ) -> None:
        """``access``: the keys that requests need; None = the bearer token ``token`` alone, and none where it is empty."""
        self._name, self._access = name, access or TokenAccess(token, self._note_refused)
        self._score, self._group_score = score, group_score
        self.counts: Counter[str] = Counter()
        """Requests by outcome: scored, failed, refused, busy."""
        self.running = 0
        """Calls of the reward at this moment."""
        self._places = asyncio.Semaphore(MAX_RUNNING)
        self._draining = False
        self._changed = Waiter()

    def listener(self) -> Listener:
        """Return its routes as a listener."""
        one, group = Route.request(self._answer_one), Route.request(self._answer_group)
        return Listener({f"POST {SCORE}": one, f"POST {SCORE_GROUP}": group, "GET /health": Route.open(self._health)}, self._access)

    async def drain(self) -> None:
        """Refuse further requests, and return when no call is running."""
        self._draining = True
        while self.running:
            await self._changed.wait()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"reward": self._name, "running": self.running, **self.counts})

    async def _answer_one(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, "reward", self._score, request_in)

    async def _answer_group(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, "rewards", self._group_score, group_in)

    async def _answer(
        self, http: web.Request, word: str, score: Callable[[Any], Awaitable[object]] | None, read: Callable[[Any], object]
    ) -> web.StreamResponse:
        if score is None:
            return self._reply(404, "refused", f"this server has no reward for {http.path}")
        try:
            request = read(json_in(body_in(http)))
        except ValueError as error:
            return self._reply(400, "refused", str(error)[:1000])
        if self._draining or self.running >= MAX_WAITING:
            return self._reply(503, "busy", "it drains" if self._draining else f"{self.running} calls are running")
        self.running += 1
        try:
            return await self._alive(http, asyncio.create_task(self._outcome(word, score, request)))
        finally:
            self.running -= 1
            self._changed.wake()

    async def _outcome(self, word: str, score: Callable[[Any], Awaitable[object]], request: object) -> dict[str, object]:
        """Return the answer of a call, once there is a place for it."""
        try:
            async with self._places:
                reward = await score(request)
        except TimeoutError:
            self.counts["failed"] += 1
            return {"failed": NO_RESULT}
        except RewardFailed as error:
            self.counts["failed"] += 1
            return {"failed": error.reason[:1000]}
        self.counts["scored"] += 1
        return {word: reward}

    async def _alive(self, http: web.Request, answering: "asyncio.Task[dict[str, object]]") -> web.StreamResponse:
        """Answer at once when the answer is there; until then with a blank every ``ALIVE_S``, which JSON may begin with."""
        try:
            if (await asyncio.wait({answering}, timeout=ALIVE_S))[0]:
                return web.json_response(answering.result())
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(http)
            while not answering.done():
                await response.write(b" ")
                await asyncio.wait({answering}, timeout=ALIVE_S)
            await response.write(json.dumps(answering.result()).encode())
            await response.write_eof()
            return response
        finally:
            await ended(answering)

    def _note_refused(self, reason: str) -> None:
        self.counts["refused"] += 1

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
        "sampled_length": (int, "a whole number", found.get("response_length", 0)),
        "num_turns": (int, "a whole number", 1),
        "transcript": (list, "a list of messages", []),
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


def group_in(found: Any) -> GroupRequest:
    """Return the request for a group in decoded JSON. Raises ValueError naming the field."""
    if not isinstance(found, Mapping):
        raise ValueError(f"want a map, got {type(found).__name__}")
    samples, rewards = found.get("samples"), found.get("rewards", [])
    if not isinstance(samples, list) or not samples:
        raise ValueError(f"samples: want a list of requests, got {samples!r}"[:300])
    if not isinstance(rewards, list) or len(rewards) not in (0, len(samples)):
        raise ValueError(f"rewards: want a list, empty or one for each of {len(samples)} samples, got {rewards!r}"[:300])
    try:
        given = tuple(checked(f"rewards[{place}]", reward) for place, reward in enumerate(rewards))
    except RewardFailed as error:
        raise ValueError(str(error)) from None
    return GroupRequest(samples=tuple(map(request_in, samples)), rewards=given)


@asynccontextmanager
async def serving(server: RewardServer, host: str, port: int, *, advertise: str = "", insecure: bool = False) -> AsyncIterator[str]:
    """Serve while entered; yields the URL. ``insecure``: other machines may ask without a key of a run.

    Raises OSError for an address that cannot be taken.
    """
    listener = server.listener()
    try:
        yield await listener.start(host, port, advertise=advertise, insecure=insecure)
    finally:
        await listener.close()
