"""``--probes``: whether a process lives and does its work, on a real bus."""

import asyncio
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.bus_fixtures import BusOpener
from tests.launched import tidemill
from tests.prometheus_kit import get, query, real_prometheus, scrape, wants_prometheus
from tests.refusals import refusal
from tests.waits import LIMIT_S, until
from tests.whole.prepared import put_prepared
from tests.whole.running import SMOKE
from tidemill.actors.engines.membership import first_row
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.liveness import HeartbeatPublisher, Waiting
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.launch.deploy import probes
from tidemill.launch.deploy.probes import Main
from tidemill.launch.settings.config_loader import SettingsError

URL = re.compile(r"probes url=(http://\S+)")


def url_in(log: str) -> str:
    """Return the address of the probes in a log; empty while it is not there."""
    match = URL.search(log)
    return match[1] if match else ""


Running = tuple[str, asyncio.Event]


@asynccontextmanager
async def process(
    main: Main, caplog: pytest.LogCaptureFixture, host: str = "127.0.0.1", token: str = ""
) -> AsyncIterator[Running]:
    """Run the body of a process with probes; yield their address, and the event that drains it."""
    caplog.set_level("INFO", probes.__name__)
    draining = asyncio.Event()
    task = asyncio.create_task(probes.probed(main, host, 0, token=token)(draining))
    try:
        url = await until(lambda: url_in(caplog.text), alive=lambda: not task.done())
        yield url.replace("0.0.0.0", "127.0.0.1"), draining
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_an_address_that_cannot_be_bound_ends_the_process_by_name() -> None:
    async def main(draining: asyncio.Event) -> None:
        await draining.wait()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refusal(SettingsError, place="--probes", got=re.compile(rf"^127\.0\.0\.1:{port}: ")):
            await probes.probed(main, "127.0.0.1", port, token="")(asyncio.Event())


