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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tidemill.bus.errors import BusError
from tidemill.bus.http.client import content_of, open_session
from tidemill.bus.liveness.heartbeats import LiveView
from tidemill.bus.liveness.keys import api_keys
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.functions import errors_as
from tidemill.bus.wire.rows import VersionRow
from tidemill.bus.wire.subjects import nonce
from tidemill.weightstore.errors import CatchUpTimeout, SnapshotBroken, SnapshotNotLoaded, SnapshotUnavailable
from tidemill.weightstore.store.registry import HEAD, SNAPSHOT, VersionRegistry
from tidemill.weightstore.store.snapshot_files import ASIDE, MANIFEST, SnapshotInfo, rename_into_place

_log = logging.getLogger(__name__)

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


Load = Callable[[Path, int, int], Awaitable[None]]
"""(directory, version, epoch): load a directory's weights, whole or not at all; it is removed afterwards."""
OnWait = Callable[[str], None]
"""Called with a description of the thing that the engine waits for; "" = nothing any more."""

_REQUEST_AGAIN_S = 2.0
"""A request is repeated after this time: the learner does not retry a snapshot that it failed to write."""
_POLL_S = 0.5
"""Interval of reading the row of the newest snapshot, besides the wake-ups."""


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


class Loading:
    """Downloads a version into the engine's directory and loads it; remembers the last failure and the URLs that did
    not work."""

    def __init__(self, bus: Bus, joiner: Joiner) -> None:
        self.joiner, self._keys = joiner, api_keys(bus)
        self.refused: set[str] = set()
        """URLs and directories that had no usable snapshot."""
        self.waits_for, self.failure = "the bus", ""

    async def from_url(self, row: VersionRow, url: str) -> bool:
        """Download, verify and load a snapshot. Returns False when one of them failed."""
        directory = self.joiner.directory / f"v{row.version}"
        self.waiting(f"downloading version {row.version} from {url}")
        await asyncio.to_thread(_remove_partial, self.joiner.directory, directory)
        try:
            await fetch(url, directory, await self._keys.headers())
        except (SnapshotUnavailable, SnapshotBroken) as error:
            connected = isinstance(error, SnapshotBroken) or error.is_connected
            return self._failed("snapshot not fetched", error, cure="" if connected else cure_of(url))
        try:
            return self.joiner.version() >= row.version or await self.from_directory(row, directory)
        finally:
            await asyncio.to_thread(_remove, directory)

    async def from_directory(self, row: VersionRow, directory: Path) -> bool:
        """Load a snapshot that this machine can read. Returns False when the engine refused it."""
        self.waiting(f"loading version {row.version} from {directory}")
        try:
            with errors_as(
                lambda error: SnapshotNotLoaded(str(error))
            ):  # errors of the engine, which this package does not know
                await self.joiner.load(directory, row.version, row.epoch)
        except SnapshotNotLoaded as error:  # reported when the deadline has passed
            return self._failed("snapshot not loaded", error)
        return True

    def waiting(self, text: str) -> None:
        """Report ``text`` as the thing that the engine waits for."""
        self.waits_for = text
        self.joiner.on_wait(f"{text} (last failure: {self.failure})" if self.failure else text)

    def _failed(self, event: str, error: Exception, *, cure: str = "") -> bool:
        self.failure = f"{error}; cure: {cure}" if cure else str(error)
        _log.warning("%s engine=%s error=%s", event, self.joiner.engine, self.failure)
        return False


def cure_of(url: str) -> str:
    """Return the likely cure where nothing answers at the address of a snapshot: another advertised address."""
    if "/snapshots/" in url:
        return "engine: --advertise ADDRESS that this machine reaches, at the engine with the snapshot"
    return "learner: --set weights.advertise=ADDRESS that this machine reaches"


class AdapterSnapshot:
    """The adapter of the head alone, for an engine that holds the weights to which it is added."""

    def __init__(self, bus: Bus, loading: Loading) -> None:
        self._registry, self._loading = VersionRegistry(bus), loading

    async def load(self, goal: VersionRow) -> bool:
        """Download the newest adapter. Returns False when there is none, or the engine holds other weights."""
        row, refused = await self._registry.head() if self._loading.joiner.adapters else None, self._loading.refused
        if row is None or row.version < goal.version or not row.adapter or row.adapter in refused:
            return False
        if await self._loading.from_url(row, row.adapter):
            return True
        refused.add(row.adapter)
        return False


