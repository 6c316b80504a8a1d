"""Uploads of a node's checkpoints to the store, in the background, by the node's agent or the parent of its ranks.

    row run/stored.<R>   {"node", "host", "files": {checkpoint: [file, ...]}, "whole": {checkpoint: digest},
                         "lacking": {checkpoint: [file, ...]}, "trouble"}, when it changes

    every node   checkpoint on its disk --> files of its ranks (node 0: the metadata, too) --> "files"
    node 0       files of all nodes in the store, by size --> manifest --> "whole"; removes checkpoints that do not stay
                 files that the store has lost meanwhile --> "lacking": their nodes upload them again

Consumes the directories that ranks rename into place, and the rows of the other nodes. Waits for its interval and for
the store. A store that fails is asked again after a pause that doubles up to ``MOST_PAUSE_S``, with the reason in the
row and in the log. A request without an answer has no deadline (an upload may take hours); row and log have its age
from ``SILENCE_S`` on. A process that ends does not wait for an upload; one that is cut short leaves files without a
manifest, which do not count and are stored again.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tidemill.bus.errors import BusError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.system.functions import settle
from tidemill.bus.wire.rows import Uploaded, row_of
from tidemill.learner.checkpoints import disk, remote_files
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY, Checkpoint, digests_in, latest_in
from tidemill.learner.checkpoints.manifest import MANIFEST, METADATA, CheckpointManifest, FileEntry
from tidemill.learner.checkpoints.node_copies import INTERVAL_S, CheckpointRow
from tidemill.learner.checkpoints.object_store import MOST_BYTES, OWNER, UNNAMED, ObjectStore
from tidemill.learner.checkpoints.remote_files import PeerClient
from tidemill.learner.errors import CheckpointCorrupt, StoreFailed

log = logging.getLogger(__name__)

ROWS = "stored"  # rows of the bucket ``run``, one for each node: ``stored.<R>``
HOME = 0  # node that completes checkpoints in the store, and removes them
MOST_PAUSE_S = 60.0  # longest pause before a store that has failed is asked again
SILENCE_S = 60.0  # time without an answer of the store that is reported, again and again
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint in the store with a readable manifest."""

    digest: str
    """Digest of the manifest."""
    files: Mapping[str, FileEntry]
    held: Collection[str]
    """Files that are there with the size in the manifest; their content is verified when it is read."""

    @property
    def is_whole(self) -> bool:
        """True if no file is missing or truncated."""
        return len(self.held) == len(self.files)


def survey(store: ObjectStore) -> tuple[dict[str, Stored], set[str]]:
    """Return the checkpoints with a manifest, and the names of those without a readable one. Raises StoreFailed."""
    complete, incomplete = {}, set()
    for name, sizes in store.listing().items():
        if not _is_checkpoint(name):
            continue
        try:
            if not 0 <= sizes.get(MANIFEST, -1) <= MOST_BYTES:
                raise FileNotFoundError(name)
            data = store.manifest(name)
            files = CheckpointManifest.parse(f"{store.url}/{name}", data).files
        except FileNotFoundError:
            incomplete.add(name)
        except CheckpointCorrupt as error:
            log.error("checkpoint in the store is not used: %s", error)
            incomplete.add(name)
        else:
            stored_files = tuple(file for file, entry in files.items() if sizes.get(file) == entry.size)
            complete[name] = Stored(digest=manifests.digest_of(data), files=files, held=stored_files)
            for file in sorted(files.keys() - set(stored_files))[:1]:
                size = f"{sizes.get(file, 'no')} bytes"
                defect = CheckpointCorrupt(f"{store.url}/{name}", file, f"{files[file].size} bytes", size)
                log.error("checkpoint in the store is NOT WHOLE: %s", defect)
    return complete, incomplete


def _is_checkpoint(name: str) -> bool:
    """Return whether a name is a checkpoint's: nothing else in the store is read or removed."""
    checkpoint = disk.parse_name(Path(name))
    return checkpoint is not None and str(checkpoint.path) == name


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """The report of a request to the store that has no answer yet."""

    note: Callable[[float], Awaitable[None]]
    """Called with the seconds so far. Its error ends the wait."""
    after_s: float = SILENCE_S
    """Time between two calls."""


async def uploaded(bus: Bus) -> dict[int, Uploaded]:
    """Return the rows of all nodes that ever had one, by node. Raises BusUnavailable."""
    rows = [row_of(Uploaded, row) for row, _ in (await bus.rows("run").all(ROWS)).values()]
    return {row.node: row for row in rows}


