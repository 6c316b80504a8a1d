"""The one HTTP server of all roles: incomplete requests are ended, bodies stay bounded, URLs can be used."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.refusals import refusal
from tests.unit.test_ground import PACKAGES, ROOT
from tests.waits import LIMIT_S
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.http.access import Route, RunAccess
from tidemill.bus.http.listener import BodyLimits, Listener, body_in, url_of
from tidemill.bus.keys import Keys, RunKeys


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=body_in(request))


@asynccontextmanager
async def listening(*, headers_s: float = LIMIT_S, body_s: float = LIMIT_S) -> AsyncIterator[str]:
    limits = BodyLimits(one_bytes=1000, whole_s=body_s)
    listener = Listener({"POST /echo": Route.request(echo)}, RunAccess(None), limits=limits, headers_s=headers_s)
    try:
        yield await listener.start("127.0.0.1", 0)
    finally:
        await listener.close()


async def said_to(url: str, sent: bytes) -> bytes:
    """Send bytes and no more. Returns everything received until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        writer.write(sent)
        async with asyncio.timeout(LIMIT_S):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "sent", [b"", b"POST /ec", b"POST /echo HTTP/1.1\r\nHost: h\r\nX-Slow: "], ids=["nothing", "a line", "a header"]
)
async def test_a_request_whose_headers_never_end_is_ended(sent: bytes) -> None:
    async with listening(headers_s=0.1) as url:
        assert await said_to(url, sent) == b""


async def test_the_second_request_of_a_connection_has_its_deadline_too() -> None:
    async with listening(headers_s=0.1) as url:
        sent = b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhiPOST /echo HT"
        while not (answer := await said_to(url, sent)):  # the first request was later than its own deadline
            pass
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"hi")


@pytest.mark.parametrize(
    "how",
    [b"Content-Length: 10\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"],
    ids=["length", "chunks"],
)
async def test_a_request_whose_body_never_ends_is_ended(how: bytes) -> None:
    async with listening(body_s=0.1) as url, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST /echo HTTP/1.1\r\nHost: h\r\n" + how)
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 408") and b"want all of it within 0.1 s" in answer
        writer.close()
        await writer.wait_closed()


async def test_bodies_are_bounded() -> None:
    async with listening() as url, aiohttp.ClientSession() as session:
        for size, status in ((1000, 200), (1001, 413)):
            async with session.post(f"{url}/echo", data=bytes(size)) as response:
                assert response.status == status


@pytest.mark.parametrize(
    ("host", "advertise", "without_key"),
    [
        ("127.0.0.1", "", 200),
        ("127.0.0.1", "127.0.0.1", 200),
        ("127.0.0.1", "localhost:30000", 200),
        ("127.0.0.1", "[::1]:30000", 200),
        ("localhost", "", 200),
        ("127.0.0.1", "gpu7.lab:30000", 401),
        ("127.0.0.1", "gpu7.lab", 401),
        ("127.0.0.1", "10.0.0.5", 401),
        ("127.0.0.1", "[fd00::5]:30000", 401),
        ("0.0.0.0", "127.0.0.1", 401),
        ("0.0.0.0", "", 401),
    ],
)
async def test_a_listener_that_others_reach_wants_the_key(host: str, advertise: str, without_key: int) -> None:
    """By its own address, or by another one that it advertises: a forwarded port brings requests from elsewhere to
    loopback.
    """
    keys = Keys.of("k" * 16)
    listener = Listener({"POST /echo": Route.request(echo)}, RunAccess(RunKeys.fixed(keys)))
    try:
        with KeptPort() as port:
            await listener.start(host, port.number, advertise=advertise)
            url = f"http://127.0.0.1:{port.number}/echo"
        async with aiohttp.ClientSession() as session:
            for headers, status in (({}, without_key), (keys.headers, 200)):
                async with session.post(url, data=b"", headers=headers) as response:
                    assert response.status == status
    finally:
        await listener.close()


@pytest.mark.parametrize(
    ("host", "advertise", "named"), [("0.0.0.0", "", "0.0.0.0"), ("127.0.0.1", "gpu7.lab:80", "gpu7.lab:80")]
)
async def test_without_keys_no_other_machine_may_ask(host: str, advertise: str, named: str) -> None:
    listener = Listener({"POST /echo": Route.request(echo)}, RunAccess(None))
    with refusal(ValueError, place="engine.host"):
        await listener.start(host, 0, advertise=advertise, name="engine.host")
    try:
        assert (await listener.start(host, 0, advertise=advertise, insecure=True)).startswith("http://")
    finally:
        await listener.close()


def test_only_the_listener_module_listens() -> None:
    """Deadlines, keys and bounds are in one place as long as there is no other server, but for one that only its own
    episodes ask: it runs in an interpreter that has nothing of Tidemill, on the loopback address, and knows a caller by
    the id of an episode.
    """
    found = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in Path(ROOT / package).rglob("*.py")
        if re.search(r"\b(AppRunner|TCPSite|run_app)\(", path.read_text())
    ]
    assert sorted(found) == ["actors/episodes/programs/verifiers_taskset.py", "bus/http/listener.py"]


def test_only_the_client_module_opens_sessions() -> None:
    """But for programs that run in interpreters that have nothing of Tidemill."""
    found = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in Path(ROOT / package).rglob("*.py")
        if re.search(r"\bClientSession\(", path.read_text())
    ]
    programs = [f"actors/episodes/programs/{name}.py" for name in ("slime_generate", "verifiers_taskset")]
    assert sorted(found) == [*programs, "bus/http/client.py"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.5", "http://10.0.0.5:80"),
        ("::1", "http://[::1]:80"),
        ("[fe80::1]", "http://[fe80::1]:80"),
        ("gpu7.lab", "http://gpu7.lab:80"),
        ("gpu7.lab:30000", "http://gpu7.lab:30000"),
        ("[::1]:9", "http://[::1]:9"),
    ],
)
def test_the_url_of_what_is_advertised(host: str, url: str) -> None:
    assert url_of(host, 80) == url
