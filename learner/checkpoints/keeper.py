"""Keeper of a node's checkpoints, in the node's agent: serves them over HTTP, copies the checkpoints of its neighbours,
removes old ones.

    row run/holder.<R>   {"node", "host", "url", "held": {checkpoint: [file, ...]}, "trouble"}, written when it changes

Consumes the directories that ranks rename into place, and the rows of the other keepers. Waits for nothing but its
interval; what fails (a neighbour that is away, a disk that is full) is in the row and tried again. It needs no rank, so
it also serves between two attempts.
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
from tidemill.bus.liveness.keys import api_keys
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.learner.checkpoints import disk, fetch
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.disk import Checkpoint
from tidemill.learner.checkpoints.manifest import MANIFEST, FileEntry
from tidemill.learner.checkpoints.peers import PATH, Peer, PeerClient, targets
from tidemill.learner.errors import CheckpointCorrupt

_KEPT_MANIFESTS = 8
"""Manifests in memory; that of a complete directory does not change, and names are not used again."""


class CheckpointServer:
    """Routes for ``Listener``."""

    def __init__(self, root: Path, *, node: int) -> None:
        self._root, self._node = root, node
        self._manifests: dict[str, Mapping[str, FileEntry]] = {}

    @property
    def routes(self) -> Mapping[str, Route]:
        """Routes of the server."""
        held, file = Route.request(self._held), Route.request(self._file)
        return {"GET /health": Route.open(self._health), f"GET {PATH}": held, f"GET {PATH}/{{name}}/{{file:.+}}": file}

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"node": self._node})

    async def _held(self, request: web.Request) -> web.Response:
        return web.json_response({"node": self._node, "held": await asyncio.to_thread(held_below, self._root)})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """Send a file. 404 for all but the files of complete checkpoints, wherever the path points."""
        name, file = request.match_info["name"], request.match_info["file"]
        path = await asyncio.to_thread(self._found, name, file)
        if path is None:
            raise web.HTTPNotFound(
                text=f"want a file of a checkpoint that this node has, got {name[:80]}/{file[:80]}\n"
            )
        return web.FileResponse(path)

    def _found(self, name: str, file: str) -> Path | None:
        """Return the path of a file that may be sent."""
        try:
            directory = disk.named(Path(name)).path  # raises for other names
            if directory.name != name:  # an encoded slash
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
    found = {}
    for one in disk.listed(root):
        try:
            found[one.path.name] = sorted([MANIFEST, *disk.held(one.path)])
        except CheckpointCorrupt as error:
            log.warning("checkpoint passed over: %s", error)
    return found


log = logging.getLogger(__name__)

ROWS = "holder"
"""Rows of the bucket ``run``, one for each node: ``holder.<R>``."""
CHECKPOINT_KEY = "checkpoint"
"""Row of the bucket ``run``: ``{"directory", "step", "epoch", "chain", "manifest", "kept", "manifests"}`` of the latest
checkpoint.
"""
INTERVAL_S = 1.0
"""Longest time between two looks at the directory and at the rows; a row that changes wakes the keeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A node's place among the nodes of its learner, and the number of copies that a file has."""

    node: int
    num_nodes: int
    copies: int
    """0 = the store has all files, and nodes copy the metadata alone."""
    keep: int
    """Checkpoints that are kept, as ``learner.keep_checkpoints``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The contents of a node's row."""

    node: int
    url: str
    host: str
    held: Mapping[str, Collection[str]]
    trouble: str = ""


async def holders(bus: Bus) -> dict[int, Holder]:
    """Return the rows of all nodes that ever had one, by node. Raises BusUnavailable."""
    found = {}
    for row, _ in (await bus.rows("run").all(ROWS)).values():
        one = Holder(
            node=row["node"], url=row["url"], host=row.get("host", ""), held=row["held"], trouble=row.get("trouble", "")
        )
        found[one.node] = one
    return found


