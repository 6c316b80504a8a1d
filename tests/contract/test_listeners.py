"""Hostile requests at the real listeners of all roles: the key comes first, bodies are bounded, and refusals say
why.
"""

import asyncio
import io
import json
import logging
import re
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from tests.contract.test_bad_input import HALF, ODD
from tests.episode_kit import chat, stage, task
from tests.listeners import HERE, KEYS, ROLES, RUN, Place, engine, table
from tests.tiny_models import write_tiny_model
from tests.unit.test_ground import PACKAGES, ROOT
from tests.waits import LIMIT_S, until
from tidemill.actors.config import EngineConfig
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.http.access import Route, Rule, RunAccess
from tidemill.bus.http.listener import BodyLimits, Listener, body_in
from tidemill.launch.run.servers import run_teacher

GROWTH_BYTES = 64 << 20
"""Most memory that a process may gain by an attack: the attacks are of more than a gigabyte."""
BOMB_BYTES = 1 << 28
PARTS = "part of the weights in a rank, with a key of its own"
SECURITY = ROOT / "docs/security.md"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("listeners") / "model", max_position_embeddings=64)


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """Return some 250 kB of gzip that make ``BOMB_BYTES``: one megabyte of zeros again and again."""
    pack = zlib.compressobj(9, zlib.DEFLATED, 31)
    begin = pack.compress(bytes(1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH)
    again = pack.compress(bytes(1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH)
    return begin + again * (BOMB_BYTES >> 20)


class Client:
    """Raw requests to a listener."""

    def __init__(self, place: Place) -> None:
        self.place, self.port = place, int(place.url.rpartition(":")[2])

    async def sent(self, body: bytes, *headers: str, key: bool = True, line: str = "") -> tuple[int, bytes]:
        """Send a request of these bytes, and return status and text of the answer, with its headers."""
        keys = [f"{name}: {value}" for name, value in self.place.headers.items()] if key else []
        length = (
            [] if any("ength" in each or "chunked" in each for each in headers) else [f"Content-Length: {len(body)}"]
        )
        head = [
            line or f"{self.place.request} HTTP/1.1",
            "Host: localhost",
            "Connection: close",
            *keys,
            *headers,
            *length,
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body)
            async with asyncio.timeout(LIMIT_S):
                answer = await reader.readuntil(b"\r\n\r\n")
                length_of = re.search(rb"content-length: (\d+)", answer.lower())
                content = await reader.readexactly(int(length_of[1])) if length_of else b""
            return int(answer.split()[1]), answer + content
        finally:
            writer.close()


@asynccontextmanager
async def opened(role: str, model_dir: Path) -> AsyncIterator[Client]:
    async with ROLES[role](model_dir) as place:
        client = Client(place)
        await client.sent(
            b"", line="GET /health HTTP/1.1", key=False
        )  # a first request loads modules, which is no growth
        yield client


EVERY_ROLE = pytest.mark.parametrize("role", ROLES)
NESTED = b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}"
WIDE = b'{"a": [' + b"[]," * (1 << 20) + b"[]]}"


@EVERY_ROLE
async def test_a_compressed_body_is_refused_and_takes_no_memory(role: str, model_dir: Path, bomb: bytes) -> None:
    async with opened(role, model_dir) as client:
        before = psutil.Process().memory_info().rss
        for _ in range(4):
            status, answer = await client.sent(bomb, "Content-Encoding: gzip")
            assert (status, b"Content-Encoding: want" in answer) == (415, True), answer
            assert b"Accept-Encoding: identity" in answer
        if client.place.headers:
            assert (await client.sent(bomb, "Content-Encoding: gzip", key=False))[0] == 401
        for encoding in ("deflate", "br", "zstd", "gzip, identity", "GZIP", "x" * 500, "identity, deflate"):
            status, answer = await client.sent(b"junk", f"Content-Encoding: {encoding}")
            assert status == 415, (encoding, answer)
        assert (await client.sent(b"{}", "Content-Encoding: Identity"))[0] not in (415, 500)
        assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
        assert client.place.listener.bodies.held_bytes == 0


@EVERY_ROLE
async def test_without_the_key_no_body_is_read(role: str, model_dir: Path) -> None:
    """The answer comes although the body never does."""
    async with opened(role, model_dir) as client:
        if client.place.headers:
            bodies = [
                (b"x" * 100_000, "Content-Length: 40000000"),
                (b"", f"Content-Length: {10**12}"),
                (b"", "Transfer-Encoding: chunked"),
            ]
            for body, how in bodies:
                status, answer = await client.sent(body, how, key=False)
                assert status == 401, answer


@EVERY_ROLE
async def test_bodies_are_refused_by_their_announced_size_and_end_by_deadlines(role: str, model_dir: Path) -> None:
    async with opened(role, model_dir) as client:
        bodies = client.place.listener.bodies
        bodies.limits = replace(bodies.limits, one_bytes=1 << 20, stall_s=0.05)
        status, answer = await client.sent(b"", f"Content-Length: {(1 << 20) + 1}")
        assert (status, b"want at most 1048576 bytes" in answer) == (413, True), answer
        chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        assert (await client.sent(chunk * 2, "Transfer-Encoding: chunked"))[0] == 413
        for body, how in ((bytes(200_000), "Content-Length: 300000"), (chunk, "Transfer-Encoding: chunked")):
            status, answer = await client.sent(body, how)
            assert (status, b"want all of it within" in answer) == (408, True), answer
        assert bodies.held_bytes == 0


@EVERY_ROLE
async def test_malformed_requests_get_a_4xx_and_no_traceback(
    role: str, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(role, model_dir) as client:
        place = client.place
        odd: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((b"", f"X: {'a' * 9000}"), {}),
            ((b"", *(f"X-{number}: a" for number in range(300))), {}),
            ((b"",), {"line": f"GET /{'a' * 9000} HTTP/1.1"}),
            ((b"",), {"line": "G\x00T / HTTP/1.1"}),
            ((b"",), {"line": f"{place.request} HTTP/9.9"}),
            ((b"zz\r\n", "Transfer-Encoding: chunked"), {}),
            ((b"4\r\nab", "Transfer-Encoding: gzip, chunked", "Content-Length: 3"), {}),
            ((b"ab", "Content-Length: 2", "Content-Length: 3"), {}),
            ((b"ab", "Content-Length: -2"), {}),
            ((b"ab", "Content-Length: 1e3"), {}),
            ((b"", "Expect: something"), {}),
            ((b"{}", "Authorization: Bearer \xff\xfe"), {"key": False}),
            ((b"{}", "Authorization: Basic %%%"), {"key": False}),
        ]
        texts = (b"\xff\xfe", b"{", b"[", b"1", b'"a"', b"NaN", b"9" * 5000, b"[" * 100_000, NESTED, WIDE)
        odd += [((body,), {}) for body in texts if place.takes_json]
        with caplog.at_level(logging.DEBUG):
            for arguments, options in odd:
                status, answer = await client.sent(*arguments, **options)
                assert status != 500 and (status >= 400 or options.get("key") is False), (
                    arguments[0][:50],
                    arguments[1:],
                    options,
                    answer,
                )
        assert [record for record in caplog.records if record.exc_info] == []
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    "bodies", [(NESTED, b"at most 100 deep"), (WIDE, b"lists and maps (brackets)")], ids=["deep", "wide"]
)
@EVERY_ROLE
async def test_json_is_bounded_before_it_is_parsed(role: str, bodies: tuple[bytes, bytes], model_dir: Path) -> None:
    async with opened(role, model_dir) as client:
        if client.place.takes_json:
            status, answer = await client.sent(bodies[0])
            assert (status, bodies[1] in answer) == (400, True), answer


