"""The engine's way to the head: what a process does when it starts, and when pushes have passed it by.

version < head  ->  ask an engine that serves it  ->  or want a snapshot of it, wait for its URL  ->  download, verify, load
                    (a push may bring the engine there meanwhile: then all is well, too)

Where every version between has left what it changed (``VersionRow.delta``), an engine that can take that takes one after the other instead.
"""

import asyncio
import logging
import random
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from bus.connection import Bus
from bus.errors import BusError
from bus.keys import api_keys
from bus.live import LiveView
from bus.messages import VersionRow
from bus.nonce import nonce
from weightstore.download import fetch
from weightstore.errors import CatchUpTimeout, SnapshotBroken, SnapshotUnavailable
from weightstore.registry import HEAD, SNAPSHOT, VersionRegistry
from weightstore.snapshot import ASIDE

_log = logging.getLogger(__name__)

Load = Callable[[Path, int, int], Awaitable[None]]
"""(directory, version, epoch): take the weights of a directory, whole or not at all. The directory is removed afterwards."""
Say = Callable[[str], None]
May = Callable[[], Awaitable[bool]]

_ASK_AGAIN_S = 2.0
_LOOK_S = 0.5
_FETCH_S = 600.0
GRACE_S = 10.0
_LONGEST_CHAIN = 32
"""Versions behind, from which on whole weights are taken without looking further."""


async def catch_up(
    bus: Bus,
    *,
    engine: str,
    version: Callable[[], int],
    load: Load,
    directory: Path,
    deadline_s: float,
    say: Say = lambda text: None,
    deltas: bool = False,
) -> VersionRow | None:
    """Bring the engine to the head as it is now, or further; that head, None when nothing has been published yet.

    From there on the pushes carry it, for they reach engines that catch up, too. ``version()`` is what the engine serves now, ``say`` is
    told what is waited for ("" = nothing). With ``deltas`` the directory may be one (``weightstore.delta``) on what is served. A ``load``
    that raises is tried again: a push may have come between. Raises CatchUpTimeout saying what was waited for, and what went wrong last;
    call again then.
    """
    catcher = _Catcher(bus, engine, version, load, directory, say, deltas)
    try:
        async with asyncio.timeout(deadline_s):
            return await catcher.run()
    except TimeoutError:
        raise CatchUpTimeout(deadline_s, catcher.waits_for + (f" (last failure: {catcher.failure})" if catcher.failure else "")) from None
    finally:
        say("")


async def fetch_model(bus: Bus, into: Path, *, engine: str) -> None:
    """Put the newest version, a whole model directory, at ``into``: for a machine that has no model yet. Waits as long as it takes."""
    at = -1

    async def take(directory: Path, version: int, epoch: int) -> None:
        nonlocal at
        await asyncio.to_thread(shutil.copytree, directory, into, dirs_exist_ok=True)
        at = version

    while at < 0:
        try:
            directory = into.with_name(f"{into.name}-fetched")
            await catch_up(bus, engine=engine, version=lambda: at, load=take, directory=directory, deadline_s=_FETCH_S)
        except (CatchUpTimeout, BusError) as error:
            _log.warning("no model yet, trying on engine=%s error=%s", engine, error)
        if at < 0:  # nothing published yet
            await asyncio.sleep(_LOOK_S)


async def keep_up(
    bus: Bus,
    *,
    engine: str,
    version: Callable[[], int],
    load: Load,
    directory: Path,
    deadline_s: float,
    stale: Callable[[bool], None],
    say: Say = lambda text: None,
    grace_s: float = GRACE_S,
    deltas: bool = False,
    may: May | None = None,
) -> None:
    """For ever: when the head has been ahead for ``grace_s`` with no push arriving, be ``stale(True)``, catch up, be ``stale(False)``.

    Time in which it ``may`` not does not count; None = it always may.
    """
    rows, behind_since, was_stale = bus.rows("weights"), 0.0, False
    while True:
        await asyncio.sleep(min(1.0, grace_s / 4))
        try:
            found, _ = await rows.standing(HEAD)
            head = -1 if found is None else int(found.get("version", -1))
            if version() >= head or (may is not None and not await may()):
                behind_since = 0.0
                if was_stale and version() >= head:  # a push was faster
                    stale(was_stale := False)
                continue
            behind_since = behind_since or time.monotonic()
            if time.monotonic() - behind_since < grace_s:
                continue
            stale(was_stale := True)
            await catch_up(
                bus, engine=engine, version=version, load=load, directory=directory, deadline_s=deadline_s, say=say, deltas=deltas
            )
        except (CatchUpTimeout, BusError) as error:
            _log.warning("engine behind the head, trying on engine=%s error=%s", engine, error)


