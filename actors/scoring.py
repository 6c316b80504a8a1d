"""A server that hosts rewards, those of ``tidemill scorer`` and of ``tidemill reward-server``.

    POST /score        a request as JSON                                   {"reward": ...} or {"failed": reason}
    POST /score_group  {"samples": [request, ...], "rewards": [...]}       {"rewards": [...]} or {"failed": reason}
    GET /health        counts of requests by outcome

Consumes requests of actors, of ``remote`` rewards and of any other client; runs the reward as an actor does, with the
same limits.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct, structs

from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.membership import config_of_run, connected, default_id, first_row, section
from tidemill.actors.http_api import decode
from tidemill.bus.client.addresses import LOOPBACK, reach, route_to
from tidemill.bus.config import BusConfig
from tidemill.bus.http.access import Access, Route, RunAccess, TokenAccess
from tidemill.bus.http.listener import Listener, body_in, json_in
from tidemill.bus.keys import api_keys
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.system.coroutines import Waiter, ended, first_of
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import GroupRequest
from tidemill.rewards.port import RewardRequest, Scorer, to_request
from tidemill.rewards.registry import MAX_THREADS, checked
from tidemill.rewards.scorers import GroupScorer, opened, opened_group, opened_parts

log = logging.getLogger(__name__)

SCORE, SCORE_GROUP = "/score", "/score_group"
MAX_WAITING = 4096
"""Calls at a time; a further one is answered by 503, which clients repeat later."""
MAX_RUNNING = MAX_THREADS
"""Calls of the reward at a time; further ones wait, since a reward in threads fails beyond its limit."""
ROLE = "scorer"
"""Role of the scorers' live rows."""
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


NOT_ASKED = "actor.scorers.enabled: true; the actors of this run compute their rewards themselves"
"""Reason for waiting of a scorer in a run without scorers."""
UPDATE_EVERY_S = 1.0
"""Seconds between two updates of the live row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerPlace:
    """Where a scorer listens, and where actors reach it."""

    host: str = LOOPBACK
    """Address, or auto = the address of the interface that leads to the bus."""
    advertise: str = ""
    """Host, or host:port, if not ``host``."""
    port: int = 0
    """0 = any free port."""


async def run_scorer(
    bus_url: str,
    run: str,
    actor_config: ActorConfig | None,
    bus_config: BusConfig | None,
    draining: asyncio.Event,
    scorer_id: str | None = None,
    *,
    place: ScorerPlace | None = None,
    allowed: tuple[str, ...] = (),
) -> None:
    """Serve the rewards of ``run`` until ``draining`` is set and the accepted requests are answered.

    A config that is None is read from the bus (row run/config) once it is written. ``allowed``: see ``config_of_run``.
    In a run without scorers it waits, with the reason in its live row. Raises BusUnavailable when there is no bus
    within five minutes, NotFound when there is no config within five minutes, BadRow, NotAllowed, UnknownReward,
    BadRewardOption, RewardFailed, ValueError for an address that cannot be advertised, OSError for one that is not
    free.

    Keeps no state: another scorer scores the samples of a dead one.
    """
    scorer_id, place = scorer_id or default_id(), place or ScorerPlace()
    async with AsyncExitStack() as stack:
        bus = await connected(
            stack, bus_url, run, bus_config or BusConfig(), name=f"scorer {scorer_id}", draining=draining
        )
        if bus is None:
            return
        if actor_config is None:
            config_on_bus = await config_of_run(bus, draining, role=ROLE, id=scorer_id, allowed=allowed)
            if config_on_bus is None:
                return
            actor_config = section(config_on_bus, "actor", ActorConfig)
        if not actor_config.scorers.enabled:  # no error: `tidemill scale` may ask any run for scorers
            log.warning("not asked: %s", NOT_ASKED)
            row = replace(first_row(ROLE, scorer_id), phase="waiting", waits_for=NOT_ASKED)
            async with HeartbeatPublisher(bus, row):
                await draining.wait()
            return
        at = reach(place.host, place.advertise, await asyncio.to_thread(route_to, bus_url), name="actor.scorers.host")
        heartbeat = await stack.enter_async_context(HeartbeatPublisher(bus, first_row(ROLE, scorer_id)))
        score, group_score = await open_rewards(stack, actor_config)
        name = actor_config.reward or ", ".join(actor_config.reward_parts) or actor_config.group_reward
        server = RewardServer(name, score, group_score, access=RunAccess(api_keys(bus)))
        url = await stack.enter_async_context(serving(server, at.bind, place.port, advertise=at.advertised))
        log.info("serving reward=%s url=%s", name, url)
        heartbeat.update(phase="serving", address=url)
        await first_of(_update_heartbeat(heartbeat, server), draining.wait())
        heartbeat.update(phase="draining", waits_for=f"{server.running} requests")
        await server.drain()


async def _update_heartbeat(heartbeat: HeartbeatPublisher, server: RewardServer) -> None:
    while True:
        counts = {name: float(server.counts[name]) for name in ("scored", "failed", "refused", "busy")}
        heartbeat.update(load={**counts, "in_flight": float(server.running)})
        await asyncio.sleep(UPDATE_EVERY_S)
