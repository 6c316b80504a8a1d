"""A node's checkpoint server against requests for files that it must not send, and the client against servers that send
something else.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.http.access import RunAccess
from tidemill.bus.http.listener import Listener
from tidemill.bus.keys import Keys, RunKeys
from tidemill.learner.checkpoints import disk, remote_files
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import BLOCK_BYTES
from tidemill.learner.checkpoints.node_copies import CheckpointServer
from tidemill.learner.checkpoints.remote_files import CheckpointFiles, Peer, PeerClient, PeerFailed
from tidemill.learner.errors import CheckpointCorrupt

KEYS = Keys.of("admin")
CONTENT = os.urandom(BLOCK_BYTES) + b"the second block"
NAME = "step-2-epoch-1"


def write(root: Path, step: int = 2) -> Path:
    tmp = disk.staging(root, step=step, epoch=1)
    (tmp / "__0_0.distcp").write_bytes(CONTENT)
    for name in manifests.METADATA - {"state.msgpack"}:
        (tmp / name).write_bytes(b"metadata")
    return disk.commit(tmp, b"state", extra={})


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[str]:
    """Give the URL of a server that asks for a key, over a root with one checkpoint, one unfinished, and files beside
    them.
    """
    root = tmp_path / "root"
    path = write(root)
    (path / "stray").write_text("not in the manifest")
    disk.staging(root, step=3, epoch=1).joinpath("__0_0.distcp").write_bytes(b"unfinished")
    (root / "secret").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    write(tmp_path / "other")
    access = RunAccess(RunKeys.fixed(KEYS))
    listener = Listener(CheckpointServer(root, node=1).routes, access)
    url = await listener.start("127.0.0.1", 0)
    access.is_public = True  # as on an address that other machines reach
    try:
        yield url
    finally:
        await listener.close()


@pytest.mark.parametrize(
    "path",
    [
        "/checkpoints/step-2-epoch-1/stray",
        "/checkpoints/step-2-epoch-1/../secret",
        "/checkpoints/step-2-epoch-1/..%2Fsecret",
        "/checkpoints/..%2Fsecret/x",
        "/checkpoints/%2E%2E/secret",
        "/checkpoints/..%2F..%2Fother%2Fstep-2-epoch-1/__0_0.distcp",
        "/checkpoints/step-2-epoch-1%2F..%2F..%2F..%2Fother%2Fstep-2-epoch-1/__0_0.distcp",
        "/checkpoints/step-2-epoch-1//etc/passwd",
        "/checkpoints/step-2-epoch-1/%2Fetc%2Fpasswd",
        "/checkpoints/step-2-epoch-1/__0_0.distcp%00",
        "/checkpoints/step-3-epoch-1.tmp/__0_0.distcp",
        "/checkpoints/step-3-epoch-1/__0_0.distcp",
        "/checkpoints/secret/secret",
        "/checkpoints/step-99999999999999999999999-epoch-1/x",
        "/secret",
        "/",
    ],
)
async def test_only_files_of_complete_checkpoints_are_sent(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as url:
        # A raw request: a client library would resolve the dots itself.
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {KEYS.api}\r\n\r\n"
        writer.write(request.encode())
        answer = await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
        assert answer.split(b" ", 2)[1] in (b"404", b"400"), answer[:200]
        assert b"secret\r\n" not in answer and CONTENT[:16] not in answer and b"root:" not in answer


async def test_a_symbolic_link_does_not_lead_outside(tmp_path: Path) -> None:
    """A manifest names it, so its name alone admits it."""
    async with serving(tmp_path) as url:
        path = tmp_path / "root" / NAME / "__0_0.distcp"
        path.unlink()
        path.symlink_to(tmp_path / "other" / NAME / "__0_0.distcp")
        async with aiohttp.ClientSession(headers=KEYS.headers) as session:
            async with session.get(f"{url}/checkpoints/{NAME}/__0_0.distcp") as answer:
                assert answer.status == 404


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer x", f"Basic {KEYS.api}"])
async def test_a_key_is_needed(tmp_path: Path, value: str) -> None:
    async with serving(tmp_path) as url:
        async with aiohttp.ClientSession(headers={"Authorization": value} if value else {}) as session:
            for path in ("/checkpoints", f"/checkpoints/{NAME}/manifest.json", f"/checkpoints/{NAME}/__0_0.distcp"):
                async with session.get(url + path) as answer:
                    assert answer.status == 401
            async with session.get(f"{url}/health") as answer:
                assert await answer.json() == {"node": 1}


async def test_ranges_and_held(tmp_path: Path) -> None:
    async with serving(tmp_path) as url:
        peer, client = Peer(node=1, url=url, key=KEYS.api), PeerClient([])
        path = f"/checkpoints/{NAME}/__0_0.distcp"
        for start, length in ((0, 1), (BLOCK_BYTES - 2, 4), (BLOCK_BYTES, 16)):
            data = await asyncio.to_thread(client.get, peer, path, most_bytes=length, span=(start, length))
            assert data == CONTENT[start : start + length]
        held = await asyncio.to_thread(remote_files.held_by, client, peer)
        assert held == {NAME: sorted({"__0_0.distcp", "manifest.json", *manifests.METADATA})}
        for span in ((len(CONTENT), 1), (0, len(CONTENT) * 2)):
            with pytest.raises(PeerFailed):
                await asyncio.to_thread(client.get, peer, path, most_bytes=1, span=span)
        with refusal(PeerFailed, peer=peer, reason=re.compile(r"\b404\b")):
            await asyncio.to_thread(client.get, peer, "/checkpoints/step-1-epoch-1/x", most_bytes=1)
        with refusal(PeerFailed, got="those of node 1"):
            await asyncio.to_thread(remote_files.held_by, client, Peer(node=2, url=url, key=KEYS.api))
        client.close()


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def whole(request: web.Request) -> web.Response:
    return web.Response(body=b"x" * 100_000)  # ignores the range


async def wrong(request: web.Request) -> web.Response:
    return web.Response(status=206, body=b"x" * 16)


async def short(request: web.Request) -> web.Response:
    return web.Response(status=206, body=b"x")


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(status=206)
    await answer.prepare(request)
    while True:
        await answer.write(b"x" * 65536)


async def hung_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("answer", [whole, wrong, short, endless, hung_up])
async def test_a_node_that_sends_something_else_is_passed_over(answer: Answer, tmp_path: Path, caplog: Any) -> None:
    async with serving(tmp_path) as url:
        app = web.Application()
        app.router.add_get("/{any:.*}", answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        bad = Peer(node=0, url=f"http://127.0.0.1:{runner.addresses[0][1]}")
        entry = (
            manifests.read(tmp_path / "root" / NAME).files["__0_0.distcp"].written_by([0])
        )  # the bad node is asked first
        client = PeerClient([Peer(node=1, url=url, key=KEYS.api), bad])
        files = CheckpointFiles(tmp_path / "empty" / NAME, {"__0_0.distcp": entry}, client)
        assert await asyncio.to_thread(files.block, "__0_0.distcp", 1) == CONTENT[BLOCK_BYTES:]
        assert "node 0" in caplog.text
        alone = CheckpointFiles(tmp_path / "empty" / NAME, {"__0_0.distcp": entry}, only_bad := PeerClient([bad]))
        with refusal(CheckpointCorrupt, directory=re.compile(r"step-2-epoch-1$"), file="__0_0.distcp"):
            await asyncio.to_thread(alone.block, "__0_0.distcp", 1)
        only_bad.close()
        client.close()
        await runner.cleanup()


async def test_an_empty_node_gets_what_it_needs(tmp_path: Path) -> None:
    """Metadata only, or all files; a manifest with another digest is refused, since Megatron's index in it is a
    pickle.
    """
    async with serving(tmp_path) as url:
        directory, client = tmp_path / "new" / NAME, PeerClient([Peer(node=1, url=url, key=KEYS.api)])
        with refusal(CheckpointCorrupt, file="manifest.json", got=re.compile(r"\bnode 1\b")):
            await asyncio.to_thread(remote_files.complete, directory, client, sha256="0" * 64)
        assert not directory.exists()
        digest = manifests.digest_of((tmp_path / "root" / NAME / "manifest.json").read_bytes())
        assert (
            set(await asyncio.to_thread(remote_files.complete, directory, client, sha256=digest)) == manifests.METADATA
        )
        assert await asyncio.to_thread(remote_files.complete, directory, client, sha256=digest) == []
        assert await asyncio.to_thread(remote_files.complete, directory, client, lambda files: list(files)) == [
            "__0_0.distcp"
        ]
        disk.verify(directory)
        client.close()
        assert [path.name for path in directory.parent.iterdir()] == [NAME]
