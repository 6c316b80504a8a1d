"""Catch-up: how an engine reaches the current version when it starts, and after pushes that it missed.

version < head  ->  the head's adapter alone, on the weights that the engine holds
                ->  or a peer that serves the head  ->  or a snapshot of the learner  ->  download, verify, load
                    (a push that arrives meanwhile is as good)
"""

import asyncio
import hashlib
import logging
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tidemill.bus.errors import BusError
from tidemill.bus.http.client import content_of, open_session
from tidemill.bus.keys import api_keys
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.functions import errors_as
from tidemill.bus.wire.rows import VersionRow
from tidemill.bus.wire.subjects import nonce
from tidemill.weightstore.errors import CatchUpTimeout, SnapshotBroken, SnapshotNotLoaded, SnapshotUnavailable
from tidemill.weightstore.store.registry import HEAD, SNAPSHOT, VersionRegistry
from tidemill.weightstore.store.snapshot_files import ASIDE, MANIFEST, SnapshotInfo, rename_into_place

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20  # Bytes that are received, or hashed, at a time
_MAX_MANIFEST_BYTES = 64 << 20
_READ_S = 30.0  # Deadline for the next bytes of a server
# Deadline of a connection: a new one gets through at once when a network is back, while TCP's repeats get rare
_CONNECT_S = 5.0
_TRIES = 3  # Downloads of a file with a wrong digest. An interrupted one is continued by the next ``fetch``.


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


# (directory, version, epoch): load a directory's weights, whole or not at all; it is removed afterwards
Load = Callable[[Path, int, int], Awaitable[None]]
# Called with a description of the thing that the engine waits for; "" = nothing any more
OnWait = Callable[[str], None]

# A request is repeated after this time: the learner does not retry a snapshot that it failed to write
_REQUEST_AGAIN_S = 2.0
_POLL_S = 0.5  # Interval of reading the row of the newest snapshot, besides the wake-ups


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """An engine that is brought to the head."""

    engine: str
    version: Callable[[], int]
    """Returns the version that it serves now; -1 = none."""
    load: Load
    directory: Path
    """Where snapshots are downloaded to."""
    on_wait: OnWait = lambda text: None
    """Called with the thing that is waited for; "" = nothing."""
    adapters: bool = False
    """It can load a version as an adapter on the weights that it holds."""


