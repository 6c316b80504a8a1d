"""A server that hosts rewards, those of ``tidemill scorer`` and of ``tidemill reward-server``.

    POST /score        a request as JSON                                   {"reward": ...} or {"failed": reason}
    POST /score_group  {"samples": [request, ...], "rewards": [...]}       {"rewards": [...]} or {"failed": reason}
    GET /health        counts of requests by outcome

Consumes requests of actors, of ``remote`` rewards and of any other client; runs the reward as an actor does, with the
same limits.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct, structs

from tidemill.actors.body_decoder import decode
from tidemill.actors.config import ActorConfig
from tidemill.bus.http.access import Access, Route, TokenAccess
from tidemill.bus.http.bodies import body_in, json_in
from tidemill.bus.http.listener import Listener
from tidemill.bus.processes.limits import ProcessLimits
from tidemill.bus.system.coroutines import Waiter, ended
from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import GroupRequest
from tidemill.rewards.port import RewardRequest, Scorer, to_request
from tidemill.rewards.registry import MAX_THREADS, checked
from tidemill.rewards.scorers import GroupScorer, opened, opened_group, opened_parts

SCORE, SCORE_GROUP = "/score", "/score_group"
MAX_WAITING = 4096
"""Calls at a time; a further one is answered by 503, which clients repeat later."""
MAX_RUNNING = MAX_THREADS
"""Calls of the reward at a time; further ones wait, since a reward in threads fails beyond its limit."""
ALIVE_S = 5.0
"""Seconds after which, and between, blanks that show a client that its call is alive."""
NO_RESULT = "no result in time"


class ScoreBody(Struct, kw_only=True):
    """A request as JSON; only ``prompt`` and ``response`` must be there.

    The fields have the order of ``tidemill.rewards.port``.
    """

    prompt: str | list[Any]
    response: str
    label: Any = None
    status: str = Status.COMPLETED.value
    tokens: str = ""
    """Little-endian int32 in base64."""
    metadata: dict[str, Any] = {}
    response_length: int = 0
    sampled_length: int | None = None
    """None = ``response_length``."""
    num_turns: int = 1
    transcript: list[Any] = []

    def request(self) -> RewardRequest:
        """Return the request. Raises ValueError for an unknown status, and for tokens that are not base64."""
        sampled_length = self.response_length if self.sampled_length is None else self.sampled_length
        try:
            return to_request({**structs.asdict(self), "sampled_length": sampled_length})
        except ValueError as error:
            raise ValueError(f"status or tokens: {error}") from None


class ScoreGroupBody(Struct, kw_only=True):
    """A request for a group as JSON."""

    samples: Annotated[list[ScoreBody], Meta(min_length=1)]
    rewards: list[Any] = []
    """None, or one for each sample."""

    def __post_init__(self) -> None:
        """Raise ValueError for another number of rewards."""
        if len(self.rewards) not in (0, len(self.samples)):
            want = f"none, or one for each of {len(self.samples)} samples"
            raise ValueError(f"rewards: want {want}, got {len(self.rewards)}")

    def request(self) -> GroupRequest:
        """Return the request. Raises ValueError for rewards that no sample may have."""
        try:
            rewards = tuple(checked(f"rewards[{place}]", reward) for place, reward in enumerate(self.rewards))
        except RewardFailed as error:
            raise ValueError(str(error)) from None
        return GroupRequest(samples=tuple(sample.request() for sample in self.samples), rewards=rewards)


class RewardServer:
    """The requests of one reward, or of a reward of groups, or of both; and their counts."""

    def __init__(
        self,
        name: str,
        score: Scorer | None,
        group_score: GroupScorer | None = None,
        *,
        token: str = "",
        access: Access | None = None,
    ) -> None:
        """``access``: the keys that requests need; None = the bearer token ``token``, where it is not empty."""
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
        routes = {
            f"POST {SCORE}": Route.request(partial(self._answer, "reward", self._score, ScoreBody)),
            f"POST {SCORE_GROUP}": Route.request(partial(self._answer, "rewards", self._group_score, ScoreGroupBody)),
            "GET /health": Route.open(self._health),
        }
        return Listener(routes, self._access)

    async def drain(self) -> None:
        """Refuse further requests, and return when no call is running."""
        self._draining = True
        while self.running:
            await self._changed.wait()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"reward": self._name, "running": self.running, **self.counts})

    async def _answer(
        self,
        field: str,
        score: Callable[[Any], Awaitable[object]] | None,
        shape: type[ScoreBody] | type[ScoreGroupBody],
        http: web.Request,
    ) -> web.StreamResponse:
        if score is None:
            return self._reply(404, "refused", f"this server has no reward for {http.path}")
        try:
            request = decode(json_in(body_in(http)), shape).request()
        except ValueError as error:
            return self._reply(400, "refused", str(error)[:1000])
        if self._draining or self.running >= MAX_WAITING:
            return self._reply(503, "busy", "it drains" if self._draining else f"{self.running} calls are running")
        self.running += 1
        try:
            return await self._alive(http, asyncio.create_task(self._outcome(field, score, request)))
        finally:
            self.running -= 1
            self._changed.wake()

    async def _outcome(
        self, field: str, score: Callable[[Any], Awaitable[object]], request: object
    ) -> dict[str, object]:
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
        return {field: reward}

    async def _alive(self, http: web.Request, answering: "asyncio.Task[dict[str, object]]") -> web.StreamResponse:
        """Answer when the answer is there; until then with a blank every ``ALIVE_S``, with which JSON may begin."""
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


@asynccontextmanager
async def serving(
    server: RewardServer, host: str, port: int, *, advertise: str = "", insecure: bool = False
) -> AsyncIterator[str]:
    """Serve while entered; yields the URL. ``insecure``: other machines may ask without a key of a run.

    Raises OSError for an address that cannot be taken.
    """
    listener = server.listener()
    try:
        yield await listener.start(host, port, advertise=advertise, insecure=insecure)
    finally:
        await listener.close()


async def open_rewards(stack: AsyncExitStack, config: ActorConfig) -> tuple[Scorer | None, GroupScorer | None]:
    """Return the reward of samples and the reward of groups; None where there is none. ``stack`` closes them.

    Raises UnknownReward, BadRewardOption, RewardFailed (a process with the reward could not be started).
    """
    limits = ProcessLimits(
        timeout_s=config.reward_timeout_s, workers=config.reward_workers, memory_mb=config.reward_memory_mb
    )
    score: Scorer | None = None
    if config.reward_parts:
        score = await stack.enter_async_context(opened_parts([*config.reward_parts.values()], limits))
    elif config.reward or not config.group_reward:
        score = await stack.enter_async_context(opened(config.reward, config.reward_options, limits))
    group_score: GroupScorer | None = None
    if config.group_reward:
        group_score = await stack.enter_async_context(
            opened_group(config.group_reward, config.group_reward_options, limits)
        )
    return score, group_score
