"""Files of a checkpoint from this node's disk, other nodes or the store, verified block by block. Blocking; no torch.

A block is taken from the first place with the right bytes: the local file, nodes that wrote it, other nodes, the store.
A damaged or missing block is logged. ``complete`` copies whole files to this disk, in place when complete.
"""

import http.client
import io
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from tidemill.bus.errors import DetailedError
from tidemill.bus.system.files import sync
from tidemill.bus.wire.subjects import nonce
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import BLOCK_BYTES, MANIFEST, METADATA, CheckpointManifest, FileEntry
from tidemill.learner.checkpoints.object_store import MOST_BYTES, ObjectStore
from tidemill.learner.errors import CheckpointCorrupt, StoreFailed

log = logging.getLogger(__name__)

PATH = "/checkpoints"  # path of the checkpoints on a node's server
_SILENCE_S = 30.0  # deadline for a connection, and for the next bytes of a node
_BUFFER_BYTES = 1 << 16
_KEPT_BLOCKS = 8
"""Blocks in memory: items of a file lie behind one another, and a block holds the end of one and the next one's start.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another node that serves its checkpoints."""

    node: int
    url: str
    key: str = field(default="", repr=False)
    """Bearer key of its server; empty = it needs none."""


class PeerFailed(DetailedError):
    """A node has not sent a range: unreachable, without the file, or another answer than requested."""

    peer: Peer
    reason: str
    template = "node {peer.node} ({peer.url}): {reason}"


class PeerClient:
    """Requests to the nodes, over a connection of each that is kept open; and the store, if there is one."""

    def __init__(self, peers: Sequence[Peer], store: ObjectStore | None = None) -> None:
        self.peers, self.store = tuple(peers), store
        self._connections: dict[int, http.client.HTTPConnection] = {}

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def get(self, peer: Peer, path: str, *, most_bytes: int, span: tuple[int, int] | None = None) -> bytes:
        """Return the body of ``GET path``, or its bytes ``span`` = (first, number). Raises PeerFailed."""
        headers = {"Authorization": f"Bearer {peer.key}"} if peer.key else {}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[0] + span[1] - 1}"
        for connection in self._connection(peer):
            try:
                connection.request("GET", path, headers=headers)
                with connection.getresponse() as answer:
                    # One byte more than allowed: a longer body is noticed without reading it to its end.
                    body = answer.read(most_bytes + 1)
                    is_whole = answer.isclosed()
            except (http.client.BadStatusLine, ConnectionError) as error:
                failed = error  # a server closes connections that have been idle: once more over a new one
                self._forget(peer)
                continue
            except (OSError, http.client.HTTPException) as error:
                self._forget(peer)
                raise PeerFailed(peer, str(error) or type(error).__name__) from None
            if not is_whole:
                self._forget(peer)  # the rest of a body that is too long would be taken for the next answer
            if answer.status != (200 if span is None else 206):
                raise PeerFailed(peer, f"HTTP {answer.status} for {path}")
            if len(body) > most_bytes:
                raise PeerFailed(peer, f"more than {most_bytes} bytes for {path}")
            return body
        raise PeerFailed(peer, str(failed) or type(failed).__name__)

    def _connection(self, peer: Peer) -> Iterator[http.client.HTTPConnection]:
        if peer.node in self._connections:
            yield self._connections[peer.node]
        parts = urlsplit(peer.url)
        self._connections[peer.node] = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_SILENCE_S)
        yield self._connections[peer.node]

    def _forget(self, peer: Peer) -> None:
        if connection := self._connections.pop(peer.node, None):
            connection.close()