class _Catcher:
    def __init__(self, bus: Bus, engine: str, version: Callable[[], int], load: Load, directory: Path, say: Say, deltas: bool) -> None:
        self._rows, self._registry = bus.rows("weights"), VersionRegistry(bus)
        self._engine, self._version, self._load, self._directory, self._say = engine, version, load, directory, say
        self._view, self._deltas, self._keys = LiveView(bus), deltas, api_keys(bus)
        self._refused: set[str] = set()
        """Where snapshots should have been and were not."""
        self.waits_for, self.failure = "the bus", ""

    async def run(self) -> VersionRow | None:
        goal = await self._registry.head()
        while goal is not None and self._version() < goal.version:
            if await self._take_deltas(goal):
                continue
            if await self._take_from_engine(goal):
                continue
            found = await self._registry.snapshot()
            if found is None or found.version < goal.version or found.snapshot in self._refused:
                await self._ask(goal, found)
            elif not await self._take(found):
                self._refused.add(found.snapshot)
        return goal

    async def _ask(self, goal: VersionRow, found: VersionRow | None) -> None:
        """Want a snapshot, and wait until there is another one than ``found``, a push was faster, or it is time to ask again."""
        self._waiting(f"a snapshot of version {goal.version} from the learner")
        await self._registry.want(goal.version, self._engine, nonce())
        try:
            async with asyncio.timeout(_ASK_AGAIN_S), aclosing(self._rows.watch(SNAPSHOT, _LOOK_S)) as changes:  # type: ignore[type-var]
                async for _ in changes:
                    if await self._registry.snapshot() != found or self._version() >= goal.version:
                        return
        except TimeoutError:
            self._refused.clear()  # the learner has heard of it: the same place may be good by now

    async def _take_deltas(self, goal: VersionRow) -> bool:
        """Take what each version up to the goal has changed; False when one of them is missing, and whole weights are wanted."""
        chain = await self._chain(goal) if self._deltas and self._version() >= 0 else []
        for row in chain:
            if self._version() < row.version and not await self._fetch_and_load(row, row.delta, self._directory / f"v{row.version}-delta"):
                self._refused.add(row.delta)
                return False
        return bool(chain)

    async def _chain(self, goal: VersionRow) -> list[VersionRow]:
        """The rows of the versions that lead from what is served to the goal, oldest first; [] when they do not."""
        chain: list[VersionRow] = []
        at = goal.version
        while at > self._version() and len(chain) < _LONGEST_CHAIN:
            row = await self._registry.row(at)
            if row is None or not row.delta or row.delta in self._refused:
                return []
            chain.append(row)
            at = row.base
        return chain[::-1] if at == self._version() else []

    async def _take_from_engine(self, goal: VersionRow) -> bool:
        """Take the whole weights from one of the engines that serve the goal or a later version; False when none has them to give."""
        peers = [row for row in await self._view.alive("engine") if row.capabilities.peer_snapshots and row.phase == "serving"]
        for peer in random.sample(peers, len(peers)):  # so that those who come late together do not all ask the same one
            if peer.version < goal.version or peer.id == self._engine:
                continue
            row = await self._registry.row(peer.version)
            if row is None or row.state != "published" or not row.digest:
                continue
            url = f"{peer.address}/snapshots/v{row.version}-{row.digest}"
            if url in self._refused:
                continue
            if await self._fetch_and_load(row, url, self._directory / f"v{row.version}"):
                return True
            self._refused.add(url)
        return False

    async def _take(self, row: VersionRow) -> bool:
        """Load the snapshot; False when it cannot be had where it should be."""
        if not row.snapshot.startswith("http"):
            path = Path(row.snapshot)
            if not await asyncio.to_thread(path.is_dir):
                return False
            return await self._load_from(path, row)
        return await self._fetch_and_load(row, row.snapshot, self._directory / f"v{row.version}")

    async def _fetch_and_load(self, row: VersionRow, url: str, directory: Path) -> bool:
        self._waiting(f"downloading version {row.version} from {url}")
        await asyncio.to_thread(_remove_begun, self._directory, directory)
        try:
            await fetch(url, directory, await self._keys.headers())
        except (SnapshotUnavailable, SnapshotBroken) as error:
            self._failed("snapshot not fetched", error)
            return False
        try:
            return self._version() >= row.version or await self._load_from(directory, row)
        finally:
            await asyncio.to_thread(_remove, directory)

    async def _load_from(self, directory: Path, row: VersionRow) -> bool:
        self._waiting(f"loading version {row.version} from {directory}")
        try:
            await self._load(directory, row.version, row.epoch)
            return True
        except Exception as error:  # the engine's own errors: unknown here, told when time is up
            self._failed("snapshot not loaded", error)
            return False

    def _failed(self, what: str, error: Exception) -> None:
        _log.warning("%s engine=%s error=%r", what, self._engine, error)
        self.failure = str(error)

    def _waiting(self, text: str) -> None:
        self.waits_for = text
        self._say(text)


def _remove_begun(among: Path, but: Path) -> None:
    """What earlier tries have begun to download of other versions."""
    for path in among.glob(f"*{ASIDE}"):
        if path.name != but.name + ASIDE:
            shutil.rmtree(path, ignore_errors=True)


def _remove(directory: Path) -> None:
    for path in (directory, directory.with_name(directory.name + ASIDE)):
        shutil.rmtree(path, ignore_errors=True)