class Keeper:
    """The keeper of one node; ``opened`` serves, ``run`` copies and removes."""

    def __init__(self, bus: Bus, root: Path, ring: Ring, *, reach: Reach = HERE) -> None:
        self._bus, self._root, self._ring, self._reach = bus, root, ring, reach
        self._key = f"{ROWS}.{ring.node}"
        self._client = PeerClient(())
        self._keys = api_keys(bus)
        self._row: dict[str, object] = {}
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
            self.url = await listener.start(self._reach.bind, 0, advertise=self._reach.advertised, name="learner")
            await self._tell()
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
                except (
                    BusError
                ) as error:  # it is away, or the row of the latest checkpoint or of the key cannot be read
                    log.info("checkpoints of others are not copied now error=%s", error)
                await changed.wait(INTERVAL_S)  # the ranks of this node wake no keeper, and a wake-up may be lost

    async def look(self) -> None:
        """Copy files that this node lacks, remove checkpoints that are not kept, and write a changed row. Raises
        BusError.
        """
        others = {node: one for node, one in (await holders(self._bus)).items() if node != self._ring.node}
        keys = await self._keys.known()
        peers = tuple(Peer(node=one.node, url=one.url, key=keys.bearer) for one in others.values() if one.url)
        if peers != self._client.peers:
            self._client.close()
            self._client = PeerClient(peers)
        row = await self._bus.rows("run").get(CHECKPOINT_KEY)
        latest, spared = (None, ()) if row is None else (latest_of(self._root, row[0]), tuple(row[0].get("kept", ())))
        names = {name for one in others.values() for name in one.held} | {
            one.path.name for one in disk.listed(self._root)
        }
        self._trouble = ""
        for name in kept_names(names, latest, keep=self._ring.keep, spared=spared):
            await asyncio.to_thread(self._copy, name)
        if (
            latest is not None and self._ring.node != 0
        ):  # the feeder does it on node 0, where it needs the oldest one's state
            await asyncio.to_thread(disk.prune, self._root, keep=self._ring.keep, latest=latest, spared=spared)
        await self._tell()

    def _copy(self, name: str) -> None:
        """Copy the files of a checkpoint that this node should have."""
        try:
            fetch.complete(self._root / name, self._client, self._wanted)
            self._refused.pop(name, None)
        except (CheckpointCorrupt, OSError) as error:
            self._trouble = str(error)
            if self._refused.get(name) != self._trouble:
                log.error("checkpoint=%s is not copied to node %d, trying again: %s", name, self._ring.node, error)
                self._refused[name] = self._trouble

    def _wanted(self, files: Mapping[str, FileEntry]) -> Collection[str]:
        ring = self._ring
        if not ring.copies:
            return fetch.metadata(files)
        copied = {
            name
            for name, one in files.items()
            if ring.node in targets(one, num_nodes=ring.num_nodes, copies=ring.copies)
        }
        return copied | set(fetch.metadata(files))

    async def _tell(self) -> None:
        """Write the row, if anything in it has changed."""
        held = await asyncio.to_thread(held_below, self._root)
        row = {
            "node": self._ring.node,
            "host": socket.gethostname(),
            "url": self.url,
            "held": held,
            "trouble": self._trouble[:500],
        }
        if row != self._row:
            await self._bus.rows("run").put(self._key, row)
            self._row = row


def clean(root: Path) -> None:
    """Remove leftovers of an earlier process, and set damaged files aside: no file that is read afterwards is damaged."""
    root.mkdir(parents=True, exist_ok=True)
    fetch.remove_leftovers(root)
    for one in disk.listed(root):
        try:
            damaged = disk.damaged(one.path)
        except CheckpointCorrupt as error:
            log.error("checkpoint without a manifest is set aside: %s", error)
            disk.set_aside(one.path)
            continue
        for difference in damaged:
            log.error("checkpoint file is CORRUPT, and set aside: %s", difference)
            disk.set_aside_file(one.path, difference.file)


def kept_names(
    names: Collection[str], latest: Checkpoint | None, *, keep: int, spared: Collection[str] = ()
) -> list[str]:
    """Return the names that are kept, by the rule of ``disk.prune``: the latest, ``keep - 1`` before it, and newer
    ones.
    """
    found = []
    for name in names:
        try:
            found.append(disk.named(Path(name)))
        except ValueError:
            continue  # a row is not trusted
    found.sort(reverse=True)
    if latest is None:
        return [one.path.name for one in found]
    newer = [one for one in found if one.is_newer(latest)]
    before = [one for one in found if one.is_before(latest)]
    mine = [one for one in found if (one.step, one.epoch) == (latest.step, latest.epoch)]
    before = [*before[: keep - 1], *(one for one in before[keep - 1 :] if one.path.name in spared)]
    return [one.path.name for one in [*newer, *mine, *before]]


def digests_in(row: JsonMapping) -> dict[str, str]:
    """Return the digests of the manifests in the row of the latest checkpoint: its own, and those of the kept ones."""
    known: dict[str, str] = {**row.get("manifests", {})}
    if row.get("manifest"):
        known[Path(row["directory"]).name] = row["manifest"]
    return known


def latest_of(root: Path, row: JsonMapping) -> Checkpoint | None:
    """Return the checkpoint that the row names, as a directory below ``root``; None for a row without its name."""
    try:
        return disk.named(root / Path(row["directory"]).name)
    except ValueError:
        return None