class _CatchUp:
    """Brings one engine to the head; remembers the last failure and the snapshots that could not be used."""

    def __init__(self, bus: Bus, joiner: Joiner) -> None:
        self._joiner, self._keys, self._view = joiner, api_keys(bus), LiveView(bus)
        self._registry, self._rows = VersionRegistry(bus), bus.rows("weights")
        self._refused: set[str] = set()  # URLs and directories that had no usable snapshot
        self._waits_for, self._failure = "the bus", ""

    @property
    def waits_for(self) -> str:
        """The thing that the engine waits for, with the last failure."""
        return f"{self._waits_for} (last failure: {self._failure})" if self._failure else self._waits_for

    async def reach_head(self) -> VersionRow | None:
        """Load the head or a later version from the first source that has one. Returns the head; None for none."""
        goal = await self._registry.head()
        while goal is not None and self._joiner.version() < goal.version:
            if not (await self._load_adapter(goal) or await self._load_from_peers(goal)):
                await self._load_from_learner(goal)
        return goal

    async def _load_adapter(self, goal: VersionRow) -> bool:
        """Load the adapter of the head alone. Returns False when there is none, or the engine holds other weights."""
        row = await self._registry.head() if self._joiner.adapters else None
        if row is None or row.version < goal.version or not row.adapter or row.adapter in self._refused:
            return False
        if await self._load_url(row, row.adapter):
            return True
        self._refused.add(row.adapter)
        return False

    async def _load_from_peers(self, goal: VersionRow) -> bool:
        """Load from the engines that serve the goal or a later version; True after the first success."""
        peers = [
            row
            for row in await self._view.alive("engine")
            if row.capabilities.peer_snapshots and row.phase == "serving" and row.version >= goal.version
        ]
        for peer in random.sample(peers, len(peers)):  # engines that start together do not all use the same peer
            if peer.id == self._joiner.engine:
                continue
            # The digest is part of the URL, so that a peer with another model under the same version number refuses.
            row = await self._registry.row(peer.version)
            if row is None or row.state != "published" or not row.digest:
                continue
            url = f"{peer.address}/snapshots/v{row.version}-{row.digest}"
            if url in self._refused:
                continue
            if await self._load_url(row, url):
                return True
            self._refused.add(url)
        return False

    async def _load_from_learner(self, goal: VersionRow) -> None:
        """Load the learner's newest snapshot if it is new enough; else request one, and wait at most 2 s for it."""
        newest = await self._registry.snapshot()
        if newest is None or newest.version < goal.version or newest.snapshot in self._refused:
            await self._request(goal, newest)
            return
        if newest.snapshot.startswith("http"):
            is_loaded = await self._load_url(newest, newest.snapshot)
        else:  # version 0: the model directory, if this machine has it at the same path
            directory = Path(newest.snapshot)
            is_loaded = await asyncio.to_thread(directory.is_dir) and await self._load_directory(newest, directory)
        if not is_loaded:
            self._refused.add(newest.snapshot)

    async def _request(self, goal: VersionRow, newest: VersionRow | None) -> None:
        """Request a snapshot, and wait until there is another one, a push was faster, or the request is due again."""
        self._report(f"a snapshot of version {goal.version} from the learner")
        await self._registry.request_snapshot(goal.version, self._joiner.engine, nonce())
        try:
            async with asyncio.timeout(_REQUEST_AGAIN_S), aclosing(self._rows.watch(SNAPSHOT, _POLL_S)) as changes:  # type: ignore[type-var]
                async for _ in changes:
                    if await self._registry.snapshot() != newest or self._joiner.version() >= goal.version:
                        return
        except TimeoutError:
            self._refused.clear()  # the learner has had the request: it may have written the same place anew

    async def _load_url(self, row: VersionRow, url: str) -> bool:
        """Download, verify and load a snapshot. Returns False when one of them failed."""
        directory = self._joiner.directory / f"v{row.version}"
        self._report(f"downloading version {row.version} from {url}")
        await asyncio.to_thread(_remove_partial, self._joiner.directory, directory)
        try:
            await fetch(url, directory, await self._keys.headers())
        except (SnapshotUnavailable, SnapshotBroken) as error:
            connected = isinstance(error, SnapshotBroken) or error.is_connected
            return self._failed("snapshot not fetched", str(error) if connected else f"{error}; cure: {_cure_of(url)}")
        try:
            return self._joiner.version() >= row.version or await self._load_directory(row, directory)
        finally:
            await asyncio.to_thread(_remove, directory)

    async def _load_directory(self, row: VersionRow, directory: Path) -> bool:
        """Load a snapshot that this machine can read. Returns False when the engine refused it."""
        self._report(f"loading version {row.version} from {directory}")
        try:
            with errors_as(lambda error: SnapshotNotLoaded(str(error))):  # the engine's, which are not known here
                await self._joiner.load(directory, row.version, row.epoch)
        except SnapshotNotLoaded as error:  # reported when the deadline has passed
            return self._failed("snapshot not loaded", str(error))
        return True

    def _report(self, text: str) -> None:
        self._waits_for = text
        self._joiner.on_wait(self.waits_for)

    def _failed(self, event: str, reason: str) -> bool:
        self._failure = reason
        _log.warning("%s engine=%s error=%s", event, self._joiner.engine, reason)
        return False


def _cure_of(url: str) -> str:
    """Return the likely cure where nothing answers at the address of a snapshot: another advertised address."""
    if "/snapshots/" in url:
        return "engine: --advertise ADDRESS that this machine reaches, at the engine with the snapshot"
    return "learner: --set weights.advertise=ADDRESS that this machine reaches"


