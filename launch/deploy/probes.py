"""``--probes``: a listener of one process for whatever supervises it, such as a kubelet, a load balancer or Prometheus.

    heartbeats of this process --at each request--> GET /healthz, /readyz, /metrics

``/healthz`` answers while the event loop runs. ``/readyz`` has 200 while the process does its work, else 503 and the
reason. ``/metrics`` has the live row of this process by the dictionary of metrics; the steps of the run are in
``tidemill metrics prometheus``. No route changes anything, and none asks the bus.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence

from aiohttp import web

from tidemill.bus.config import is_loopback
from tidemill.bus.http.access import Route, TokenAccess, refusal
from tidemill.bus.http.listener import Listener
from tidemill.bus.liveness import HeartbeatPublisher, observed_heartbeats
from tidemill.launch.metrics.prometheus import (
    ALIVE_S,
    LOOPBACK_NAMES,
    TOKEN_VARIABLE,
    FoundSeries,
    RunCollector,
    exposition,
)
from tidemill.launch.settings import extras
from tidemill.launch.settings.config_loader import SettingsError

log = logging.getLogger(__name__)

Main = Callable[[asyncio.Event], Coroutine[object, None, None]]
_LONGEST_REASON = 500
# Phases in which a process does its work, by role. An actor waits for tasks between two of them.
_AT_WORK: Mapping[str, Sequence[str]] = {
    "bus": ("serving",),
    "learner": ("working",),
    "engine": ("serving",),
    "actor": ("working", "waiting"),
    "scorer": ("serving",),
    "router": ("serving",),
    "host": ("working",),
}


def probed(main: Main, host: str, port: int, *, token: str) -> Main:
    """Return the body of a process with its probes. ``token``: of scrapes; empty = none from other machines."""

    async def with_probes(draining: asyncio.Event) -> None:
        with observed_heartbeats() as heartbeats:
            listener = Probes(heartbeats, draining).listener(host, token)
            try:
                log.info("probes url=%s", await _started(listener, host, port))
                await main(draining)
            finally:
                await listener.close()

    return with_probes


async def _started(listener: Listener, host: str, port: int) -> str:
    """Listen, and return the URL. Raises SettingsError for an address that cannot be bound."""
    try:
        return await listener.start(host, port, insecure=True)
    except OSError as error:
        want = "an address of this machine with a free port"
        raise SettingsError(f"--probes: want {want}, got {host}:{port}: {error.strerror}") from None


class Probes:
    """The answers, from the heartbeats that this process publishes."""

    def __init__(self, heartbeats: Sequence[HeartbeatPublisher], draining: asyncio.Event) -> None:
        self._heartbeats, self._draining = heartbeats, draining

    def listener(self, host: str, token: str) -> Listener:
        """Return the listener. Beyond loopback, ``/metrics`` needs a token; the probes of a kubelet have none."""
        routes = {
            "GET /healthz": Route.open(self._alive),
            "GET /readyz": Route.open(self._ready),
            "GET /metrics": Route.request(self._metrics if token or is_loopback(host) else _no_token),
        }
        return Listener(routes, TokenAccess(token, names=LOOPBACK_NAMES), shutdown_s=0.0)

    def not_ready(self) -> str:
        """Return why the process does not do its work; empty while it does."""
        if self._draining.is_set():
            return "it drains"
        if not self._heartbeats:
            return "it starts, and has no row on the bus yet"
        heartbeat = self._heartbeats[-1]
        row, silent_s = heartbeat.row, time.monotonic() - heartbeat.written_s
        if heartbeat.last_error or silent_s > ALIVE_S:
            return f"live row not written: {heartbeat.last_error or 'the bus has not answered'}"
        # An actor that waits for the configuration of the run is in the phase of one that waits for a task.
        is_at_work = row.phase in _AT_WORK[row.role] and (row.role != "actor" or bool(row.rollouts))
        return "" if is_at_work else f"{row.role} {row.id} is {row.phase}: {row.waits_for or 'it starts'}"

    def series(self) -> FoundSeries:
        """Return the numbers of the live row."""
        series = FoundSeries(self._heartbeats[-1].run if self._heartbeats else "")
        for heartbeat in self._heartbeats[-1:]:
            series.add_row(heartbeat.row, time.monotonic() - heartbeat.written_s)
        series.add("exporter/left_out", float(series.left_out))
        return series

    async def _alive(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        reason = " ".join(self.not_ready().split())[:_LONGEST_REASON]
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        try:
            extras.require("prometheus")
        except extras.PackagesMissing as error:
            raise refusal(web.HTTPNotImplemented, f"/metrics: {error}") from None
        return exposition(RunCollector(self.series), of_process=True)


async def _no_token(_: web.Request) -> web.Response:
    want = f"want {TOKEN_VARIABLE} set at the start of a process whose probes other machines reach"
    raise refusal(web.HTTPForbidden, f"/metrics: {want}, and as the bearer token of the scrape")