class CheckpointFiles:
    """Files of one checkpoint by the manifest's names, wherever they are."""

    def __init__(self, directory: Path, files: Mapping[str, FileEntry], client: PeerClient) -> None:
        """``directory``: the checkpoint on this node, where files may be missing."""
        self._directory, self._files, self._client = directory, files, client
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self.fetched_bytes = 0
        """Bytes received from other nodes, and from the store."""

    def open(self, name: str) -> io.BufferedReader:
        """Return a file for reading. Raises CheckpointCorrupt: now for an unknown name, later at a damaged block."""
        if name not in self._files:
            raise CheckpointCorrupt(str(self._directory), name, "a file of the manifest", "another one")
        return io.BufferedReader(
            CheckpointFile(self._files[name].size, lambda number: self.block(name, number)), _BUFFER_BYTES
        )

    def block(self, name: str, number: int) -> bytes:
        """Return block ``number`` of a file. Raises CheckpointCorrupt, which names every place and its defect."""
        block = self._blocks.get((name, number))
        if block is None:
            block = self._blocks[name, number] = self._read(name, self._files[name], number)
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end((name, number))
        return block

    def _read(self, name: str, entry: FileEntry, number: int) -> bytes:
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, entry.size - start)
        digest = entry.blocks[number] if entry.blocks else ""
        failures = []
        for where, read in self._sources(name, entry, start, length):
            try:
                data = read()
            except FileNotFoundError:
                failures.append(f"{where} has no such file")
                continue
            except (OSError, PeerFailed, StoreFailed) as error:
                failures.append(f"{where}: {error}")
                log.warning("checkpoint file=%s bytes=%d+%d not read from %s: %s", name, start, length, where, error)
                continue
            if len(data) == length and (not digest or manifests.digest_of(data) == digest):
                return data
            failures.append(f"{where} has a damaged block")
            log.error(
                "checkpoint file=%s bytes=%d+%d is DAMAGED on %s: want sha256 %s", name, start, length, where, digest
            )
        want = f"bytes {start} to {start + length} with sha256 {digest or '(not known)'}"
        raise CheckpointCorrupt(str(self._directory), name, want, "; ".join(failures))

    def _sources(
        self, name: str, entry: FileEntry, start: int, length: int
    ) -> Iterator[tuple[str, Callable[[], bytes]]]:
        yield "this node", partial(_read_range, self._directory / name, start, length)
        if not entry.blocks:
            return  # of an older release: nothing that others send could be verified
        path = f"{PATH}/{quote(self._directory.name)}/{quote(name)}"
        for peer in sorted(self._client.peers, key=lambda peer: peer.node not in entry.holders):
            request = partial(self._client.get, peer, path, most_bytes=length, span=(start, length))
            yield f"node {peer.node}", partial(self._fetch, request)
        if (store := self._client.store) is not None:
            request = partial(store.read, self._directory.name, name, start, length)
            yield f"the store ({store.url})", partial(self._fetch, request)

    def _fetch(self, request: Callable[[], bytes]) -> bytes:
        data = request()
        self.fetched_bytes += len(data)
        return data


