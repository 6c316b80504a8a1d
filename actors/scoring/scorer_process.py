"""The body of a scorer process: load the rewards of a run, serve them to its actors, drain. Needs only the URL of the
bus.

Consumes requests over HTTP; produces their answers, and a live row with its address, by which actors find it. Waits for
requests, and while it drains for the end of the accepted ones. Keeps no state: another scorer scores the samples of a
dead one.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.membership import config_of_run, connected, default_id, first_row, section
from tidemill.actors.scoring.scorer_pool import ROLE
from tidemill.actors.scoring.server import RewardServer, open_rewards, serving
from tidemill.bus.client.addresses import LOOPBACK, reach, route_to
from tidemill.bus.config import BusConfig
from tidemill.bus.http.access import RunAccess
from tidemill.bus.liveness.heartbeats import HeartbeatPublisher
from tidemill.bus.liveness.keys import api_keys
from tidemill.bus.system.coroutines import first_of

log = logging.getLogger(__name__)

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
