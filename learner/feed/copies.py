"""Checkpoints of several nodes, or with a store: the newest whole one at the start, the copies of each new one.

Waits for the keepers of the nodes (``learner/checkpoints/node_copies.py``) or for the uploads
(``learner/checkpoints/store_uploads.py``), without a deadline: a checkpoint with too few copies is not the latest, and
the log and the feeder's row report the missing copies.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from tidemill.bus.errors import BusUnavailable
from tidemill.bus.keys import api_keys
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.rows import Holder, Uploaded
from tidemill.learner.checkpoints import disk, remote_files
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.disk import choose, digests_in, short_of_copies
from tidemill.learner.checkpoints.manifest import MANIFEST, CheckpointManifest, FileEntry
from tidemill.learner.checkpoints.node_copies import INTERVAL_S, ROWS, held_below, holders
from tidemill.learner.checkpoints.object_store import OWNER, UNNAMED, ObjectStore
from tidemill.learner.checkpoints.remote_files import Peer, PeerClient, PeerFailed
from tidemill.learner.checkpoints.store_uploads import (
    MOST_PAUSE_S,
    SILENCE_S,
    Silence,
    Stored,
    claimed,
    foreign,
    identity_of,
    in_daemon,
    survey,
    uploaded,
)
from tidemill.learner.checkpoints.store_uploads import ROWS as UPLOADS
from tidemill.learner.errors import CheckpointCorrupt, ConfigRefused, NoCheckpoint, StoreFailed

log = logging.getLogger(__name__)

HOME = 0
"""Node of the feeder and of rank 0."""
STORE = -1
"""Stands for the store among the nodes that have files."""
_LOG_S = 30.0
"""Time between two lines of the log about missing copies."""
ASK_S = 600.0
"""Time for the answers of all nodes, whose keepers read and verify their disks first."""
T = TypeVar("T")
HeldFiles = dict[int, dict[str, list[str]]]
"""node -> checkpoint -> names of the files that it has."""


class Copies:
    """The checkpoints below ``root``; each node has its part of them."""

    def __init__(
        self,
        bus: Bus,
        root: Path,
        *,
        num_nodes: int,
        copies: int = 0,
        store: ObjectStore | None = None,
        ask_s: float = ASK_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        """``copies``: on nodes; not used with a store, which has every file of the latest checkpoint.

        ``ask_s``: time for the first answers. A node without one counts as lost; the error of a store is raised.
        ``silence_s``: time without an answer of the store after which the wait is reported, or fails after ``ask_s``.
        """
        self._bus, self._root, self._num_nodes, self._copies, self._ask_s = bus, root, num_nodes, copies, ask_s
        self._store, self._silence_s = store, silence_s
        self._manifests: dict[Path, tuple[Mapping[str, FileEntry], str]] = {}
        """Files and digest of the manifests of the checkpoints that wait for their copies."""
        self.waits_for = ""
        """The copies that a checkpoint waits for, or the answer that the start waits for; empty = none."""

    async def peers(self) -> list[Peer]:
        """Return all nodes that serve checkpoints, this one too. Raises BusUnavailable."""
        key = (await api_keys(self._bus).known()).bearer
        return [Peer(node=holder.node, url=holder.url, key=key) for holder in (await holders(self._bus)).values()]

    async def claim(self, *, is_new: bool) -> None:
        """Claim the store for this run, if there is one. Raises ConfigRefused for the store of another run.

        ``is_new``: the bus has no checkpoint of the run: then a store that does not answer raises StoreFailed.
        """
        if (store := self._store) is None:
            return
        mine = await identity_of(self._bus)
        try:
            owner = await self._answered(
                lambda silence: claimed(self._bus, store, silence),
                deadline=time.monotonic() + (self._ask_s if is_new else 0.0),
            )
        except StoreFailed as error:
            if is_new:
                raise
            log.error("the store of checkpoints does not answer, and begins later: %s", error)
            return
        if owner != mine:
            want = "a place for the checkpoints of this run"
            raise ConfigRefused("learner.checkpoint.store", want, f"{store.url} {foreign(owner)}")

    async def whole(self, row: JsonMapping) -> Path:
        """Return the latest checkpoint of the run or, with an error in the log, the newest whole one before it.

        This node has its metadata then. Raises NoCheckpoint, which names missing files and the nodes on which they were
        last seen, StoreFailed when the latest is not on the nodes, and the store does not answer.
        """
        deadline = time.monotonic() + self._ask_s
        while True:
            rows, peers = await holders(self._bus), [peer for peer in await self.peers() if peer.node != HOME]
            held, failures = await asyncio.to_thread(_held_files, peers)
            silent = [node for node in range(self._num_nodes) if node != HOME and node not in held]
            late = time.monotonic() >= deadline
            if not silent or late:
                break
            self.waits_for = f"the checkpoints of node {', '.join(map(str, silent))}"
            await asyncio.sleep(INTERVAL_S / 4)
        self.waits_for = ""
        for failure in failures:
            log.error("checkpoints of a node are lost until it is back: %s", failure)
        if self._store is not None:
            held[STORE] = await self._in_store(row, held, deadline)
        try:  # not in the loop's own threads, for which the end of the process waits
            silence = Silence(note=partial(self._note_silence, math.inf), after_s=self._silence_s)
            return await in_daemon(partial(self._whole, row, rows, held, peers), silence)
        finally:
            self.waits_for = ""

    async def _in_store(self, row: JsonMapping, held: HeldFiles, deadline: float) -> dict[str, list[str]]:
        """Return the stored files of the row's checkpoints. Raises StoreFailed, unless the nodes have the latest."""
        assert self._store is not None
        latest, named = Path(row["directory"]).name, digests_in(row)
        try:
            stored = await self._answered(self._survey, deadline=time.monotonic())
        except StoreFailed as error:
            on_nodes = (await asyncio.to_thread(held_below, self._root), *held.values())
            files = {name for checkpoints in on_nodes for name in checkpoints.get(latest, ())}
            if await asyncio.to_thread(_has_all, self._root / latest, files):
                log.error("the latest checkpoint is on the nodes, and the store does not answer: %s", error)
                return {}
            stored = await self._answered(self._survey, deadline=deadline)
        trusted: dict[str, list[str]] = {}
        for name, checkpoint in sorted(stored.items()):
            place = f"{self._store.url}/{name}"
            if name not in named:
                log.warning("checkpoint %s is not used: the run's row does not name it", place)
            elif checkpoint.digest != named[name]:
                want = f"sha256 {named[name]}, as in the run's row"
                defect = CheckpointCorrupt(place, MANIFEST, want, checkpoint.digest)
                log.error("checkpoint in the store is of another run: %s", defect)
            else:
                trusted[name] = [MANIFEST, *checkpoint.held]
        return trusted

    async def _survey(self, silence: Silence) -> dict[str, Stored]:
        """Return the checkpoints in the store. Raises StoreFailed, also for the store of another run."""
        assert self._store is not None
        mine, owner = await identity_of(self._bus), await in_daemon(self._store.owner, silence)
        if owner in UNNAMED:
            raise StoreFailed(self._store.url, f"has no {OWNER}, or none that can be read; is it mounted?")
        if owner != mine:
            raise StoreFailed(self._store.url, foreign(owner))
        return (await in_daemon(partial(survey, self._store), silence))[0]

    async def _answered(self, ask: Callable[[Silence], Awaitable[T]], *, deadline: float) -> T:
        """Return the store's answer. Raises StoreFailed behind the deadline (monotonic). Asks a hanging store once."""
        pause_s = INTERVAL_S
        self.waits_for = "the store of checkpoints"
        try:
            while True:
                try:
                    return await ask(Silence(note=partial(self._note_silence, deadline), after_s=self._silence_s))
                except StoreFailed as error:
                    if time.monotonic() >= deadline:
                        raise
                    self.waits_for = f"the store of checkpoints: {error}"
                    log.error("the store of checkpoints does not answer, asking again: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(MOST_PAUSE_S, 2 * pause_s)
        finally:
            self.waits_for = ""

    async def _note_silence(self, deadline: float, seconds: float) -> None:
        """Report a store without an answer. Raises StoreFailed behind the deadline."""
        url = "other nodes" if self._store is None else self._store.url
        if time.monotonic() >= deadline:
            raise StoreFailed(url, f"no answer for {seconds:.0f} s")
        self.waits_for = f"the store of checkpoints: {url}: no answer for {seconds:.0f} s"
        log.error("waiting for %s", self.waits_for)

    def _whole(self, row: JsonMapping, rows: dict[int, Holder], held: HeldFiles, peers: list[Peer]) -> Path:
        client = PeerClient([peer for peer in peers if peer.node in held], self._store)
        try:
            held = {HOME: held_below(self._root), **held}
            latest, named = Path(row["directory"]).name, digests_in(row)
            order = _order({name for names in held.values() for name in names}, latest, row["step"])
            last_held = {node: holder.held for node, holder in rows.items()}
            files: dict[str, dict[str, FileEntry]] = {}
            for name in order:
                try:
                    data = remote_files.manifest_bytes(self._root / name, client, sha256=named.get(name, ""))
                    files[name] = dict(CheckpointManifest.parse(name, data).files)
                except CheckpointCorrupt as error:
                    log.error("checkpoint without a manifest: %s", error)
            places = "no living node" if self._store is None else "neither a living node nor the store"
            choice = choose(order, files, held, last_held, places=places)
            for lack in choice.lacks:
                log.error("checkpoint is NOT WHOLE, trying the one before it: %s", lack)
            if choice.checkpoint is None:
                where = str(self._root) if self._store is None else f"{self._root}, {self._store.url}"
                raise NoCheckpoint(where, "none is whole: " + "; ".join(map(str, choice.lacks)))
            remote_files.complete(self._root / choice.checkpoint, client, sha256=named.get(choice.checkpoint, ""))
            for name in held.get(STORE, {}).keys() & set(row.get("kept", ())):  # the best one is found by its directory
                with suppress(CheckpointCorrupt):
                    remote_files.complete(self._root / name, client, sha256=named[name])
            return self._root / choice.checkpoint
        finally:
            client.close()

    async def wait(self, paths: Callable[[], Sequence[Path]]) -> Path:
        """Return the newest checkpoint that has its copies, once there is one. ``paths``: returns the waiting ones,
        oldest first, at each look: one that can never be copied, because a file is damaged, holds up no newer one.
        """
        changed = Waiter()
        logged_s = time.monotonic()
        async with self._bus.rows("run").on_change(f"{ROWS if self._store is None else UPLOADS}.*", changed.wake):
            while True:
                for path in reversed(paths()):
                    if not (lacks := await self.lacks(path)):
                        self._manifests.clear()
                        self.waits_for = ""
                        return path
                self.waits_for = lacks  # of the oldest one
                if time.monotonic() - logged_s >= _LOG_S:
                    log.warning("checkpoint is not the latest yet; it waits for %s", lacks)
                    logged_s = time.monotonic()
                await changed.wait(INTERVAL_S)  # not for ever: a wake-up may be lost

    async def lacks(self, path: Path) -> str:
        """Return, as text, the copies that a checkpoint lacks before it counts as the latest; empty = nothing."""
        if path not in self._manifests:
            self._manifests[path] = await asyncio.to_thread(
                lambda: (manifests.read(path).files, disk.manifest_digest(path))
            )
        (files, digest), checkpoint = self._manifests[path], path.name
        try:
            if self._store is not None:
                return self._not_stored(checkpoint, digest, files, await uploaded(self._bus))
            rows = await holders(self._bus)
        except BusUnavailable as error:
            return f"the bus, for the holders of {checkpoint}: {error}"
        held = {node: holder.held for node, holder in rows.items() if node < self._num_nodes}
        short = short_of_copies(files, checkpoint, held, num_nodes=self._num_nodes, copies=self._copies)
        if not short:
            return ""
        name, count = min(short.items())
        holders_text = f"{count} of {self._copies} holders"
        lack = f"{len(short)} files of {checkpoint} to be copied, the first is {name} with {holders_text}"
        return _with_troubles(lack, rows.values())

    def _not_stored(
        self, checkpoint: str, digest: str, files: Mapping[str, FileEntry], rows: Mapping[int, Uploaded]
    ) -> str:
        """Return the files that a checkpoint, with this digest of its manifest, lacks in the store; empty = none."""
        assert self._store is not None
        if HOME in rows and rows[HOME].whole.get(checkpoint) == digest:
            return ""
        stored = {file for row in rows.values() for file in row.files.get(checkpoint, ())}
        lack = f"{checkpoint} to be uploaded to {self._store.url}: {len(stored)} of {len(files)} files are there"
        return _with_troubles(lack, rows.values())


def _with_troubles(lack: str, rows: Iterable[Holder | Uploaded]) -> str:
    return "; ".join([lack, *(f"node {row.node}: {row.trouble}" for row in rows if row.trouble)])


def _has_all(directory: Path, files: Collection[str]) -> bool:
    """Return whether these are all files of a checkpoint with a manifest here."""
    try:
        return set(files) >= manifests.read(directory).files.keys()
    except CheckpointCorrupt:
        return False


def _held_files(peers: list[Peer]) -> tuple[HeldFiles, list[PeerFailed]]:
    """Return the files that each node has, and the failures of nodes that do not answer."""
    held: HeldFiles = {}
    failures = []
    client = PeerClient(peers)
    for peer in peers:
        try:
            held[peer.node] = remote_files.held_by(client, peer)
        except PeerFailed as error:
            failures.append(error)
    client.close()
    return held, failures


def _order(names: set[str], latest: str, step: int) -> list[str]:
    """Return the latest checkpoint and those before it, newest first."""
    checkpoints = []
    for name in names - {latest}:
        with suppress(ValueError):
            checkpoints.append(disk.named(Path(name)))
    return [
        latest,
        *(checkpoint.path.name for checkpoint in sorted(checkpoints, reverse=True) if checkpoint.step <= step),
    ]
