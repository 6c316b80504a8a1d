"""The body of a router process: find engines on the bus, if there is one, and serve until drained."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace

from tidemill.actors.engines.membership import connected, default_id, first_row
from tidemill.actors.engines.witness import Witness
from tidemill.actors.router.config import RouterConfig
from tidemill.actors.router.server import Router
from tidemill.bus.client.addresses import reach, route_to
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness.heartbeats import HeartbeatPublisher, LiveView
from tidemill.bus.liveness.keys import admin_keys
from tidemill.bus.system.coroutines import first_of

log = logging.getLogger(__name__)

UPDATE_EVERY_S = 1.0
"""Seconds between two updates of the live row."""


async def run_router(config: RouterConfig, bus_url: str, run: str, id: str, draining: asyncio.Event, *, drain_s: float) -> None:
    """Serve until ``draining`` is set. Without ``bus_url`` the router knows only the engines added by hand, and no keys.

    Raises BusUnavailable when there is no bus within five minutes, ValueError for a middleware that does not exist.
    """
    async with AsyncExitStack() as stack:
        bus, view, heartbeat, keys = None, None, None, None
        if bus_url:
            bus = await connected(stack, bus_url, run, BusConfig(), name=f"router {id}".strip(), draining=draining)
            if bus is None:
                return
            view, keys = LiveView(bus), admin_keys(bus)
            heartbeat = await stack.enter_async_context(HeartbeatPublisher(bus, first_row("router", id or default_id())))
            route = await asyncio.to_thread(route_to, bus_url)
            at = reach(config.host, config.advertise, replace(route, is_here=True), name="router.host")  # it may serve this machine alone
            config = replace(config, host=at.bind, advertise=at.advertised)
        router = Router(config, view, keys)
        url = await router.start()
        log.info("listening url=%s", url)
        try:
            witness = [] if bus is None or heartbeat is None else [Witness(bus, heartbeat).run()]
            await first_of(_update_heartbeat(router, heartbeat), router.failed(), *witness, draining.wait())
        finally:
            await router.close(drain_s)


async def _update_heartbeat(router: Router, heartbeat: HeartbeatPublisher | None) -> None:
    while True:
        if heartbeat is not None:
            seen = router.engines.overview()
            serving = sum(each["serving"] for each in seen)
            load = {"workers": len(seen), "serving": serving, "in_flight": router.in_flight, "sessions": len(router.forwarder.sessions)}
            phase = "serving" if serving else "waiting"
            heartbeat.update(phase=phase, waits_for="" if serving else "an engine that serves", address=router.url, load=load)
        await asyncio.sleep(UPDATE_EVERY_S)
