"""An actor's bus behind a leaf node and in another region: what works, and what is said where it cannot."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.bus_kit import make_sample, make_task
from tests.nats_servers import started_server
from tests.waits import until
from tidemill.actors.engines.membership import connected
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusUnavailable
from tidemill.bus.streams.bus import connect, find_run
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.servers import check_servers

RUN = "r"
CURE = "default_js_domain"


@asynccontextmanager
async def hub_and_leaf(directory: Path, *of_leaf: str) -> AsyncIterator[tuple[str, str]]:
    """Yield the URLs of a hub, whose streams are in the domain ``hub``, and of a leaf node of it."""
    with KeptPort() as port:
        jetstream = f'jetstream {{ domain: hub, store_dir: "{directory}/hub" }}'
        leaf = f"leafnodes {{ remotes: [{{ urls: [nats-leaf://127.0.0.1:{port.number}] }}] }}"
        listen = f"leafnodes {{ listen: 127.0.0.1:{port.number} }}"
        async with (
            started_server(directory, "hub", jetstream, listen) as hub,
            started_server(directory, "leaf", leaf, *of_leaf) as url,
        ):
            await until(lambda: "Leafnode connection created" in (directory / "leaf.log").read_text())
            async with connect(hub, RUN, name="learner") as bus:
                await bus.create_layout()
            yield hub, url


async def test_an_actor_behind_a_leaf_node_with_the_hubs_domain_works(tmp_path: Path) -> None:
    async with (
        hub_and_leaf(tmp_path, 'default_js_domain: { "$G": hub }') as (hub, leaf),
        connect(hub, RUN, name="learner") as learner,
    ):
        await learner.tasks.fence(1)
        await learner.tasks.issue(make_task(RUN))
        assert await find_run(leaf, name="actor", wait_s=30) == RUN
        async with connect(leaf, RUN, name="actor") as bus:
            lease = await bus.tasks.lease(60)
            assert lease is not None
            assert await bus.samples.publish(make_sample(RUN, task=lease.task.id)) == 1
            await lease.ack()
        assert (await learner.samples.fetch(1)).task == lease.task.id
        report = Report()
        check_servers(report, "bus.url", [leaf])
        assert not report.errors


async def test_a_leaf_node_with_plain_defaults_is_named_with_the_cure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hub_and_leaf(tmp_path) as (_, leaf):
        report = Report()
        await asyncio.to_thread(check_servers, report, "bus.url", [leaf])
        (error,) = report.errors
        assert CURE in error.text
        with pytest.raises(BusUnavailable, match=CURE):
            await find_run(leaf, name="actor", wait_s=30)
        assert CURE in await said_by_an_actor(leaf, caplog)


async def test_a_leaf_node_with_a_jetstream_of_its_own_is_named_with_the_cure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = f'jetstream {{ domain: leaf, store_dir: "{tmp_path}/leaf" }}'
    async with hub_and_leaf(tmp_path, own) as (_, leaf):
        assert CURE in await said_by_an_actor(leaf, caplog)


async def said_by_an_actor(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """Return the first warning of an actor that connects there."""
    caplog.clear()
    draining = asyncio.Event()
    async with AsyncExitStack() as stack:
        with caplog.at_level(logging.WARNING):
            connecting = asyncio.create_task(
                connected(stack, url, RUN, BusConfig(), name="actor", draining=draining), name="actor"
            )
            message = await until(lambda: [line for line in caplog.messages if "JetStream" in line])
        draining.set()
        assert await connecting is None
    return str(message[0])


async def test_a_run_reaches_over_the_gateway_between_two_regions(tmp_path: Path) -> None:
    """Streams are in one region; a client of the other one leases, publishes and reads through the gateway.

    Each region has JetStream: the servers of a super-cluster elect one leader, and a single one has no majority.
    """
    names = ("east", "west")
    with ExitStack() as stack:
        gates, routes = ({name: stack.enter_context(KeptPort()).number for name in names} for _ in range(2))
        others = ", ".join(f"{{ name: {name}, url: nats://127.0.0.1:{port} }}" for name, port in gates.items())

        def lines(name: str) -> tuple[str, str, str]:
            route = f"127.0.0.1:{routes[name]}"
            return (
                f'jetstream {{ store_dir: "{tmp_path}/{name}" }}',
                f"cluster {{ name: {name}, listen: {route}, routes: [nats-route://{route}] }}",
                f"gateway {{ name: {name}, listen: 127.0.0.1:{gates[name]}, gateways: [{others}] }}",
            )

        async with (
            started_server(tmp_path, "east", *lines("east")) as near,
            started_server(tmp_path, "west", *lines("west")) as far,
            connect(near, RUN, name="learner") as learner,
        ):
            await learner.jet.retry_for_ever(learner.create_layout)
            info = await learner.jet.call(f"STREAM.INFO.TM_{RUN}_SAMPLES")
            assert info["cluster"]["name"] == "east"
            await learner.tasks.fence(1)
            await learner.tasks.issue(make_task(RUN))
            async with connect(far, RUN, name="actor") as bus:
                lease = await bus.tasks.lease(60)
                assert lease is not None
                assert await bus.samples.publish(make_sample(RUN, task=lease.task.id)) == 1
                await lease.ack()
                assert [received.seq async for received in bus.samples.tail(last=9, follow=False)] == [1]
                assert await bus.rows("run").get("none") is None
            assert (await learner.samples.fetch(1)).task == lease.task.id