async def test_a_process_is_ready_while_it_does_its_work(
    nats_server: EmbeddedServer, open_bus: BusOpener, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An actor starts, waits for the run's configuration, works, loses the bus, has it again, and drains."""
    connects, configured, leases = asyncio.Event(), asyncio.Event(), asyncio.Event()
    first = first_row("actor", "a")

    async def main(draining: asyncio.Event) -> None:
        await connects.wait()
        async with open_bus() as bus:
            async with Waiting(bus, first, "the configuration"):
                await configured.wait()
            async with HeartbeatPublisher(bus, first, every_s=0.2) as heartbeat:
                await leases.wait()
                heartbeat.update(phase="waiting", rollouts=("single_turn",), load={"failures": 2.0})
                await draining.wait()
                await until(lambda: not connects.is_set())

    async with process(main, caplog) as (url, draining):
        assert await get(f"{url}/healthz") == (200, "ok\n")
        assert await get(f"{url}/readyz") == (503, "it starts, and has no row on the bus yet\n")
        connects.set()
        status, text = await until(lambda: _waits(url, "the configuration, for"))
        assert status == 503 and text.startswith("actor a is waiting: "), text
        configured.set()
        assert (await until(lambda: _waits(url, "actor a is starting: it starts")))[0] == 503
        leases.set()
        assert (await until(lambda: _waits(url, "ok")))[0] == 200
        labels = f'{{host="{first.host}",id="a",role="actor",run="{run_id}"}}'
        status, text = await get(f"{url}/metrics")
        assert status == 200 and f"tidemill_process_up{labels} 1.0" in text
        assert f'tidemill_actor_failures_total{{id="a",run="{run_id}"}} 2.0' in text
        assert re.search(r"^process_cpu_seconds_total \d", text, re.MULTILINE)
        assert "tidemill_run_step" not in text, "an alert would take it for the step of the run"
        nats_server.kill()
        assert (await until(lambda: _waits(url, "live row not written")))[0] == 503
        assert (await get(f"{url}/healthz"))[0] == 200
        nats_server.start()
        assert (await until(lambda: _waits(url, "ok")))[0] == 200
        draining.set()
        assert await get(f"{url}/readyz") == (503, "it drains\n")
        connects.clear()


async def _waits(url: str, words: str) -> tuple[int, str] | None:
    status, text = await get(f"{url}/readyz")
    return (status, text) if words in text else None


@pytest.mark.parametrize(("token", "statuses"), [("", (403, 403)), ("s3cret", (401, 200))])
async def test_other_machines_read_metrics_by_a_token_alone(
    token: str, statuses: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    async def main(draining: asyncio.Event) -> None:
        await draining.wait()

    async with process(main, caplog, "0.0.0.0", token) as (url, _):
        assert (await get(f"{url}/healthz"))[0] == 200 and (await get(f"{url}/readyz"))[0] == 503
        assert (await get(f"{url}/metrics"))[0] == statuses[0]
        assert (await get(f"{url}/metrics", Authorization="Bearer s3cret"))[0] == statuses[1]
        async with aiohttp.ClientSession() as session, session.post(f"{url}/healthz") as answer:
            assert answer.status == (401 if token else 405)


async def test_an_actor_without_a_run_says_why_it_is_not_ready(open_bus: BusOpener, tmp_path: Path) -> None:
    log = tmp_path / "actor.log"
    async with open_bus() as bus:
        words = ("--bus", bus.connected_url, "--run", bus.run, "--id", "a", "--probes", "0")
        actor = await asyncio.to_thread(tidemill, "actor", *words, output=log)
        try:
            url = await until(lambda: url_in(log.read_text()), alive=lambda: actor.returncode is None)
            status, text = await until(lambda: _waits(url, f"the config of run {bus.run}"))
            assert status == 503 and text.startswith("actor a is waiting: "), text
            actor.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(actor.wait, LIMIT_S) == 0
        finally:
            actor.kill()
            actor.wait()


async def _is_ready(port: int) -> bool:
    try:
        return (await get(f"http://127.0.0.1:{port}/readyz"))[0] == 200
    except aiohttp.ClientError:  # it does not listen yet
        return False


@pytest.mark.slow
@wants_prometheus
async def test_a_real_prometheus_scrapes_every_role(tmp_path: Path) -> None:
    """The processes of a run, started one by one: all become ready, and Prometheus reads all of them."""
    put_prepared(SMOKE, tmp_path / "run")
    config = ["--config", str(SMOKE), "--set", f"directory={tmp_path / 'run'}", "--set", "learner.steps=1000000"]
    with ExitStack() as stack:
        ports: dict[str, int] = {}

        def start(role: str, *words: str) -> None:
            ports[role] = stack.enter_context(KeptPort()).number
            process = tidemill(role, *words, "--probes", str(ports[role]), output=tmp_path / f"{role}.log")
            stack.callback(process.wait)
            stack.callback(process.kill)

        await asyncio.to_thread(start, "bus", *config)
        address = tmp_path / "run/bus.url"
        await until(address.exists)
        bus = ["--bus", address.read_text().strip()]
        await asyncio.to_thread(start, "learner", *config, *bus)
        await asyncio.to_thread(start, "engine", *config, *bus)
        for role, words in (("actor", ()), ("router", ("--port", "0")), ("host", ("actors=0", "--dir", str(tmp_path)))):
            await asyncio.to_thread(start, role, *bus, *words)
        for port in ports.values():
            await until(partial(_is_ready, port))
        settings = {"scrape_configs": [scrape(role, port) for role, port in ports.items()]}
        with KeptPort() as theirs, real_prometheus(settings, theirs.number, tmp_path):

            async def has_all_roles() -> bool:
                rows = await query(theirs.number, "tidemill_process_up == 1 and on(instance) process_cpu_seconds_total")
                return {labels["job"] for labels, _ in rows if labels["job"] == labels["role"]} == set(ports)

            await until(has_all_roles)
