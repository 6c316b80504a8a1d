"""The engine's way to the head: what a process does when it starts, and when pushes have passed it by.

version < head  ->  want a snapshot of the head  ->  wait for its URL  ->  download, verify, load  ->  look again
                    (a push may bring the engine to the head meanwhile: then all is well, too)
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bus.connection import Bus
from bus.errors import BusError
from bus.messages import VersionRow
from bus.nonce import nonce
from weightstore.download import fetch
from weightstore.errors import CatchUpTimeout, SnapshotBroken, SnapshotUnavailable
from weightstore.registry import HEAD, VersionRegistry
from weightstore.snapshot import ASIDE

_log = logging.getLogger(__name__)

Load = Callable[[Path, int, int], Awaitable[None]]
"""(directory, version, epoch): take the weights of a directory, whole or not at all. The directory is removed afterwards."""
Say = Callable[[str], None]

_ASK_AGAIN_S = 2.0
GRACE_S = 10.0


async def catch_up(
    bus: Bus, *, engine: str, version: Callable[[], int], load: Load, directory: Path, deadline_s: float, say: Say = lambda text: None
) -> VersionRow | None:
    """Bring the engine to the head; the head, None when nothing has been published yet.

    ``version()`` is what the engine serves now, ``say`` is told what is waited for ("" = nothing). Raises CatchUpTimeout saying what it
    was; call again then. What ``load`` raises comes through.
    """
    catcher = _Catcher(bus, engine, version, load, directory, say)
    try:
        async with asyncio.timeout(deadline_s):
            return await catcher.run()
    except TimeoutError:
        raise CatchUpTimeout(deadline_s, catcher.waits_for) from None
    finally:
        say("")


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
) -> None:
    """For ever: when the head has been ahead for ``grace_s`` with no push arriving, be ``stale(True)``, catch up, be ``stale(False)``."""
    rows, behind_since = bus.rows("weights"), 0.0
    while True:
        await asyncio.sleep(min(1.0, grace_s / 4))
        try:
            found = await rows.get(HEAD)
            head = -1 if found is None else int(found[0].get("version", -1))
            if version() >= head:
                behind_since = 0.0
                continue
            behind_since = behind_since or time.monotonic()
            if time.monotonic() - behind_since < grace_s:
                continue
            stale(True)
            await catch_up(bus, engine=engine, version=version, load=load, directory=directory, deadline_s=deadline_s, say=say)
            stale(False)
            behind_since = 0.0
        except (CatchUpTimeout, BusError) as error:
            _log.warning("engine behind the head, trying on engine=%s error=%s", engine, error)


class _Catcher:
    def __init__(self, bus: Bus, engine: str, version: Callable[[], int], load: Load, directory: Path, say: Say) -> None:
        self._rows, self._registry = bus.rows("weights"), VersionRegistry(bus)
        self._engine, self._version, self._load, self._directory, self._say = engine, version, load, directory, say
        self._refused: set[str] = set()
        """Where snapshots should have been and were not."""
        self.waits_for = "the bus"

    async def run(self) -> VersionRow | None:
        while True:
            head = await self._registry.head()
            if head is None or self._version() >= head.version:
                return head
            if not head.snapshot or head.snapshot in self._refused:
                await self._ask(head)
            elif not await self._take(head):
                self._refused.add(head.snapshot)

    async def _ask(self, head: VersionRow) -> None:
        """Want a snapshot, and wait until the head changes (its snapshot is there, or it has moved on) or it is time to ask again."""
        self._waiting(f"a snapshot of version {head.version} from the learner")
        await self._registry.want(head.version, self._engine, nonce())
        try:
            async with asyncio.timeout(_ASK_AGAIN_S):
                async for _ in self._rows.watch(HEAD, _ASK_AGAIN_S / 4):
                    now = await self._registry.head()
                    if now != head or self._version() >= head.version:
                        return
        except TimeoutError:
            self._refused.clear()  # the learner has heard of it: the same place may be good by now

    async def _take(self, head: VersionRow) -> bool:
        """Load the snapshot; False when it cannot be had where it should be."""
        if not head.snapshot.startswith("http"):
            path = Path(head.snapshot)
            if not await asyncio.to_thread(path.is_dir):
                return False
            self._waiting(f"loading version {head.version} from {path}")
            await self._load(path, head.version, head.epoch)
            return True
        directory = self._directory / f"v{head.version}"
        self._waiting(f"downloading version {head.version} from {head.snapshot}")
        try:
            await fetch(head.snapshot, directory)
        except (SnapshotUnavailable, SnapshotBroken) as error:
            _log.warning("snapshot not fetched engine=%s error=%s", self._engine, error)
            return False
        try:
            if self._version() < head.version:  # a push may have been faster
                self._waiting(f"loading version {head.version}")
                await self._load(directory, head.version, head.epoch)
        finally:
            await asyncio.to_thread(_remove, directory)
        return True

    def _waiting(self, text: str) -> None:
        self.waits_for = text
        self._say(text)


def _remove(directory: Path) -> None:
    for path in (directory, directory.with_name(directory.name + ASIDE)):
        shutil.rmtree(path, ignore_errors=True)
