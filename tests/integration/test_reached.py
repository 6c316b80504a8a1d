"""Calls to engines' addresses over real sockets: the engine itself, another process at its address, a closed port, and
a silent one.
"""

import asyncio
import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.bus_fixtures import BusOpener
from tests.tiny_models import write_tiny_model
from tidemill.actors.engines.address_checks import CURE, AddressChecker, OwnAddress, call
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import LiveRow


async def test_an_engine_answers_with_its_nonce_before_it_serves(tmp_path: Path) -> None:
    engine = BuiltinEngine(write_tiny_model(tmp_path))
    await asyncio.to_thread(engine.load)
    async with aiohttp.ClientSession() as session:
        url = await engine.start()
        try:
            assert engine.phase == "joining"
            assert await call(session, url, engine.nonce) == ""
            assert await call(session, url, "0" * 12) == "another process answers there (HTTP 503, another nonce)"
        finally:
            await engine.close()
        assert "Cannot connect" in await call(session, url, engine.nonce)
        assert await call(session, "no url", engine.nonce) != ""


async def test_another_process_and_a_silent_one_are_told_apart() -> None:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            assert await call(session, address, "abc") == "another process answers there (HTTP 200, no nonce)"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.2)) as session:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                assert "no answer in" in await call(session, f"http://127.0.0.1:{silent.getsockname()[1]}", "abc")
    finally:
        await runner.cleanup()


async def test_the_learner_s_verdict_arrives_in_the_engine(open_bus: BusOpener) -> None:
    engine = LiveRow(
        role="engine", id="e", host="h", pid=1, phase="serving", address="http://127.0.0.1:9", nonce="abc"
    )  # nothing listens there
    learner = LiveRow(role="learner", id="l", host="h", pid=2, phase="working")
    async with open_bus() as bus, HeartbeatPublisher(bus, engine) as row, HeartbeatPublisher(bus, learner) as heartbeat:
        own, changed = OwnAddress(bus, "abc"), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(AddressChecker(bus, heartbeat).run()), tasks.create_task(own.run(changed.set))]
            await changed.wait()
            while "no connection in" in own.trouble:  # this process stood still; it tries again
                changed.clear()
                await changed.wait()
            assert own.trouble.startswith("unreachable from learner l: Cannot connect to host 127.0.0.1")
            assert own.trouble.endswith(CURE)
            assert list(heartbeat.row.reached) == ["abc"]
            row.update(nonce="def")  # another process of this engine: nothing is known of it
            await until(bus, lambda rows: "abc" not in next(one for one in rows if one.role == "learner").reached)
            for task in working:
                task.cancel()
        assert dataclasses.replace(heartbeat.row, reached={}, release="") == learner


async def until(bus: Bus, what: Callable[[list[LiveRow]], bool]) -> None:
    view = LiveView(bus)
    async for _ in bus.rows("live").watch("learner.l", 0.2):
        if what(await view.alive()):
            return
