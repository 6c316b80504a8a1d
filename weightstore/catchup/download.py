"""Download of a snapshot over HTTP: resumed after an interruption, verified while it arrives, renamed when it is
complete."""

import asyncio
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from tidemill.bus.http.client import content_of, open_session
from tidemill.weightstore.errors import SnapshotBroken, SnapshotUnavailable
from tidemill.weightstore.store.snapshot_files import ASIDE, MANIFEST, SnapshotInfo, rename_into_place

_CHUNK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 64 << 20
"""Bytes that are received, or hashed, at a time."""
_READ_S = 30.0
"""Deadline for the next bytes of a server."""
_CONNECT_S = 5.0
"""Deadline of a connection: a new one gets through at once when a network is back, while TCP's repeats get rare."""
_TRIES = 3
"""Downloads of a file with a wrong digest. An interrupted one is continued by the next ``fetch``."""


async def fetch(url: str, directory: Path, headers: Mapping[str, str] | None = None) -> SnapshotInfo:
    """Download the snapshot at ``url`` into ``directory`` (not synced), continuing a partial download. Returns its
    manifest.

    Raises SnapshotUnavailable when there is none, its server is gone, or the disk refuses it (the partial download is
    removed then), SnapshotBroken when wrong bytes arrive in every attempt.
    """
    url = url.rstrip("/")
    aside = directory.with_name(directory.name + ASIDE)
    # A snapshot may be of any size, so only silence has a deadline. The digests are of the bytes on the wire:
    # nothing is unpacked.
    try:
        aside.mkdir(parents=True, exist_ok=True)
        async with open_session(connect_s=_CONNECT_S, read_s=_READ_S, unpack=False, headers=headers) as session:
            text = await _read(session, f"{url}/{MANIFEST}")
            info = SnapshotInfo.parse(f"{url}/{MANIFEST}", text)
            for name, (size, digest) in info.files.items():
                await _fetch_file(session, f"{url}/{name}", aside / name, size, digest)
        (aside / MANIFEST).write_bytes(text)
        for path in aside.iterdir():
            if path.name not in info.files and path.name != MANIFEST:  # of another snapshot, only partly downloaded
                path.unlink()
        rename_into_place(aside, directory, durable=False)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SnapshotUnavailable(url, str(error) or type(error).__name__, is_connected=False) from None
    except OSError as error:  # the disk is full
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
        raise SnapshotUnavailable(url, f"it cannot be written: {error}") from error
    return info


async def _fetch_file(session: aiohttp.ClientSession, url: str, path: Path, size: int, digest: str) -> None:
    for _ in range(_TRIES):
        received = await _resume(session, url, path, size)
        if received == digest:
            return
        await asyncio.to_thread(path.unlink)  # it holds bytes of another file: start over
    raise SnapshotBroken(url, f"SHA-256 {digest}", received)


async def _resume(session: aiohttp.ClientSession, url: str, path: Path, size: int) -> str:
    hashed = hashlib.sha256()
    with path.open("ab+") as file:
        # A name may have belonged to a larger file of another snapshot. A smaller one is found by its digest.
        if file.tell() > size:
            file.truncate(0)
        file.seek(0)
        while block := file.read(_CHUNK_BYTES):
            hashed.update(block)
        have = file.tell()
        if have == size:
            return hashed.hexdigest()
        async with session.get(url, headers={"Range": f"bytes={have}-"} if have else {}) as response:
            _check(url, response)
            if have and response.status != 206:  # the server sends the file from its start
                file.truncate(0)
                hashed = hashlib.sha256()
            async for block in response.content.iter_chunked(_CHUNK_BYTES):
                file.write(block)
                hashed.update(block)
    return hashed.hexdigest()


async def _read(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(url) as response:
        _check(url, response)
        try:
            return await content_of(response.content, _MAX_MANIFEST_BYTES)
        except ValueError as error:
            raise SnapshotBroken(url, "a manifest", str(error)) from None


def _check(url: str, response: Any) -> None:
    if response.status not in (200, 206):
        raise SnapshotUnavailable(url, f"HTTP {response.status}")