def _remove_partial(among: Path, keep: Path) -> None:
    for path in among.glob(f"*{ASIDE}"):
        if path.name != keep.name + ASIDE:
            shutil.rmtree(path, ignore_errors=True)


def _remove(directory: Path) -> None:
    for path in (directory, directory.with_name(directory.name + ASIDE)):
        shutil.rmtree(path, ignore_errors=True)


# Returns whether the engine may take memory for weights now: one that shares the learner's accelerator only at certain
# times.
Allowed = Callable[[], Awaitable[bool]]

_FETCH_S = 600.0  # Deadline of one attempt of ``fetch_model``, which logs the reason and begins another one
GRACE_S = 10.0  # A push that is under way, or the next one, usually brings the engine to the head within this time


async def catch_up(bus: Bus, joiner: Joiner, *, deadline_s: float) -> VersionRow | None:
    """Bring the engine to the present head or later. Returns that head, None before the first.

    Pushes reach an engine that is catching up, so a ``load`` that raises is retried: a push may have come between.
    Raises CatchUpTimeout, which names the wait and the last failure; it may be called again.
    """
    engine = _CatchUp(bus, joiner)
    try:
        async with asyncio.timeout(deadline_s):
            return await engine.reach_head()
    except TimeoutError:
        raise CatchUpTimeout(deadline_s, engine.waits_for) from None
    finally:
        joiner.on_wait("")


async def fetch_model(bus: Bus, into: Path, *, engine: str, on_wait: OnWait = lambda text: None) -> None:
    """Download the newest version, a whole model directory, to ``into``, for a machine without a model. No deadline.

    ``on_wait``: called with the thing that is waited for, and after a failure with its reason.
    """
    at = -1

    async def copy(directory: Path, version: int, epoch: int) -> None:
        """Keep the loaded snapshot: its own directory is removed afterwards."""
        nonlocal at
        await asyncio.to_thread(shutil.copytree, directory, into, dirs_exist_ok=True)
        at = version

    joiner = Joiner(
        engine=engine, version=lambda: at, load=copy, directory=into.with_name(f"{into.name}-fetched"), on_wait=on_wait
    )
    while at < 0:
        try:
            await catch_up(bus, joiner, deadline_s=_FETCH_S)
        except (CatchUpTimeout, BusError) as error:
            _log.warning("no model yet, trying on engine=%s error=%s", engine, error)
        if at < 0:  # nothing published yet
            on_wait("version 0 from the learner")
            await asyncio.sleep(_POLL_S)


async def keep_up(
    bus: Bus,
    joiner: Joiner,
    *,
    deadline_s: float,
    stale: Callable[[bool], None],
    grace_s: float = GRACE_S,
    allowed: Allowed | None = None,
) -> None:
    """Catch up whenever the engine is behind the head for ``grace_s``, between ``stale(True)`` and ``stale(False)``.

    Runs until cancelled. Time in which ``allowed()`` is False does not count towards the grace period.
    """
    rows, behind_since, was_stale = bus.rows("weights"), 0.0, False
    while True:
        await asyncio.sleep(min(1.0, grace_s / 4))  # several looks within any grace period
        try:
            row, _ = await rows.read(HEAD)
            head = -1 if row is None else int(row.get("version", -1))
            if joiner.version() >= head or (allowed is not None and not await allowed()):
                behind_since = 0.0
                if was_stale and joiner.version() >= head:  # a push was faster
                    stale(was_stale := False)
                continue
            behind_since = behind_since or time.monotonic()
            if time.monotonic() - behind_since < grace_s:
                continue
            stale(was_stale := True)
            await catch_up(bus, joiner, deadline_s=deadline_s)
        except (CatchUpTimeout, BusError) as error:
            _log.warning("engine behind the head, trying on engine=%s error=%s", joiner.engine, error)
