"""Snapshots over HTTP: whole, resumed, torn, changed, gone."""

import errno
import re
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from safetensors.torch import load_file

from tests.receiver_app import digest, tiny_tensors, write_tiny_companions
from tests.refusals import refusal
from tests.web_server import web_server
from tidemill.weightstore.catch_up import fetch
from tidemill.weightstore.errors import SnapshotBroken, SnapshotUnavailable
from tidemill.weightstore.store import snapshot_files


@asynccontextmanager
async def served(directory: Path, requests: list[tuple[str, str]], *, ranges: bool = True) -> AsyncIterator[str]:
    """Serve the directory over HTTP and record the requests. Without ``ranges`` whole files are always sent."""

    async def get(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        requests.append((name, request.headers.get("Range", "")))
        if not (directory / name).exists():
            raise web.HTTPNotFound
        return web.FileResponse(directory / name) if ranges else web.Response(body=(directory / name).read_bytes())

    app = web.Application()
    app.router.add_get("/v1/{name}", get)
    async with web_server(app, shutdown_timeout=1) as url:
        yield f"{url}/v1"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = write_tiny_companions(tmp_path / "model")
    snapshot_files.write(
        tmp_path / "source", tiny_tensors(1, scale=10), version=1, step=9, model_dir=model, durable=False
    )
    return tmp_path / "source"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def test_a_fetched_snapshot_is_the_snapshot(source: Path, tmp_path: Path) -> None:
    async with served(source, []) as url:
        info = await fetch(url, tmp_path / "got")
    assert (info.version, info.step) == (1, 9)
    assert snapshot_files.verify(tmp_path / "got") == info
    assert contents(tmp_path / "got") == contents(source)
    assert not (tmp_path / "got.part").exists()


@pytest.mark.parametrize("ranges", [True, False])
async def test_what_an_interrupted_download_brought_is_used(source: Path, tmp_path: Path, ranges: bool) -> None:
    whole = (source / "model.safetensors").read_bytes()
    aside = tmp_path / "got.part"
    aside.mkdir()
    (aside / "config.json").write_bytes((source / "config.json").read_bytes())
    (aside / "model.safetensors").write_bytes(whole[:1000])
    (aside / "of-another-snapshot_files.bin").write_bytes(b"x")
    requests: list[tuple[str, str]] = []
    async with served(source, requests, ranges=ranges) as url:
        info = await fetch(url, tmp_path / "got")
    assert (
        snapshot_files.verify(tmp_path / "got") == info
        and not (tmp_path / "got" / "of-another-snapshot_files.bin").exists()
    )
    assert [each for each in requests if each[0] == "model.safetensors"] == [("model.safetensors", "bytes=1000-")]
    assert "config.json" not in [name for name, _ in requests]


async def test_a_full_disk_is_a_snapshot_that_cannot_be_had_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with served(source, []) as url:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((source / "model.safetensors").stat().st_size // 2, hard))
        try:
            with refusal(SnapshotUnavailable, reason=re.compile(rf"\[Errno {errno.EFBIG}\]")):
                await fetch(url, tmp_path / "got")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not (tmp_path / "got.part").exists() and not (tmp_path / "got").exists()
        await fetch(url, tmp_path / "got")


async def test_wrong_bytes_from_an_earlier_try_are_thrown_away(source: Path, tmp_path: Path) -> None:
    aside = tmp_path / "got.part"
    aside.mkdir()
    (aside / "model.safetensors").write_bytes(b"\0" * 1000)
    (aside / "config.json").write_bytes(b"much longer than it should be")
    async with served(source, []) as url:
        await fetch(url, tmp_path / "got")
    assert digest(load_file(tmp_path / "got" / "model.safetensors")) == digest(tiny_tensors(1, scale=10))


async def test_a_snapshot_that_is_changed_on_the_server_never_gets_its_name(source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    async with served(source, []) as url:
        with refusal(SnapshotBroken, file=re.compile(r"model\.safetensors$")):
            await fetch(url, tmp_path / "got")
        assert not (tmp_path / "got").exists()
        path.write_bytes(path.read_bytes()[:-7])
        with refusal(SnapshotBroken, file=re.compile(r"model\.safetensors$")):
            await fetch(url, tmp_path / "got")
    assert not (tmp_path / "got").exists()


async def test_a_snapshot_or_a_server_that_is_gone_is_unavailable(source: Path, tmp_path: Path) -> None:
    async with served(source, []) as url:
        (source / "model.safetensors").unlink()
        with refusal(SnapshotUnavailable, url=f"{url}/model.safetensors", reason=re.compile(r"\b404$")):
            await fetch(url, tmp_path / "got")
        (source / snapshot_files.MANIFEST).unlink()
        with refusal(SnapshotUnavailable, url=f"{url}/manifest.json", reason=re.compile(r"\b404$")):
            await fetch(url, tmp_path / "got")
    with refusal(SnapshotUnavailable, url=url, is_connected=False):
        await fetch(url, tmp_path / "got")
    assert not (tmp_path / "got").exists()


async def test_a_manifest_cannot_name_files_elsewhere(source: Path, tmp_path: Path) -> None:
    path = source / snapshot_files.MANIFEST
    path.write_text(path.read_text().replace('"config.json"', '"../config.json"'))
    async with served(source, []) as url:
        with refusal(SnapshotBroken, got="'../config.json'"):
            await fetch(url, tmp_path / "got")