SCORE = {"prompt": "p", "response": "r", "label": "l"}
FIELDS: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    (
        "scorer",
        "POST /score",
        SCORE,
        ("status", "tokens", "metadata", "response_length", "sampled_length", "num_turns", "transcript"),
    ),
    ("scorer", "POST /score", SCORE, ("prompt", "response", "label", "unknown")),
    ("router of a run", "POST /add_worker", {}, ("url",)),
    ("router of a run", "POST /remove_worker", {}, ("url",)),
    ("router of a run", "POST /abort_request", {}, ("rid", "abort_all", "epoch")),
    (PARTS, "POST /differences", {"report": {}, "copy": 0}, ("report", "copy")),
    (PARTS, "POST /handles", {"copy": 0, "bucket": 0, "ranks": 1}, ("copy", "bucket", "ranks")),
    (
        PARTS,
        "POST /groups",
        {"name": "g", "world_size": 2, "backend": "no", "timeout_s": 5.0},
        ("world_size", "backend", "timeout_s"),
    ),
    (PARTS, "DELETE /groups/7", {}, ("unknown",)),
    (PARTS, "DELETE /tensors/7", {}, ("unknown",)),
]


@pytest.mark.parametrize(
    ("role", "route", "base", "fields"), FIELDS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_odd_fields_never_get_a_500(
    role: str, route: str, base: dict[str, Any], fields: tuple[str, ...], model_dir: Path
) -> None:
    """The other roles: ``tests/contract/test_bad_input.py``."""
    method, path = route.split()
    async with (
        opened(role, model_dir) as client,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session,
    ):
        for name in fields:
            for value in (*ODD, HALF, {"a": HALF}):
                body = json.dumps({**base, name: value}).encode()
                async with session.request(
                    method, client.place.url + path, data=body, headers=client.place.headers
                ) as response:
                    assert response.status < 500, (name, value, await response.text())


async def test_odd_calls_of_a_gateway_never_get_a_500(model_dir: Path) -> None:
    statuses = list[tuple[int, str, object]]()

    async def program(client: Any) -> float:
        calls = [
            ("/reward", {"turn": "x", "reward": 1.0}, ("turn", "reward")),
            ("/state", {}, ("stat",)),
            ("/truncated", {}, ("limit",)),
        ]
        calls += [
            (
                "/v1/chat/completions",
                chat(("user", "3"), max_tokens=1),
                ("messages", "stream", "tools", "model", "n", "temperature"),
            )
        ]
        for path, base, names in calls:
            for name in names:
                for value in (*ODD, HALF):
                    async with client.session.post(client.root + path, json={**base, name: value}) as response:
                        statuses.append((response.status, path, {name: value}))
        return 1.0

    async with stage(model_dir, program) as here:
        await here.rollout.sample(task(), 0, "n0")
    assert len(statuses) > 100 and [each for each in statuses if each[0] >= 500] == []


PATHS = (
    *(
        "/%2e%2e/x",
        "/..%2f..%2fetc",
        "/%00",
        "/a%0d%0ab",
        "/%ff%fe",
        "/../../../etc/passwd",
        "/file/x",
        "/file%00",
        "/.",
    ),
    *(
        f"/{'a' * 300}",
        f"/{'%2f' * 500}",
        f"/checkpoints/{'a' * 300}/x",
        "/checkpoints/%00/x",
        "/checkpoints/step-2-epoch-1/%00",
    ),
)


@EVERY_ROLE
async def test_odd_paths_and_ranges_never_get_a_500(role: str, model_dir: Path) -> None:
    async with opened(role, model_dir) as client:
        for path in PATHS:
            for header in ("X: y", "Range: bytes=5-2", "Range: bytes=x", "If-Modified-Since: junk", 'If-Range: "x'):
                status, answer = await client.sent(b"", header, line=f"GET {path} HTTP/1.1")
                assert 400 <= status < 500, (path, header, answer)


async def test_bodies_are_bounded_together_and_small_ones_pass() -> None:
    """A request that waits holds its body until its end."""
    held, going = asyncio.Event(), asyncio.Event()

    async def hold(request: web.Request) -> web.Response:
        held.set()
        if len(body_in(request)) > 200_000:
            await going.wait()
        return web.Response()

    listener = Listener(
        {"POST /": Route.request(hold)}, RunAccess(None), limits=BodyLimits(one_bytes=1 << 20, all_bytes=1 << 20)
    )
    url = await listener.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:

            async def post(size: int) -> tuple[int, Mapping[str, str]]:
                async with session.post(url, data=io.BytesIO(bytes(size))) as response:
                    return response.status, response.headers

            first = asyncio.create_task(post(900_000))
            await held.wait()
            assert listener.bodies.held_bytes == 900_000
            status, headers = await post(180_000)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert (await post(60_000))[0] == 200
            going.set()
            assert (await first)[0] == 200
            assert (await post(1 << 20))[0] == 200
            assert listener.bodies.held_bytes == 0
    finally:
        await listener.close()


# -- keys


async def test_a_teacher_has_no_commands(model_dir: Path) -> None:
    """As ``tidemill teacher`` runs it: every command of an engine is unknown there, and it answers as before."""
    async with engine(model_dir) as place:
        commands = [route.split() for route, rule in place.listener.rules.items() if rule is Rule.COMMAND]
    assert ["POST", "/update_weights_from_disk"] in commands
    draining = asyncio.Event()
    with KeptPort() as kept:
        port = kept.number
    running = asyncio.create_task(
        run_teacher(model_dir, EngineConfig(host="127.0.0.1", port=port), draining, drain_s=1.0)
    )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:

            async def asked(method: str, path: str, body: Any) -> int:
                async with session.request(method, f"http://127.0.0.1:{port}{path}", json=body) as response:
                    return response.status

            async def healthy() -> bool:
                with suppress(aiohttp.ClientError):
                    return await asked("GET", "/health", None) == 200
                return False

            await until(healthy)
            body = {"model_path": str(model_dir), "weight_version": "7", "mode": "in_place"}
            for method, path in commands:
                assert await asked(method, path, body) == 404, path
            assert await asked("POST", "/abort_request", {"abort_all": True}) == 403
            assert await asked("POST", "/weights_checksums", {"epoch": 10**9}) == 403
            scores = {
                "input_ids": [5, 6],
                "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            assert await asked("POST", "/generate", scores) == 200
    finally:
        draining.set()
        await running


@EVERY_ROLE
async def test_every_route_asks_for_the_key_of_its_rule(role: str, model_dir: Path) -> None:
    """Every route is tried without a key, with another one, and, where it is a command, with the api key."""
    async with opened(role, model_dir) as client:
        for route, rule in client.place.listener.rules.items():
            method, path = re.sub(r"\{[^{}]*\}", "x", route).replace("*", "POST").split()
            wants = rule is Rule.COMMAND or (rule is Rule.REQUEST and client.place.headers)
            for headers in (
                [],
                ["Authorization: Bearer wrong"],
                [f"Authorization: Bearer {KEYS.api}"] if rule is Rule.COMMAND else [],
            ):
                status, answer = await client.sent(b"{}", *headers, line=f"{method} {path} HTTP/1.1", key=False)
                assert (status in (401, 403)) == bool(wants), (route, headers, answer)


def test_a_route_without_a_rule_cannot_be_made() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response()

    with pytest.raises(AttributeError):
        Listener({"POST /new": handler}, RunAccess(RUN))  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        Route(handler=handler)  # type: ignore[call-arg]


@pytest.mark.parametrize(("unguarded", "status"), [(False, 403), (True, 200)])
async def test_without_a_run_commands_are_refused_unless_that_is_said(unguarded: bool, status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response()

    listener = Listener(
        {"POST /c": Route.command(handler), "POST /r": Route.request(handler)}, RunAccess(None, unguarded=unguarded)
    )
    url = await listener.start(HERE.bind, 0)
    try:
        async with aiohttp.ClientSession() as session:
            for path, want in (("c", status), ("r", 200)):
                async with session.post(f"{url}/{path}") as response:
                    assert response.status == want
    finally:
        await listener.close()


async def test_the_table_of_routes_is_that_of_the_listeners(model_dir: Path) -> None:
    """``python -m tests.listeners`` prints it."""
    assert await table(model_dir) in SECURITY.read_text()


def test_every_construction_of_a_listener_is_a_role() -> None:
    """A listener that is made at another place is missing in ``ROLES``, and so in the table and in the attacks."""
    made = [(name, count) for name, text in sources() if (count := len(re.findall(r"\bListener\(", text)))]
    assert sorted(made) == [
        ("actors/episodes/gateway.py", 1),
        ("actors/router/server.py", 1),
        ("actors/scoring.py", 1),
        ("actors/serving/server.py", 1),
        ("launch/deploy/probes.py", 1),
        ("launch/metrics/prometheus.py", 1),
        ("launch/page/server.py", 1),
        ("learner/checkpoints/node_copies.py", 1),
        ("weightstore/push/snapshots.py", 1),
        ("weightstore/transport/part_server.py", 1),
    ]


SOCKETS = {
    "actors/episodes/programs/verifiers_taskset.py": "door of verifiers",
    "actors/serving/handles.py": "handles of weights",
    "learner/feed/feed_keys.py": "",  # inside the process
    "learner/feed/feed_server.py": "feeder to ranks",
    "learner/feed/sample_transfer.py": "each reader to ranks",
    "launch/deploy/rank_parents.py": "processes of a launcher on one node",
    "learner/nodes/own_row.py": "calls between nodes",
    "bus/client/addresses.py": "",  # keeps a port free, and listens to nothing
    "bus/http/listener.py": "HTTP of engines",
    "weightstore/transport/broadcast.py": "torch's store",
}
"""Modules that listen, with the row of "Sockets beside the bus" in ``docs/security.md``."""


def test_every_socket_that_listens_has_a_row() -> None:
    listens = re.compile(
        r"socket\.bind\(|requests\.bind\(|start_server\(|start_unix_server\(|TCPSite\(|UnixSite\(|http\.server|socketserver"
        r"|create_server\(|TCPStore\([^)]*True|\.listen\("
    )
    assert sorted(name for name, text in sources() if listens.search(text)) == sorted(SOCKETS)
    rows = SECURITY.read_text().partition("## Sockets beside the bus")[2].partition("\n## ")[0].lower()
    for file, row in SOCKETS.items():
        assert row.lower() in rows, file


def sources() -> list[tuple[str, str]]:
    return [
        (str(path.relative_to(ROOT)), path.read_text())
        for package in PACKAGES
        for path in sorted(Path(ROOT / package).rglob("*.py"))
    ]