async def identity_of(bus: Bus) -> str:
    """Return the creation time of stream SAMPLES: another run of the same name has another. Raises BusUnavailable."""
    return (await bus.samples.cursor()).created


def refuse_lost(store: ObjectStore, owner: str, rows: Mapping[int, Uploaded]) -> None:
    """Raise StoreFailed for a store without an owner that had checkpoints of this run: perhaps it is not mounted."""
    home = rows.get(HOME)
    if owner in UNNAMED and home is not None and home.whole and home.store in ("", store.url):
        raise StoreFailed(
            store.url, f"has lost its {OWNER}: the row {ROWS}.{HOME} names checkpoints in it; is it mounted?"
        )


async def claimed(bus: Bus, store: ObjectStore, silence: Silence) -> str:
    """Make this run the owner of an empty, new store. Returns the owner. Raises StoreFailed, BusError."""
    mine, rows = await identity_of(bus), await uploaded(bus)
    refuse_lost(store, await in_daemon(store.owner, silence), rows)
    return await in_daemon(partial(store.claim, mine), silence)


class Uploads:
    """The uploads of one node. Damaged files on its disk have been set aside before (``node_copies.clean``)."""

    def __init__(
        self, bus: Bus, root: Path, store: ObjectStore, *, node: int = 0, keep: int, silence_s: float = SILENCE_S
    ) -> None:
        """``silence_s``: time without an answer of the store that is reported."""
        self._bus, self._root, self._store, self._node, self._keep = bus, root, store, node, keep
        self._row = CheckpointRow(bus, ROWS, node)
        self._client = PeerClient((), store)
        self._silence_s = silence_s
        self._stored: dict[str, Stored] | None = None  # checkpoints with a manifest in the store; None = not known yet
        self._incomplete: set[str] = set()  # checkpoints in the store that were not completed
        self._files: dict[str, set[str]] = {}  # files that this process has uploaded, by checkpoint
        self._lacking: dict[str, list[str]] = {}
        """Files that node 0 has not found in the store, though they were uploaded, by checkpoint."""
        self._digests: dict[str, str] = {}  # digests of the manifests on the disk
        self._trouble = ""

    async def run(self) -> None:
        """Upload and remove until cancelled."""
        changed, pause_s = Waiter(), INTERVAL_S
        async with self._bus.rows("run").on_change(f"{ROWS}.*", changed.wake):
            while True:
                try:
                    await self.look()
                except BusError as error:
                    log.info("checkpoints are not uploaded now error=%s", error)
                if not self._trouble:
                    pause_s = INTERVAL_S
                    await changed.wait(INTERVAL_S)  # the ranks of this node wake nothing, and a wake-up may be lost
                    continue
                await asyncio.sleep(pause_s)
                pause_s = min(MOST_PAUSE_S, 2 * pause_s)

    async def look(self) -> None:
        """Upload missing files, complete and remove checkpoints, and write a changed row. Raises BusError."""
        trouble = ""
        try:
            if await self._is_ours():
                await self._upload()
        except (StoreFailed, CheckpointCorrupt, OSError) as error:
            trouble = str(error)
            self._stored = None  # the store is read again: another process may have changed it
            if trouble != self._trouble:
                log.error("checkpoints are not uploaded, trying again: %s", error)
        if self._trouble and not trouble:
            log.info("checkpoints are uploaded again to %s", self._store.url)
        self._trouble = trouble
        await self._write_row()

    async def _is_ours(self) -> bool:
        """Return whether this run owns the store, which is read first. Raises StoreFailed, also for another's store."""
        if self._stored is None:
            run_identity = await identity_of(self._bus)
            if self._node == HOME:
                owner = await claimed(self._bus, self._store, Silence(note=self._note_silence, after_s=self._silence_s))
            else:
                owner = await self._answered(self._store.owner)
                refuse_lost(self._store, owner, await uploaded(self._bus))
            if owner and owner != run_identity:
                raise StoreFailed(self._store.url, f"{foreign(owner)}; nothing is written there")
            if owner:
                self._stored, self._incomplete = await self._answered(partial(survey, self._store))
        return self._stored is not None

    async def _answered(self, work: Callable[[], T], request: str = "") -> T:
        """Return the store's answer; row and log show how long it takes, with the name of the ``request``."""
        return await in_daemon(
            work, Silence(note=partial(self._note_silence, request=request), after_s=self._silence_s)
        )

    async def _note_silence(self, seconds: float, request: str = "") -> None:
        self._trouble = f"{self._store.url}: no answer for {seconds:.0f} s{request}"
        log.warning("checkpoints wait for the store: %s", self._trouble)
        with suppress(BusError):  # the next note, or the answer, has it
            await self._write_row()

    async def _upload(self) -> None:
        row = await self._bus.rows("run").get(CHECKPOINT_KEY)
        latest, spared = latest_in(self._root, row and row[0])
        rows, row_digests = await uploaded(self._bus), {} if row is None else digests_in(row[0])
        on_disk = {checkpoint.path.name for checkpoint in await asyncio.to_thread(disk.listed, self._root)}
        digests = {name: digest for name, digest in self._digests.items() if name in on_disk}
        self._digests = digests | await asyncio.to_thread(disk.digests_of, self._root, on_disk - digests.keys())
        stored = self._whole() if self._node == HOME or HOME not in rows else rows[HOME].whole
        # Not by name alone: with a bus from a backup, epochs are used again, and checkpoints have the names of earlier
        # ones.
        complete = {
            name for name, digest in stored.items() if digest in (self._digests.get(name), row_digests.get(name))
        }
        defects: list[Exception] = []
        kept = partial(disk.kept_names, latest=latest, keep=self._keep, spared=spared)
        names = kept(on_disk | complete)
        for name in _in_order(names):
            try:
                if name not in complete:
                    await self._upload_checkpoint(name, rows)
                elif self._node == HOME and stored[name] == row_digests.get(name):
                    # The state of the oldest kept one is needed here, and the best one is found by its directory.
                    fetch = partial(remote_files.complete, self._root / name, self._client, sha256=stored[name])
                    await self._answered(fetch)
            except (CheckpointCorrupt, OSError) as error:  # of this one: the others are not kept waiting
                if name in complete or (self._root / name).is_dir():  # else it was removed meanwhile
                    defects.append(error)
        if self._node == HOME and latest is not None:
            await self._remove(latest, {*names, *kept({*complete, latest.path.name})})
        self._files = {name: files for name, files in self._files.items() if name in on_disk}
        self._lacking = {name: files for name, files in self._lacking.items() if files and name in on_disk}
        if defects:
            await self._write_row()  # with the others, which are complete
            raise defects[0]

    async def _upload_checkpoint(self, name: str, rows: Mapping[int, Uploaded]) -> None:
        """Upload this node's files of a checkpoint; on node 0, complete it when the files of all nodes are there."""
        files = (await asyncio.to_thread(manifests.read, self._root / name)).files
        own_files, uploaded_files = self._own(files), self._files.setdefault(name, set())
        present = await asyncio.to_thread(disk.held, self._root / name)
        if not own_files - uploaded_files <= present.keys():
            return  # only the metadata came back to this disk
        if HOME in rows and (suspects := uploaded_files & set(rows[HOME].lacking.get(name, ()))):
            await self._answered(partial(self._absent, name, {file: files[file] for file in suspects}))
        if self._node == HOME and self._stored and name in self._stored:  # another one of this name
            await self._answered(partial(self._store.retract, name))
            del self._stored[name]
            self._incomplete.add(name)
        missing = {file: files[file] for file in sorted(own_files - uploaded_files)}
        for file, entry in missing.items():
            request = f" to the upload of {name}/{file}, {entry.size} bytes"
            await self._answered(partial(self._put, name, file, entry), request)
            uploaded_files.add(file)
            await self._write_row()
        if missing and (absent := await self._answered(partial(self._absent, name, missing))):
            raise absent[0]
        all_uploaded = uploaded_files.union(*(row.files.get(name, ()) for row in rows.values()))
        if self._node == HOME and all_uploaded >= files.keys():
            await self._answered(partial(self._complete, name, files))
            num_bytes = sum(entry.size for entry in files.values())
            log.info("checkpoint=%s uploaded to %s bytes=%d", name, self._store.url, num_bytes)

    def _own(self, files: Mapping[str, FileEntry]) -> set[str]:
        """Return the files that this node uploads: its own, and on node 0 the metadata."""
        return {
            file
            for file, entry in files.items()
            if (entry.holders[0] if entry.holders and file not in METADATA else HOME) == self._node
        }

    def _put(self, name: str, file: str, entry: FileEntry) -> None:
        """Upload a file, after a comparison with its digest. Raises StoreFailed, CheckpointCorrupt, OSError."""
        # A disk may have damaged it since it was written, and the store would be the only copy.
        path = self._root / name / file
        if manifests.digested(path).sha256 != entry.sha256:
            want, got = f"sha256 {entry.sha256}", "another one, and it is not uploaded"
            raise CheckpointCorrupt(str(path.parent), file, want, got)
        self._store.upload(name, file, path)

    def _complete(self, name: str, files: Mapping[str, FileEntry]) -> None:
        absent = self._absent(name, files)
        self._lacking[name] = [defect.file for defect in absent]
        if absent:
            raise absent[0]
        # Last, and read back: the manifest alone makes a checkpoint of the files (decision 052).
        data = (self._root / name / MANIFEST).read_bytes()
        self._store.complete(name, data)
        if self._store.manifest(name) != data:
            where = f"{self._store.url}/{name}"
            raise CheckpointCorrupt(where, MANIFEST, "the manifest that was written", "another one")
        assert self._stored is not None
        self._stored[name] = Stored(digest=manifests.digest_of(data), files=files, held=tuple(files))
        self._incomplete.discard(name)

    def _absent(self, name: str, files: Mapping[str, FileEntry]) -> list[CheckpointCorrupt]:
        """Return the files that the store lacks, or lists with another size; they are uploaded again. StoreFailed."""
        sizes = self._store.listing().get(name, {})
        absent = sorted(file for file, entry in files.items() if sizes.get(file) != entry.size)
        self._files[name] -= set(absent)
        where = f"{self._store.url}/{name}"
        return [
            CheckpointCorrupt(where, file, f"{files[file].size} bytes", f"{sizes.get(file, 'no')} after the upload")
            for file in absent
        ]

    async def _remove(self, latest: Checkpoint, kept: Collection[str]) -> None:
        assert self._stored is not None
        names = self._stored.keys() | self._incomplete
        newer = disk.kept_names(names, latest, keep=1)  # and the latest
        for name in sorted(names - {*kept, *newer}):
            await self._answered(partial(self._store.remove, name))
            self._stored.pop(name, None)
            self._incomplete.discard(name)
            log.info("checkpoint removed path=%s/%s", self._store.url, name)

    def _whole(self) -> dict[str, str]:
        return {name: stored.digest for name, stored in (self._stored or {}).items() if stored.is_whole}

    async def _write_row(self) -> None:
        values: dict[str, object] = {"store": self._store.url}
        values["files"] = {name: sorted(files) for name, files in self._files.items()}
        if self._node == HOME and self._stored is not None:
            values["whole"] = self._whole()
        elif complete := self._row.content.get("whole") or await self._whole_before():
            values["whole"] = complete
        if self._lacking:
            values["lacking"] = self._lacking
        await self._row.write(self._trouble, **values)

    async def _whole_before(self) -> Mapping[str, str]:
        """Return the complete checkpoints by this node's row before: it stands until the store has been read."""
        row = (await uploaded(self._bus)).get(self._node)
        return row.whole if row is not None and row.store in ("", self._store.url) else {}


