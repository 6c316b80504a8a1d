"""Connecting and staying connected."""

import asyncio
import errno
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.bus_fixtures import BusOpener
from tests.refusals import refusal
from tests.waits import LIMIT_S, turn, until
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.client.connection import Connection
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, BusUnavailable
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import SeveralRuns, connect, find_run


async def test_a_server_that_is_not_there_is_named_after_the_wait() -> None:
    with KeptPort() as free:
        url = f"nats://127.0.0.1:{free.number}"
        with refusal(
            BusUnavailable, where=f"connecting actor-1 to {url}", reason=re.compile(rf"\[Errno {errno.ECONNREFUSED}\]")
        ):
            async with connect(url, "r", name="actor-1", wait_s=2):
                pass


async def test_a_server_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, BusConfig())
    url = server.start()
    server.kill()  # it keeps its port

    async def opened() -> bool:
        async with connect(url, "r", name="early", wait_s=LIMIT_S) as bus:
            return bus.connected

    opening = asyncio.create_task(opened())
    await turn()
    server.start()
    try:
        assert await opening
    finally:
        server.stop()


async def test_a_lost_connection_comes_back(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        nats_server.kill()
        with pytest.raises(BusUnavailable):
            await bus.jet.call("INFO", retry_for_s=0.3)
        await until(lambda: not bus.connected)
        with refusal(BusUnavailable, where="bus", reason=re.compile(rf"\[Errno {errno.ECONNREFUSED}\]")):
            await bus.wait_connected(0.05)
        nats_server.start()
        await bus.wait_connected(LIMIT_S)
        assert (await bus.samples.info()).messages == 0


async def test_a_late_answer_to_the_flush_of_a_close_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library fails at an answer whose request was given up: it stops reading, and the close leaves tasks
    behind.
    """
    monkeypatch.setattr("tidemill.bus.client.connection._FLUSH_S", 0.1)
    monkeypatch.setattr("tidemill.bus.client.connection._CLOSE_S", 60.0)
    with EmbeddedServer(tmp_path, BusConfig()) as server:
        connection = Connection()
        await connection.open(server.url, "late", 10)
        client = connection.nc
        (reading,) = [task for task in asyncio.all_tasks() if "_read_loop" in repr(task)]
        close = client.close

        async def closed_after_the_answer() -> None:
            os.kill(server.pid, signal.SIGCONT)
            await until(lambda: not client._pongs or reading.done(), every_s=0.005)  # the library sends no event
            assert not reading.done()
            await close()

        monkeypatch.setattr(client, "close", closed_after_the_answer)
        os.kill(server.pid, signal.SIGSTOP)
        await connection.close()


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
async def test_a_cancelled_close_still_closes(nats_server: EmbeddedServer, steps: int) -> None:
    """The cancellation comes in the flush, whose answer would then end the library's reading, or in the library's
    close.
    """
    connection = Connection()
    await connection.open(nats_server.url, "cancelled", 10)
    await connection.nc.subscribe("any", cb=_ignored)
    closing = asyncio.create_task(connection.close())
    await turn(steps)
    cancelled = closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled() == cancelled
    assert connection.closed


@pytest.mark.parametrize("stores", [False, True])
async def test_a_publish_that_waits_for_a_full_socket_is_cancelled(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch, stores: bool
) -> None:
    """The client library waits in a publish when more than 2 MiB are unsent, and swallows the cancellation."""
    async with open_bus() as bus:
        transport, mebibyte = bus.nc._transport, bytes(1 << 20)
        flush, drain = bus.nc._flush_pending, transport.drain
        full, waits, room = asyncio.Event(), asyncio.Event(), asyncio.Event()
        with suppress(BusUnavailable):  # no stream
            await bus.jet.outbox.attempt("any", b"", {})  # it has its inbox now

        async def draining() -> None:
            """Wait for room. How much the kernel takes of what is unsent, and when, is not known."""
            full.set()
            await room.wait()
            await drain()

        async def flushing(force_flush: bool = False) -> object:
            if force_flush:
                waits.set()
            return await flush(force_flush)

        monkeypatch.setattr(transport, "drain", draining)
        monkeypatch.setattr(bus.nc, "_flush_pending", flushing)
        try:
            await bus.jet.connection.send("any")
            await full.wait()
            await bus.jet.connection.send("any", mebibyte)
            assert not waits.is_set()
            call = bus.jet.outbox.attempt("any", mebibyte, {}) if stores else bus.jet.connection.send("any", mebibyte)
            sending = asyncio.create_task(call)
            await waits.wait()
            await turn()
            assert not sending.done()
            sending.cancel()
            await asyncio.wait({sending}, timeout=60)
            assert sending.cancelled()
        finally:
            room.set()


async def _ignored(message: Msg) -> None: ...


async def test_a_call_is_repeated_over_an_outage_until_the_connection_is_closed(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    async with open_bus() as bus:
        failed = asyncio.Event()

        async def ask() -> int:
            try:
                return (await bus.jet.call(f"STREAM.INFO.TM_{bus.run}_SAMPLES", retry_for_s=0.2))["state"]["messages"]  # type: ignore[no-any-return]
            except BusUnavailable:
                failed.set()
                raise

        for retry in (bus.retry, bus.jet.retry_for_ever):
            failed.clear()
            nats_server.kill()
            asking = asyncio.create_task(retry(ask))
            await failed.wait()
            was_done = asking.done()
            nats_server.start()
            await bus.wait_connected(LIMIT_S)
            assert not was_done
            assert await asking == 0
    for retry in (bus.retry, bus.jet.retry_for_ever):
        with pytest.raises(BusUnavailable):
            await retry(ask)


async def test_a_closed_connection_raises(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        pass
    with pytest.raises(BusUnavailable):
        await bus.samples.info()


@asynccontextmanager
async def old_server(version: str) -> AsyncIterator[str]:
    """Run a server with the part of the NATS protocol that a client needs to connect."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = f'INFO {{"server_id":"x","version":"{version}","headers":true,"max_payload":1000,"proto":1}}\r\n'
        writer.write(info.encode())
        try:
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        finally:
            writer.close()
            gone.set()

    gone = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await gone.wait()
        await turn()


async def test_a_server_that_is_too_old_is_refused() -> None:
    async with old_server("2.9.10") as url:
        with refusal(BusError, place=re.compile("^connecting x to "), got="2.9.10"):
            async with connect(url, "r", name="x", wait_s=60):
                pass


async def test_a_bad_run_id_is_refused_before_anything_else() -> None:
    with refusal(ValueError, place="run"):
        async with connect("nats://127.0.0.1:1", "a.b", name="x"):
            pass


async def test_a_process_that_knows_only_the_url_finds_the_run(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    with refusal(BusUnavailable, where=f"run on {nats_server.url}"):
        await find_run(nats_server.url, name="early", wait_s=5.0)
    finding = asyncio.create_task(find_run(nats_server.url, name="early", wait_s=LIMIT_S))
    async with open_bus(run="first-run_1"):
        assert await finding == "first-run_1"
    async with open_bus(run="other"):
        with refusal(SeveralRuns, place="--run"):
            await find_run(nats_server.url, name="late", wait_s=LIMIT_S)


async def test_a_connection_lost_twice_in_a_moment_notifies_every_listener(open_bus: BusOpener) -> None:
    """The connection breaks, and is closed an iteration or two later, while the interrupted request is ending."""
    for turns in range(6):
        async with open_bus() as bus:
            connection, heard, asked = bus.jet.connection, list[int](), asyncio.Event()

            async def no_answer(message: object, asked: asyncio.Event = asked) -> None:
                asked.set()

            await connection.nc.subscribe(f"{bus.run}.asked", cb=no_answer)
            request = asyncio.create_task(connection.request(f"{bus.run}.asked", b"", 60))
            async with asyncio.timeout(LIMIT_S):
                await asked.wait()
            forget = connection.on_lost(lambda heard=heard: heard.append(1))
            await connection._on_disconnected()
            await turn(turns)
            await connection._on_closed()
            forget()
            with pytest.raises(BusUnavailable):
                await request
            assert (len(heard), connection.connected) == (2, False), turns


async def test_a_request_that_no_process_answers_is_cancelled_at_any_moment(open_bus: BusOpener) -> None:
    """Also when the server's answer (no responders) has arrived and is not read yet: the library's ``wait_for`` then
    forgets the cancellation. The view of a run asks so every second.
    """
    async with open_bus() as bus:
        ends = Counter[str]()
        for number in range(1500):
            asking = asyncio.create_task(bus.full())
            for _ in range(number % 60):  # an answer comes after 20 to 40 turns of the loop
                await turn()
            was_running = asking.cancel()
            await asyncio.wait({asking})
            ends["answered" if not was_running else "cancelled" if asking.cancelled() else "forgotten"] += 1
        assert ends["forgotten"] == 0 and ends["cancelled"] > 100 and ends["answered"] > 100, ends


async def test_a_client_library_that_swallows_a_cancellation_does_not_connect_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flush of nats-py does so: a refused TLS handshake at that moment was retried for ever."""
    cancelled: list[int] = []

    async def swallows(self: Client) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            if len(cancelled) > 2:
                raise
        raise OSError("not there")  # so that the library tries the next server

    monkeypatch.setattr(Client, "_select_next_server", swallows)

    async def opened() -> None:
        async with connect("nats://127.0.0.1:1", "r", name="a", wait_s=0.05):
            raise AssertionError("connected to nobody")

    opening = asyncio.create_task(opened())
    done, _ = await asyncio.wait({opening}, timeout=LIMIT_S)
    assert done and len(cancelled) == 3
    with refusal(BusUnavailable, where=re.compile("^connecting a to ")):
        await opening