class Peers:
    """The engines that serve the goal or a later version and send snapshots of it."""

    def __init__(self, bus: Bus, loading: Loading) -> None:
        self._view, self._registry, self._loading = LiveView(bus), VersionRegistry(bus), loading

    async def load(self, goal: VersionRow) -> bool:
        """Download from one peer after another, in random order. Returns True after the first success."""
        alive = await self._view.alive("engine")
        peers = [
            row
            for row in alive
            if row.capabilities.peer_snapshots and row.phase == "serving" and row.version >= goal.version
        ]
        for peer in random.sample(peers, len(peers)):  # engines that start together do not all use the same peer
            if peer.id == self._loading.joiner.engine:
                continue
            # The digest is part of the URL, so that a peer with another model under the same version number refuses.
            row = await self._registry.row(peer.version)
            if row is None or row.state != "published" or not row.digest:
                continue
            url = f"{peer.address}/snapshots/v{row.version}-{row.digest}"
            if url in self._loading.refused:
                continue
            if await self._loading.from_url(row, url):
                return True
            self._loading.refused.add(url)
        return False


class LearnerSnapshot:
    """The newest snapshot of the learner; if the goal has no snapshot yet, one is requested and waited for."""

    def __init__(self, bus: Bus, loading: Loading) -> None:
        self._rows, self._registry, self._loading = bus.rows("weights"), VersionRegistry(bus), loading

    async def load(self, goal: VersionRow) -> bool:
        """Load the newest snapshot if it is new enough; else request one, wait at most 2 s for it, and return False."""
        newest = await self._registry.snapshot()
        if newest is None or newest.version < goal.version or newest.snapshot in self._loading.refused:
            await self._request(goal, newest)
            return False
        if await self._load(newest):
            return True
        self._loading.refused.add(newest.snapshot)
        return False

    async def _load(self, row: VersionRow) -> bool:
        if row.snapshot.startswith("http"):
            return await self._loading.from_url(row, row.snapshot)
        directory = Path(row.snapshot)  # version 0: the model directory, if this machine has it at the same path
        return await asyncio.to_thread(directory.is_dir) and await self._loading.from_directory(row, directory)

    async def _request(self, goal: VersionRow, newest: VersionRow | None) -> None:
        """Request a snapshot, and wait until there is another one, a push was faster, or the request is due again."""
        self._loading.waiting(f"a snapshot of version {goal.version} from the learner")
        await self._registry.request_snapshot(goal.version, self._loading.joiner.engine, nonce())
        try:
            async with asyncio.timeout(_REQUEST_AGAIN_S), aclosing(self._rows.watch(SNAPSHOT, _POLL_S)) as changes:  # type: ignore[type-var]
                async for _ in changes:
                    if await self._registry.snapshot() != newest or self._loading.joiner.version() >= goal.version:
                        return
        except TimeoutError:
            self._loading.refused.clear()  # the learner has had the request: it may have written the same place anew


def _remove_partial(among: Path, keep: Path) -> None:
    for path in among.glob(f"*{ASIDE}"):
        if path.name != keep.name + ASIDE:
            shutil.rmtree(path, ignore_errors=True)


def _remove(directory: Path) -> None:
    for path in (directory, directory.with_name(directory.name + ASIDE)):
        shutil.rmtree(path, ignore_errors=True)


Allowed = Callable[[], Awaitable[bool]]
"""Returns whether the engine may take memory for weights now: one that shares the learner's accelerator only at certain
times."""


"""Interval of asking for the first version."""
_FETCH_S = 600.0
"""Deadline of one attempt of ``fetch_model``, which logs the reason and begins another one."""
GRACE_S = 10.0
"""A push that is under way, or the next one, usually brings the engine to the head within this time."""


async def catch_up(bus: Bus, joiner: Joiner, *, deadline_s: float) -> VersionRow | None:
    """Bring the engine to the present head or later. Returns that head, None before the first.

    Pushes reach an engine that is catching up, so a ``load`` that raises is retried: a push may have come between.
    Raises CatchUpTimeout, which names the wait and the last failure; it may be called again.
    """
    loading = Loading(bus, joiner)
    try:
        async with asyncio.timeout(deadline_s):
            return await _reach_head(
                VersionRegistry(bus),
                joiner.version,
                [AdapterSnapshot(bus, loading), Peers(bus, loading), LearnerSnapshot(bus, loading)],
            )
    except TimeoutError:
        raise CatchUpTimeout(
            deadline_s, loading.waits_for + (f" (last failure: {loading.failure})" if loading.failure else "")
        ) from None
    finally:
        joiner.on_wait("")


async def _reach_head(
    registry: VersionRegistry, version: Callable[[], int], sources: Sequence[AdapterSnapshot | Peers | LearnerSnapshot]
) -> VersionRow | None:
    goal = await registry.head()
    while goal is not None and version() < goal.version:
        for source in sources:
            if await source.load(goal):
                break
    return goal


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
