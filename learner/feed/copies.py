"""Checkpoints of several nodes, as the feeder needs them: the newest whole one at the start, and the copies of each new one.

Waits for the keepers of the nodes (``learner/checkpoints/keeper.py``), without a deadline for copies: a checkpoint that has too few is
not the latest, and the log and the feeder's row report the missing copies.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from bus.client.waiter import Waiter
from bus.errors import BusUnavailable
from bus.liveness.keys import api_keys
from bus.streams.bus import Bus
from bus.wire.json_object import JsonMapping
from learner.checkpoints import disk, fetch
from learner.checkpoints import manifest as manifests
from learner.checkpoints.choice import choose, short_of_copies
from learner.checkpoints.keeper import INTERVAL_S, ROWS, Holder, holders
from learner.checkpoints.manifest import MANIFEST, FileEntry, Manifest
from learner.checkpoints.peers import Peer, PeerClient, PeerFailed
from learner.checkpoints.server import held_below
from learner.errors import CheckpointCorrupt, NoCheckpoint

log = logging.getLogger(__name__)

HOME = 0
"""Node of the feeder and of rank 0."""
_SAY_S = 30.0
"""Time between two lines of the log about missing copies."""
ASK_S = 600.0
"""The agents of all nodes are alive when a feeder starts; their keepers answer when they have read and verified their disks."""


class Copies:
    """The checkpoints below ``root``, of which each node has its part."""

    def __init__(self, bus: Bus, root: Path, *, num_nodes: int, copies: int, ask_s: float = ASK_S) -> None:
        """``ask_s``: time for which a node that does not answer is asked again at the start; after that its disk counts as lost."""
        self._bus, self._root, self._num_nodes, self._copies, self._ask_s = bus, root, num_nodes, copies, ask_s
        self.waits_for = ""
        """The copies that a checkpoint waits for; empty = none waits."""

    async def peers(self) -> list[Peer]:
        """Return all nodes that serve checkpoints, this one too. Raises BusUnavailable."""
        key = (await api_keys(self._bus).known()).bearer
        return [Peer(node=one.node, url=one.url, key=key) for one in (await holders(self._bus)).values()]

    async def whole(self, row: JsonMapping) -> Path:
        """Return the latest checkpoint of the run or, with an error in the log, the newest whole one before it.

        This node has its metadata then. Raises NoCheckpoint, which names missing files and the nodes on which they were last seen.
        """
        deadline = time.monotonic() + self._ask_s
        while True:
            rows, peers = await holders(self._bus), [peer for peer in await self.peers() if peer.node != HOME]
            held, failures = await asyncio.to_thread(_asked, peers)
            silent = [node for node in range(self._num_nodes) if node != HOME and node not in held]
            late = time.monotonic() >= deadline
            if not silent or late:
                break
            self.waits_for = f"the checkpoints of node {', '.join(map(str, silent))}"
            await asyncio.sleep(INTERVAL_S / 4)
        self.waits_for = ""
        for failure in failures:
            log.error("checkpoints of a node are lost until it is back: %s", failure)
        return await asyncio.to_thread(self._whole, row, rows, held, peers)

    def _whole(self, row: JsonMapping, rows: dict[int, Holder], asked: dict[int, dict[str, list[str]]], peers: list[Peer]) -> Path:
        client = PeerClient([peer for peer in peers if peer.node in asked])
        try:
            held = {HOME: held_below(self._root), **asked}
            latest = Path(row["directory"]).name
            order = _order({name for names in held.values() for name in names}, latest, row["step"])
            seen = {node: one.held for node, one in rows.items()}
            files: dict[str, dict[str, FileEntry]] = {}
            for name in order:
                try:
                    data = fetch.manifest_bytes(self._root / name, client, sha256=row.get("manifest", "") if name == latest else "")
                    files[name] = dict(Manifest.parse(name, data).files)
                except CheckpointCorrupt as error:
                    log.error("checkpoint without a manifest: %s", error)
            choice = choose(order, files, held, seen)
            for lack in choice.lacks:
                log.error("checkpoint is NOT WHOLE, trying the one before it: %s", lack)
            if choice.checkpoint is None:
                raise NoCheckpoint(str(self._root), "none is whole: " + "; ".join(map(str, choice.lacks)))
            fetch.complete(self._root / choice.checkpoint, client)
            return self._root / choice.checkpoint
        finally:
            client.close()

    async def wait(self, path: Path) -> None:
        """Wait until every file of a checkpoint has enough holders."""
        files = await asyncio.to_thread(lambda: manifests.read(path).files)
        changed = Waiter()
        said = time.monotonic()
        async with self._bus.rows("run").on_change(f"{ROWS}.*", changed.wake):
            while lacks := await self.lacks(path.name, files):
                self.waits_for = lacks
                if time.monotonic() - said >= _SAY_S:
                    log.warning("checkpoint is not the latest yet; it waits for %s", lacks)
                    said = time.monotonic()
                await changed.wait(INTERVAL_S)  # not for ever: a wake-up may be lost
        self.waits_for = ""

    async def lacks(self, checkpoint: str, files: Mapping[str, FileEntry]) -> str:
        """Return, as text, the copies that a checkpoint lacks before it counts as the latest; empty = nothing."""
        try:
            rows = await holders(self._bus)
        except BusUnavailable as error:
            return f"the bus, for the holders of {checkpoint}: {error}"
        held = {node: one.held for node, one in rows.items() if node < self._num_nodes}
        short = short_of_copies(files, checkpoint, held, num_nodes=self._num_nodes, copies=self._copies)
        if not short:
            return ""
        name, count = min(short.items())
        what = f"{len(short)} files of {checkpoint} to be copied, the first is {name} with {count} of {self._copies} holders"
        return "; ".join([what, *(f"node {one.node}: {one.trouble}" for one in rows.values() if one.trouble)])


def manifest_digest(path: Path) -> str:
    """Return the digest of a checkpoint's manifest, as the row of the latest one has it."""
    return manifests.digest_of((path / MANIFEST).read_bytes())


def _asked(peers: list[Peer]) -> tuple[dict[int, dict[str, list[str]]], list[PeerFailed]]:
    """Return the files that each node has, and the failures of those that do not answer."""
    found, failures = {}, []
    client = PeerClient(peers)
    for peer in peers:
        try:
            found[peer.node] = fetch.held_by(client, peer)
        except PeerFailed as error:
            failures.append(error)
    client.close()
    return found, failures


def _order(names: set[str], latest: str, step: int) -> list[str]:
    """Return the latest checkpoint and those before it, newest first."""
    known = []
    for name in names - {latest}:
        try:
            known.append(disk.named(Path(name)))
        except ValueError:
            continue
    return [latest, *(one.path.name for one in sorted(known, reverse=True) if one.step <= step)]
