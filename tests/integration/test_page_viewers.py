"""What the viewers of a page cost a run: requests that nats-server answers, and nothing that any process receives."""

import asyncio
import re

from tests.bus_fixtures import BusOpener
from tests.bus_kit import Proxy
from tests.page_kit import LIMIT_S, Run, page_of, routes_of
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire import subjects

PUBLISHED = re.compile(rb"^H?PUB (\S+)", re.MULTILINE)
READS = re.compile(
    r"\$JS\.API\.(INFO|STREAM\.(INFO|NAMES|LIST|MSG\.GET)|DIRECT\.GET|CONSUMER\.(CREATE|DELETE|INFO|MSG\.NEXT))\b"
)


async def test_viewers_send_reads_to_the_server_of_the_bus_and_no_process_anything(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """So a learner, feeder, actor or engine does the same work with and without them: a bound that no noise hides.

    Processes subscribe to inboxes of their own, and receive from streams: the former are not published to here, the
    latter stay as they are. The one other subject is answered by the process that started the bus, and a page requests
    it every five seconds for all its viewers.
    """
    async with open_bus() as bus:
        run = await Run(bus).begin()
        task = await run.task()
        seqs = [await run.sample(task, index) for index in range(2)]
        await run.plan({task.id: seqs})
        await run.done(1, data__reward_mean=0.5)
        before = await stored(bus)
        async with Proxy(nats_server.url) as proxy, connect(proxy.url, bus.run, name="dashboard", wait_s=60) as viewer:
            async with page_of(viewer, url=proxy.url) as page, asyncio.timeout(LIMIT_S):
                await page.until("run", lambda answer: answer["step"] == 1)
                query = {"seq": seqs[0], "task": task.id, "step": 1, "field": "response", "check": 1, "texts": 1}
                for route in routes_of(page):
                    if "/api/" in route:
                        await page.get(route.removeprefix("GET /api/"), **query)
                await page.until("flow", lambda answer: answer["audit"]["state"] == "checked")
        published = {subject.decode() for subject in PUBLISHED.findall(bytes(proxy.sent))}
        assert any("CONSUMER.MSG.NEXT" in subject for subject in published), published
        assert {subject for subject in published if not READS.match(subject)} == {subjects.full(bus.run)}
        assert await stored(bus) == before


async def stored(bus: Bus) -> dict[str, tuple[int, int]]:
    """Return the number of messages and the last sequence of each stream."""
    streams = await bus.nc.jetstream().streams_info()
    return {str(info.config.name): (info.state.messages, info.state.last_seq) for info in streams}


async def test_an_event_has_the_facts_of_the_overview_when_they_changed(open_bus: BusOpener) -> None:
    """So an open overview asks for nothing again."""
    async with open_bus() as bus:
        run = await Run(bus).begin()
        await run.done(1, data__reward_mean=0.5)
        async with page_of(bus) as page, asyncio.timeout(LIMIT_S):
            await page.until("run", lambda answer: answer["step"] == 1)
            await run.done(2, data__reward_mean=0.75)
            async for event in page.events():
                facts = event.get("overview", {"facts": []})["facts"]
                if any((fact["name"], fact["value"]) == ("reward", 0.625) for fact in facts):
                    break