def foreign(owner: str) -> str:
    """Return the reason why a store with another owner is not used."""
    which = "an unknown run" if owner == "?" else f"a run that began at {owner}, which is not this one"
    return f"has checkpoints of {which}; give another URL, or remove them there"


def _in_order(names: Collection[str]) -> list[str]:
    """Return the newest epoch first, and the oldest step of an epoch first: the feeder waits for them in this order."""
    checkpoints = [disk.named(Path(name)) for name in names]
    checkpoints.sort(key=lambda checkpoint: (-checkpoint.epoch, checkpoint.step))
    return [checkpoint.path.name for checkpoint in checkpoints]


async def in_daemon(work: Callable[[], T], silence: Silence) -> T:
    """Return the result of blocking work in a thread of its own, for which a process that ends does not wait.

    The work has no deadline: a file system that hangs keeps its thread. Errors of ``silence`` end the wait.
    """
    began, result = time.monotonic(), Future[T]()
    result.set_running_or_notify_cancel()  # so that the end of this wait does not cancel it under the thread
    threading.Thread(target=settle, args=(result, work), name="store", daemon=True).start()
    waiter = asyncio.wrap_future(result)
    try:
        while not (await asyncio.wait({waiter}, timeout=silence.after_s))[0]:
            await silence.note(time.monotonic() - began)
        return waiter.result()
    finally:
        waiter.cancel()  # the result of a wait that has ended is dropped
