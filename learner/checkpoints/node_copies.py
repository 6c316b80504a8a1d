"""Copies of checkpoints on neighbouring nodes: a node's agent serves its files over HTTP, and copies its neighbours'.

    row run/holder.<R>   {"node", "host", "url", "held": {checkpoint: [file, ...]}, "trouble"}, written when it changes

What fails (a neighbour that is away, a full disk) is in the row and tried again. It needs no rank, so it also serves
between two attempts.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.errors import BusError
from tidemill.bus.http.access import Route, RunAccess
from tidemill.bus.http.listener import Listener
from tidemill.bus.keys import api_keys
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.rows import Holder, row_of
from tidemill.learner.checkpoints import disk, remote_files
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY, latest_in, targets
from tidemill.learner.checkpoints.manifest import MANIFEST, FileEntry
from tidemill.learner.checkpoints.remote_files import PATH, Peer, PeerClient
from tidemill.learner.errors import CheckpointCorrupt

log = logging.getLogger(__name__)

ROWS = "holder"  # rows of the bucket ``run``, one for each node: ``holder.<R>``
INTERVAL_S = 1.0  # longest time between two looks at the directory and at the rows; a row that changes wakes the keeper
_KEPT_MANIFESTS = 8  # manifests in memory: complete directories do not change, and their names are not used again
_SHOWN_TROUBLE = 500  # characters of an error in a row


class CheckpointServer:
    """Routes for ``Listener``."""

    def __init__(self, root: Path, *, node: int) -> None:
        self._root, self._node = root, node
        self._manifests: dict[str, Mapping[str, FileEntry]] = {}

    @property
    def routes(self) -> Mapping[str, Route]:
        """Routes of the server."""
        listing, file = Route.request(self._held), Route.request(self._file)
        return {
            "GET /health": Route.open(self._health),
            f"GET {PATH}": listing,
            f"GET {PATH}/{{name}}/{{file:.+}}": file,
        }

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"node": self._node})

    async def _held(self, request: web.Request) -> web.Response:
        return web.json_response({"node": self._node, "held": await asyncio.to_thread(held_below, self._root)})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """Send a file. 404 for all but the files of complete checkpoints, wherever the path points."""
        name, file = request.match_info["name"], request.match_info["file"]
        path = await asyncio.to_thread(self._path_of, name, file)
        if path is None:
            text = f"want a file of a checkpoint that this node has, got {name[:80]}/{file[:80]}\n"
            raise web.HTTPNotFound(text=text)
        return web.FileResponse(path)

    def _path_of(self, name: str, file: str) -> Path | None:
        try:
            checkpoint = disk.parse_name(Path(name))
            if checkpoint is None or checkpoint.path.name != name:  # an encoded slash
                return None
            directory = self._root / name
            if file != MANIFEST and file not in self._files(directory):
                return None
            path = (directory / file).resolve(strict=True)
        except (ValueError, OSError, CheckpointCorrupt):
            return None
        # The names of a manifest stay inside its directory; a symbolic link in it may not.
        return path if path.is_file() and path.is_relative_to(self._root.resolve()) else None

    def _files(self, directory: Path) -> Mapping[str, FileEntry]:
        if directory.name not in self._manifests:
            if len(self._manifests) >= _KEPT_MANIFESTS:
                self._manifests.clear()
            self._manifests[directory.name] = manifests.read(directory).files
        return self._manifests[directory.name]


def held_below(root: Path) -> dict[str, list[str]]:
    """Return the files of every checkpoint below ``root`` that are there with their size, and the manifest."""
    files = {}
    for checkpoint in disk.listed(root):
        try:
            files[checkpoint.path.name] = sorted([MANIFEST, *disk.held(checkpoint.path)])
        except CheckpointCorrupt as error:
            log.warning("checkpoint passed over: %s", error)
    return files


class CheckpointRow:
    """A row of this node in the bucket ``run``, ``<kind>.<node>``, written when its content changes."""

    def __init__(self, bus: Bus, kind: str, node: int) -> None:
        self._rows, self._key, self._node = bus.rows("run"), f"{kind}.{node}", node
        self.content: dict[str, object] = {}
        """Content as last written; empty = it was not."""

    async def write(self, trouble: str, **values: object) -> None:
        """Write the row, unless nothing has changed. Raises BusError."""
        host = socket.gethostname()
        content = {"node": self._node, "host": host, "trouble": trouble[:_SHOWN_TROUBLE], **values}
        if content != self.content:
            await self._rows.put(self._key, content)
            self.content = content


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A node's place among the nodes of its learner, and the number of copies that a file has."""

    node: int
    num_nodes: int
    copies: int
    """0 = the store has all files, and nodes copy the metadata alone."""
    keep: int
    """Checkpoints that are kept, as ``learner.keep_checkpoints``."""


