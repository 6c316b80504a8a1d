"""Files of a checkpoint from this node's disk, other nodes or the store, verified block by block. Blocking; knows HTTP,
files, no torch.

A block is taken from the local file if there is one, else from the first node that sends the right bytes: those that
wrote the file first, then the others, then the store. A damaged or missing block is logged with file and node, and the
next place is tried.
"""

import http.client
import io
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import BLOCK_BYTES, FileEntry
from tidemill.learner.checkpoints.object_store import ObjectStore
from tidemill.learner.errors import CheckpointCorrupt, StoreFailed

Held = Mapping[int, Mapping[str, Collection[str]]]
"""node -> checkpoint -> names of the files that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """A checkpoint that cannot be loaded, with the nodes on which each missing file was last seen."""

    checkpoint: str
    missing: Mapping[str, tuple[int, ...]]
    places: str = "no living node"
    """The places that have none of them."""

    def __str__(self) -> str:
        named = [
            f"{name} (last seen on node {', '.join(map(str, nodes))})" for name, nodes in sorted(self.missing.items())
        ]
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        return f"{self.checkpoint}: {self.places} has {', '.join(named[:4])}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The newest whole checkpoint (None = there is none), and the newer ones that are not whole."""

    checkpoint: str | None
    lacks: Sequence[Lack] = field(default=())


def choose(
    order: Sequence[str],
    files: Mapping[str, Mapping[str, FileEntry]],
    held: Held,
    seen: Held,
    *,
    places: str = "no living node",
) -> Choice:
    """Return the first checkpoint of ``order`` of which every file is in some place of ``held``: a living node, or the
    store.

    ``files``: the manifest's files by checkpoint; one without a manifest is passed over. ``seen``: by all nodes, when
    they were last seen, for the message, which calls the places ``places``; the nodes that wrote a file are named where
    it was never seen.
    """
    lacks = []
    for name in order:
        if name not in files:
            lacks.append(
                Lack(checkpoint=name, missing={"manifest.json": _nodes(name, "manifest.json", seen)}, places=places)
            )
            continue
        there = {file for by_checkpoint in held.values() for file in by_checkpoint.get(name, ())}
        missing = {
            file: _nodes(name, file, seen) or entry.holders for file, entry in files[name].items() if file not in there
        }
        if not missing:
            return Choice(checkpoint=name, lacks=tuple(lacks))
        lacks.append(Lack(checkpoint=name, missing=missing, places=places))
    return Choice(checkpoint=None, lacks=tuple(lacks))


def targets(entry: FileEntry, *, num_nodes: int, copies: int) -> frozenset[int]:
    """Return the nodes that should have a file: its writer and the ``copies - 1`` nodes behind it, in a ring.

    A file written by no node of this layout is for the first ones, and one without holders (of an older release) for
    none.
    """
    if not entry.holders:
        return frozenset()
    first = entry.holders[0] if entry.holders[0] < num_nodes else 0
    ring = {(first + offset) % num_nodes for offset in range(min(copies, num_nodes))}
    return frozenset(ring | {node for node in entry.holders if node < num_nodes})


def short_of_copies(
    files: Mapping[str, FileEntry], name: str, held: Held, *, num_nodes: int, copies: int
) -> dict[str, int]:
    """Return the files with fewer holders than ``copies`` (at most one a node), and the number of their holders."""
    wanted = min(copies, num_nodes)
    counted = {file: sum(file in by_checkpoint.get(name, ()) for by_checkpoint in held.values()) for file in files}
    return {file: count for file, count in counted.items() if count < wanted}


def _nodes(checkpoint: str, file: str, seen: Held) -> tuple[int, ...]:
    return tuple(sorted(node for node, by_checkpoint in seen.items() if file in by_checkpoint.get(checkpoint, ())))


log = logging.getLogger(__name__)

PATH = "/checkpoints"
"""Path of the checkpoints on a node's server."""
_SILENCE_S = 30.0
"""Deadline for a connection, and for the next bytes of a node."""
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


class PeerFailed(Exception):
    """A node has not sent a range: unreachable, without the file, or another answer than asked for."""

    def __init__(self, peer: Peer, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer, self.reason = peer, reason

    def __str__(self) -> str:
        return f"node {self.peer.node} ({self.peer.url}): {self.reason}"


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
        """Return the body of ``GET path``, or its bytes ``span`` = (first, number). Raises PeerFailed, also if it is
        longer.
        """
        headers = {"Authorization": f"Bearer {peer.key}"} if peer.key else {}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[0] + span[1] - 1}"
        for connection in self._connection(peer):
            try:
                connection.request("GET", path, headers=headers)
                with connection.getresponse() as answer:
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
            wanted = 200 if span is None else 206
            if answer.status != wanted:
                raise PeerFailed(peer, f"HTTP {answer.status} for {path}")
            if len(body) > most_bytes:
                raise PeerFailed(peer, f"more than {most_bytes} bytes for {path}")
            return body
        raise PeerFailed(peer, str(failed) or type(failed).__name__)

    def _connection(self, peer: Peer) -> Iterator[http.client.HTTPConnection]:
        """Yield the open connection, if there is one, then a new one."""
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
        """``directory``: the checkpoint on this node, of which files may be missing."""
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
        kept = self._blocks.get((name, number))
        if kept is None:
            kept = self._blocks[name, number] = self._read(name, self._files[name], number)
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end((name, number))
        return kept

    def _read(self, name: str, entry: FileEntry, number: int) -> bytes:
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, entry.size - start)
        wanted = entry.blocks[number] if entry.blocks else ""
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
            if len(data) == length and (not wanted or manifests.digest_of(data) == wanted):
                return data
            failures.append(f"{where} has a damaged block")
            log.error(
                "checkpoint file=%s bytes=%d+%d is DAMAGED on %s: want sha256 %s", name, start, length, where, wanted
            )
        want = f"bytes {start} to {start + length} with sha256 {wanted or '(not known)'}"
        raise CheckpointCorrupt(str(self._directory), name, want, "; ".join(failures))

    def _sources(
        self, name: str, entry: FileEntry, start: int, length: int
    ) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Yield the places of a range, with a function that reads it."""

        def local() -> bytes:
            """Read this node's file."""
            with (self._directory / name).open("rb") as file:
                file.seek(start)
                return file.read(length)

        yield "this node", local
        if not entry.blocks:
            return  # of an older release: nothing that others send could be verified
        path = f"{PATH}/{quote(self._directory.name)}/{quote(name)}"
        for peer in sorted(self._client.peers, key=lambda one: one.node not in entry.holders):

            def remote(peer: Peer = peer) -> bytes:
                """Request the range from another node."""
                data = self._client.get(peer, path, most_bytes=length, span=(start, length))
                self.fetched_bytes += len(data)
                return data

            yield f"node {peer.node}", remote
        if (store := self._client.store) is not None:

            def stored() -> bytes:
                """Request the range from the store."""
                data = store.read(self._directory.name, name, start, length)
                self.fetched_bytes += len(data)
                return data

            yield f"the store ({store.url})", stored


class CheckpointFile(io.RawIOBase):
    """A read-only file made of verified blocks."""

    def __init__(self, size: int, block: Callable[[int], bytes]) -> None:
        super().__init__()
        self._size, self._block, self._at = size, block, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position, and return it."""
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