def _read_range(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


class CheckpointFile(io.RawIOBase):
    """A read-only file made of verified blocks."""

    def __init__(self, size: int, block: Callable[[int], bytes]) -> None:
        super().__init__()
        self._size, self._block, self._at = size, block, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # typeshed's Buffer
        """Read up to the end of a block. Raises CheckpointCorrupt."""
        if self._at >= self._size:
            return 0
        number, offset = divmod(self._at, BLOCK_BYTES)
        piece = memoryview(self._block(number))[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


Selection = Callable[[Mapping[str, FileEntry]], Collection[str]]  # selects files of a manifest


def metadata(files: Mapping[str, FileEntry]) -> Collection[str]:
    """Select the files that every node needs to begin."""
    return METADATA & files.keys()


def complete(directory: Path, client: PeerClient, select: Selection = metadata, *, sha256: str = "") -> list[str]:
    """Get the selected files of a checkpoint that this node lacks. Returns their names.

    ``sha256``: digest of the manifest (Megatron's index is a pickle, as trustworthy as the manifest); empty = any
    sealed one. Raises CheckpointCorrupt when no node has a file intact, OSError when it cannot be written here.
    """
    data = manifest_bytes(directory, client, sha256=sha256)
    files = CheckpointManifest.parse(str(directory), data).files
    present = disk.held(directory).keys() if (directory / MANIFEST).is_file() else set[str]()
    missing = sorted(set(select(files)) - present)
    exists = directory.is_dir()
    if exists and not missing:
        return []
    source = CheckpointFiles(directory, files, client)
    into = directory
    if not exists:
        # A name of its own: an agent, its feeder and its ranks may fetch the same checkpoint at the same time.
        into = directory.with_name(f"{directory.name}.fetch-{nonce()}")
        into.mkdir(parents=True)
    try:
        for name in missing:
            _copy(source, name, files[name].size, into / name)
        if not (into / MANIFEST).is_file():
            disk.write_manifest(into, data)
        if not exists:
            disk.publish(into)
    except FileExistsError:  # another process of this node was faster, with the same files
        pass
    finally:
        if not exists:
            shutil.rmtree(into, ignore_errors=True)
    log.info("checkpoint=%s files fetched=%s bytes=%d", directory.name, ",".join(missing), source.fetched_bytes)
    return missing


def manifest_bytes(directory: Path, client: PeerClient, *, sha256: str = "") -> bytes:
    """Return a checkpoint's manifest from this node or another. Raises CheckpointCorrupt when none has it."""
    failures = []
    for where, read in (("this node", (directory / MANIFEST).read_bytes), *_remote_manifests(directory, client)):
        try:
            data = read()
            CheckpointManifest.parse(f"{where}: {directory.name}", data)
        except FileNotFoundError:
            failures.append(f"{where} has none")
        except (OSError, PeerFailed, StoreFailed, CheckpointCorrupt) as error:
            failures.append(str(error))
        else:
            if not sha256 or manifests.digest_of(data) == sha256:
                return data
            failures.append(f"{where} has another one")
    raise CheckpointCorrupt(
        str(directory), MANIFEST, f"a manifest with sha256 {sha256}" if sha256 else "a manifest", "; ".join(failures)
    )


class Held(msgspec.Struct):
    """Answer of a node's server: the files of every checkpoint that it has."""

    node: int
    held: dict[str, list[str]]


def held_by(client: PeerClient, peer: Peer) -> dict[str, list[str]]:
    """Return the files of every checkpoint that a node has. Raises PeerFailed, also for an answer of another shape."""
    try:
        answer = msgspec.json.decode(client.get(peer, PATH, most_bytes=MOST_BYTES), type=Held)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PeerFailed(peer, f"want lists of files from {PATH}, got {error}") from None
    if answer.node != peer.node:
        raise PeerFailed(peer, f"want the checkpoints of node {peer.node}, got those of node {answer.node}")
    return answer.held


def remove_leftovers(root: Path) -> None:
    """Remove files that an earlier process of this node has fetched in part. Call it while no other process fetches."""
    for path in (*root.glob(".step-*.part-*"), *root.glob("step-*.fetch-*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remote_manifests(directory: Path, client: PeerClient) -> Iterator[tuple[str, Callable[[], bytes]]]:
    path = f"{PATH}/{quote(directory.name)}/{MANIFEST}"
    for peer in client.peers:
        yield f"node {peer.node}", partial(client.get, peer, path, most_bytes=MOST_BYTES)
    if (store := client.store) is not None:
        yield f"the store ({store.url})", partial(store.manifest, directory.name)


def _copy(source: CheckpointFiles, name: str, size: int, target: Path) -> None:
    part = target.parent.parent / f".{target.parent.name}.part-{nonce()}"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as file:
            for number in range(-(-size // BLOCK_BYTES)):
                file.write(source.block(name, number))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        sync(target.parent)
    finally:
        part.unlink(missing_ok=True)