async def holders(bus: Bus) -> dict[int, Holder]:
    """Return the rows of all nodes that ever had one, by node. Raises BusUnavailable."""
    rows = [row_of(Holder, row) for row, _ in (await bus.rows("run").all(ROWS)).values()]
    return {row.node: row for row in rows}


class Keeper:
    """The keeper of one node; ``opened`` serves, ``run`` copies and removes."""

    def __init__(self, bus: Bus, root: Path, ring: Ring, *, reach: Reach = HERE) -> None:
        self._bus, self._root, self._ring, self._reach = bus, root, ring, reach
        self._row = CheckpointRow(bus, ROWS, ring.node)
        self._client = PeerClient(())
        self._keys = api_keys(bus)
        self._trouble = ""
        self._refused: dict[str, str] = {}
        """Checkpoints that could not be copied, with the reason, so that it is logged once."""
        self.url = ""
        """Where other nodes reach the server."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Set damaged files aside, serve the others, and write the row. Raises OSError, BusUnavailable."""
        await asyncio.to_thread(clean, self._root)
        listener = Listener(CheckpointServer(self._root, node=self._ring.node).routes, RunAccess(self._keys))
        try:
            # Any port: the others read the URL from the row.
            self.url = await listener.start(self._reach.bind, 0, advertise=self._reach.advertised, name="learner")
            await self._write_row()
            if self._ring.copies == 1 and self._ring.num_nodes > 1 and self._ring.node == 0:
                log.warning(
                    "learner.checkpoint.copies: 1: a node lost with its disk loses the run's newest states; "
                    "the last exported model remains"
                )
            yield
        finally:
            self._client.close()
            await listener.close()

    async def run(self) -> None:
        """Copy and remove until cancelled."""
        changed = Waiter()
        async with self._bus.rows("run").on_change(f"{ROWS}.*", changed.wake):
            while True:
                try:
                    await self.look()
                except BusError as error:  # it is away, or a row cannot be read: the latest checkpoint's, or the key
                    log.info("checkpoints of others are not copied now error=%s", error)
                await changed.wait(INTERVAL_S)  # the ranks of this node wake no keeper, and a wake-up may be lost

    async def look(self) -> None:
        """Copy files that this node lacks, remove checkpoints that are not kept, and write a changed row. BusError."""
        ring = self._ring
        neighbours = [holder for holder in (await holders(self._bus)).values() if holder.node != ring.node]
        keys = await self._keys.known()
        peers = tuple(Peer(node=holder.node, url=holder.url, key=keys.bearer) for holder in neighbours if holder.url)
        if peers != self._client.peers:
            self._client.close()
            self._client = PeerClient(peers)
        row = await self._bus.rows("run").get(CHECKPOINT_KEY)
        latest, spared = latest_in(self._root, row and row[0])
        names = {name for holder in neighbours for name in holder.held}
        names |= {checkpoint.path.name for checkpoint in disk.listed(self._root)}
        self._trouble = ""
        for name in disk.kept_names(names, latest, keep=ring.keep, spared=spared):
            await asyncio.to_thread(self._copy, name)
        if latest is not None and ring.node != 0:  # on node 0 the feeder does it, which needs the oldest one's state
            await asyncio.to_thread(disk.prune, self._root, keep=ring.keep, latest=latest, spared=spared)
        await self._write_row()

    def _copy(self, name: str) -> None:
        try:
            remote_files.complete(self._root / name, self._client, self._select)
            self._refused.pop(name, None)
        except (CheckpointCorrupt, OSError) as error:
            self._trouble = str(error)
            if self._refused.get(name) != self._trouble:
                log.error("checkpoint=%s is not copied to node %d, trying again: %s", name, self._ring.node, error)
                self._refused[name] = self._trouble

    def _select(self, files: Mapping[str, FileEntry]) -> Collection[str]:
        ring, selected = self._ring, set(remote_files.metadata(files))
        for name, entry in files.items():
            if ring.copies and ring.node in targets(entry, num_nodes=ring.num_nodes, copies=ring.copies):
                selected.add(name)
        return selected

    async def _write_row(self) -> None:
        held = await asyncio.to_thread(held_below, self._root)
        await self._row.write(self._trouble, url=self.url, held=held)


def clean(root: Path) -> None:
    """Remove leftovers of an earlier process, and set damaged files aside: what is read later was intact."""
    root.mkdir(parents=True, exist_ok=True)
    remote_files.remove_leftovers(root)
    for checkpoint in disk.listed(root):
        try:
            damaged = disk.damaged(checkpoint.path)
        except CheckpointCorrupt as error:
            log.error("checkpoint without a manifest is set aside: %s", error)
            disk.set_aside(checkpoint.path)
            continue
        for difference in damaged:
            log.error("checkpoint file is CORRUPT, and set aside: %s", difference)
            disk.set_aside_file(checkpoint.path, difference.file)
