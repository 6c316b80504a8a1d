"""Copies files of a checkpoint from other nodes or the store to this disk: verified, durable, in place only when whole.
Blocking.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from urllib.parse import quote

from tidemill.bus.system.files import sync
from tidemill.bus.wire.subjects import nonce
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import BLOCK_BYTES, MANIFEST, METADATA, FileEntry, Manifest
from tidemill.learner.checkpoints.object_store import MOST_BYTES
from tidemill.learner.checkpoints.peers import PATH, CheckpointFiles, Peer, PeerClient, PeerFailed
from tidemill.learner.errors import CheckpointCorrupt, StoreFailed

log = logging.getLogger(__name__)

Wanted = Callable[[Mapping[str, FileEntry]], Collection[str]]
"""Selects files of a manifest."""


def metadata(files: Mapping[str, FileEntry]) -> Collection[str]:
    """Select the files that every node needs to begin."""
    return METADATA & files.keys()


def complete(directory: Path, client: PeerClient, wanted: Wanted = metadata, *, sha256: str = "") -> list[str]:
    """Get the selected files of a checkpoint that this node lacks. Returns their names.

    ``sha256``: digest of the manifest, if it is known (Megatron's index is a pickle, and is only as trustworthy as the
    manifest); empty = any sealed one. Raises CheckpointCorrupt when no node has a file intact, OSError when it cannot
    be written here.
    """
    data = manifest_bytes(directory, client, sha256=sha256)
    files = Manifest.parse(str(directory), data).files
    here = disk.held(directory).keys() if (directory / MANIFEST).is_file() else set[str]()
    missing = sorted(set(wanted(files)) - here)
    exists = directory.is_dir()
    if exists and not missing:
        return []
    source = CheckpointFiles(directory, files, client)
    into = directory if exists else _aside(directory)
    try:
        for name in missing:
            _copy(source, name, files[name].size, into / name)
        if not (into / MANIFEST).is_file():
            disk.write_files(into, {MANIFEST: data})
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
            Manifest.parse(f"{where}: {directory.name}", data)
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


def held_by(client: PeerClient, peer: Peer) -> dict[str, list[str]]:
    """Return the files of every checkpoint that a node has. Raises PeerFailed, also for an answer of another shape."""
    try:
        answer = json.loads(client.get(peer, PATH, most_bytes=MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise PeerFailed(peer, f"want JSON from {PATH}, got {error}") from None
    held = answer.get("held") if isinstance(answer, dict) else None
    if not isinstance(held, dict) or answer.get("node") != peer.node:
        raise PeerFailed(peer, f"want the checkpoints of node {peer.node}, got {str(answer)[:80]}")
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in held.values()):
        raise PeerFailed(peer, f"want lists of files, got {str(held)[:80]}")
    return held


def remove_leftovers(root: Path) -> None:
    """Remove files that an earlier process of this node has fetched in part. Call it while no other process fetches."""
    for path in (*root.glob(".step-*.part-*"), *root.glob("step-*.fetch-*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remote_manifests(directory: Path, client: PeerClient) -> list[tuple[str, Callable[[], bytes]]]:
    def reader(peer: Peer) -> Callable[[], bytes]:
        """Return a function that requests the manifest from a node."""
        return lambda: client.get(peer, f"{PATH}/{quote(directory.name)}/{MANIFEST}", most_bytes=MOST_BYTES)

    found = [(f"node {peer.node}", reader(peer)) for peer in client.peers]
    if (store := client.store) is not None:
        found.append((f"the store ({store.url})", lambda: store.manifest(directory.name)))
    return found


def _aside(directory: Path) -> Path:
    # A name of its own: an agent, its feeder and its ranks may fetch the same checkpoint at the same time.
    path = directory.with_name(f"{directory.name}.fetch-{nonce()}")
    path.mkdir(parents=True)
    return path


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
