"""Checkpoint directories: written aside, made durable, renamed into place, verified before use. Knows files alone.

``<root>/step-<k>-epoch-<e>/`` holds the files that the ranks of this node wrote, ``state.msgpack`` (the DataSource as
of plan k) and ``manifest.json``. A directory without a suffix was complete when it was renamed; ``.tmp`` is being
written, ``.corrupt`` failed verification. A row on the bus names the *latest* one. Without a shared directory, each
node has the files of its own ranks, the metadata and the manifest; ``held`` names them, ``verify`` wants all.
The functions at the end are pure: places of the files, and the choice of a whole checkpoint.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.bus.system.files import sync
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.subjects import nonce
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import MANIFEST, METADATA, STATE, CheckpointManifest, FileEntry
from tidemill.learner.errors import CheckpointCorrupt
from tidemill.learner.settings.backends import MEGATRON

log = logging.getLogger(__name__)

NO_WEIGHTS = "no_weights"  # file in a checkpoint of a run with ``debug.rollout_only``, which has no weights
TORCH_DIST = ("metadata.json", ".metadata", "common.pt")
"""Files of every checkpoint with weights in Megatron's format torch_dist, also one of Megatron's own training."""
BACKEND = "backend"
"""Name of the backend in the first of these files; Megatron's have none."""
_NAME = re.compile(r"step-(\d+)-epoch-(\d+)")


def written_by(directory: Path) -> str:
    """Return the backend that has written the weights of a checkpoint. No torch."""
    try:
        return str(json.loads((directory / TORCH_DIST[0]).read_text(encoding="utf-8")).get(BACKEND, MEGATRON))
    except (OSError, ValueError):  # ``verify`` names a damaged file
        return MEGATRON


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Checkpoint:
    """A checkpoint directory, identified by its name; ``verify`` checks its content."""

    step: int
    epoch: int
    path: Path

    def is_newer(self, latest: "Checkpoint") -> bool:
        """Return whether it was written later: a start that fell back to an older checkpoint has a newer epoch."""
        return self.epoch > latest.epoch or (self.epoch == latest.epoch and self.step > latest.step)

    def is_before(self, latest: "Checkpoint") -> bool:
        """Return whether it may be one of the checkpoints before the latest."""
        return (self.step, self.epoch) < (latest.step, latest.epoch) and not self.is_newer(latest)


def has_weights(directory: Path) -> bool:
    """Return whether a directory looks like a checkpoint of Tidemill or Megatron with weights; reads no content."""
    return all((directory / name).is_file() for name in TORCH_DIST)


def staging(root: Path, *, step: int, epoch: int) -> Path:
    """Return a new empty directory into which the ranks of a node write the checkpoint. One of them calls it."""
    path = root / f"step-{step}-epoch-{epoch}.tmp"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def commit(tmp: Path, state: bytes, *, extra: Mapping[str, object] | None = None) -> Path:
    """Add state and manifest, fsync all, and rename into place. Returns the path. FileExistsError, OSError."""
    (tmp / STATE).write_bytes(state)
    files = {name: entry.written_by((0,)) for name, entry in digest(tmp, sorted(_files(tmp))).items()}
    write_manifest(tmp, CheckpointManifest(files=files, extra=dict(extra or {})).encode())
    return publish(tmp)


def digest(tmp: Path, names: Sequence[str]) -> dict[str, FileEntry]:
    """Return size and digests of these files, and sync each to the disk. Raises OSError."""
    # Threads are enough: hashing and reading release the GIL.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: manifests.digested(tmp / name, durable=True), names), strict=True))


def write_files(tmp: Path, files: Mapping[str, bytes]) -> None:
    """Write these files, durably. Raises OSError."""
    for name, data in files.items():
        (tmp / name).write_bytes(data)
        sync(tmp / name)


def write_manifest(tmp: Path, data: bytes) -> None:
    """Write the manifest's file, durably. Raises OSError."""
    write_files(tmp, {MANIFEST: data})


def publish(tmp: Path) -> Path:
    """Rename a staging directory with synced files into place. Returns its path. Raises FileExistsError, OSError."""
    path = tmp.with_suffix("")
    if path.exists():
        raise FileExistsError(f"{path}: want a new checkpoint name, got an existing directory")
    # All content and all names are on the disk before the rename, and the rename before this returns: a directory with
    # its final name is complete, also after a loss of power.
    for directory in sorted({tmp, *((tmp / name).parent for name in _files(tmp))}, reverse=True):
        sync(directory)
    try:
        tmp.rename(path)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise FileExistsError(f"{path}: another process was faster") from None
    sync(path.parent)
    return path


def verify(path: Path, *, partly: bool = False, stored: bool = False) -> JsonObject:
    """Compare every file with the manifest. Returns ``extra``. Raises CheckpointCorrupt for the first that differs.

    ``partly``: other nodes' files may be missing. ``stored``: all but the metadata may, which the store has.
    """
    manifest = manifests.read(path)
    entries = sorted(
        (name, entry)
        for name, entry in manifest.files.items()
        if not ((partly or stored) and _is_elsewhere(path, name, entry, stored=stored))
    )
    if unknown := sorted(set(_files(path)) - set(manifest.files) - {MANIFEST}):
        raise CheckpointCorrupt(str(path), unknown[0], "no file that is not in the manifest", "one")
    for error in _differences(path, entries):
        raise error
    return manifest.extra


def damaged(path: Path) -> list[CheckpointCorrupt]:
    """Return the damaged files of those in the manifest that are here. Raises CheckpointCorrupt without a manifest."""
    files = manifests.read(path).files
    return _differences(path, sorted((name, entry) for name, entry in files.items() if (path / name).is_file()))


def held(path: Path) -> dict[str, FileEntry]:
    """Return the manifest's entries with a file of the right size here; reads no content. Raises CheckpointCorrupt."""
    return {name: entry for name, entry in manifests.read(path).files.items() if _has_size(path / name, entry.size)}


def manifest_digest(path: Path) -> str:
    """Return the digest of a checkpoint's manifest, as the row of the latest one has it. Raises OSError."""
    return manifests.digest_of((path / MANIFEST).read_bytes())


def digests_of(root: Path, names: Collection[str]) -> dict[str, str]:
    """Return the digests of the manifests of checkpoints below ``root``; those without one are left out."""
    digests = {}
    for name in names:
        with suppress(OSError):
            digests[name] = manifest_digest(root / name)
    return digests


def read_state(path: Path) -> bytes:
    """Return the DataSource's snapshot in a checkpoint."""
    return (path / STATE).read_bytes()


def verified_state(path: Path) -> bytes:
    """Return the DataSource's snapshot, compared with the manifest. Raises CheckpointCorrupt."""
    if (error := _difference(path, STATE, manifests.read(path).files[STATE])) is not None:
        raise error
    return read_state(path)


def listed(root: Path) -> list[Checkpoint]:
    """Return the complete checkpoints under ``root``, newest (step, then epoch) first, without verifying them."""
    checkpoints = [parse_name(path) for path in root.glob("step-*") if path.is_dir()]
    return sorted((checkpoint for checkpoint in checkpoints if checkpoint is not None), reverse=True)


def unfinished(root: Path) -> set[int]:
    """Return the steps of the checkpoints that are being written, or were when their ranks were killed."""
    return {int(match[1]) for path in root.glob("step-*.tmp") if (match := _NAME.fullmatch(path.stem))}


def is_spread(path: Path) -> bool:
    """Return whether several nodes wrote it, each on its own disk; False without a readable manifest."""
    try:
        return any(entry.holders not in ((), (0,)) for entry in manifests.read(path).files.values())
    except CheckpointCorrupt:
        return False


def latest_valid(
    candidates: Iterable[Path], *, partly: bool = False, stored: bool = False
) -> tuple[Path | None, dict[Path, CheckpointCorrupt]]:
    """Return the first candidate that verifies, or None, and the errors of those before it, which are also logged."""
    corrupt: dict[Path, CheckpointCorrupt] = {}
    for path in candidates:
        try:
            verify(path, partly=partly, stored=stored)
            return path, corrupt
        except CheckpointCorrupt as error:
            corrupt[path] = error
            log.error("checkpoint is CORRUPT, trying the one before it: %s", error)
    return None, corrupt


def set_aside(path: Path) -> None:
    """Rename a corrupt checkpoint to ``.corrupt``, so that it is kept for inspection and never loaded."""
    if path.is_dir():
        aside = path.with_suffix(".corrupt")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def set_aside_file(path: Path, name: str) -> None:
    """Move a corrupt file out of its checkpoint, into a directory of the same name with ``.corrupt``."""
    target = path.with_suffix(".corrupt") / name
    target.parent.mkdir(parents=True, exist_ok=True)
    (path / name).rename(target)


def prune(root: Path, *, keep: int, latest: Checkpoint, spared: Collection[str] = ()) -> Sequence[Checkpoint]:
    """Remove all but ``latest`` and the ``keep - 1`` newest before it. Returns these, newest first.

    ``spared``: names before it that are not removed; the streams are not kept for them. Later steps of earlier epochs,
    and unfinished ones (``.tmp``), were never committed and are removed; newer checkpoints are kept.
    """
    present = listed(root)
    kept = set(kept_names([checkpoint.path.name for checkpoint in present], latest, keep=keep, spared=spared))
    for checkpoint in present:
        if checkpoint.path.name not in kept:
            _remove(checkpoint.path)
            log.info("checkpoint removed path=%s", checkpoint.path)
    for path in root.glob("step-*.tmp"):
        match = _NAME.fullmatch(path.stem)
        if match and int(match[2]) < latest.epoch:
            _remove(path)
    return [latest, *[checkpoint for checkpoint in present if checkpoint.is_before(latest)][: keep - 1]]


def kept_names(
    names: Collection[str], latest: Checkpoint | None, *, keep: int, spared: Collection[str] = ()
) -> list[str]:
    """Return the names that are kept, newest first: newer ones, ``latest``, and ``keep - 1`` before it, or ``spared``.

    All are kept without ``latest``. Other names are left out: rows of other nodes are not trusted.
    """
    parsed = (parse_name(Path(name)) for name in names)
    checkpoints = sorted((checkpoint for checkpoint in parsed if checkpoint is not None), reverse=True)
    if latest is None:
        return [checkpoint.path.name for checkpoint in checkpoints]
    newer = [checkpoint for checkpoint in checkpoints if checkpoint.is_newer(latest)]
    current = [checkpoint for checkpoint in checkpoints if checkpoint.path.name == latest.path.name]
    before = [checkpoint for checkpoint in checkpoints if checkpoint.is_before(latest)]
    before = [*before[: keep - 1], *(checkpoint for checkpoint in before[keep - 1 :] if checkpoint.path.name in spared)]
    return [checkpoint.path.name for checkpoint in (*newer, *current, *before)]


def _remove(path: Path) -> None:
    # The agent of this node may be copying files into it.
    # A rename is atomic: a reader sees a whole checkpoint or none, and a copy into the old name fails at once.
    aside = path.with_name(f".{path.name}.part-{nonce()}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def named(path: Path) -> Checkpoint:
    """Return the checkpoint with the step and epoch in a directory's name. Raises ValueError for another name."""
    if (checkpoint := parse_name(path)) is None:
        raise ValueError(f"{path}: want a name like step-20-epoch-1")
    return checkpoint


def parse_name(path: Path) -> Checkpoint | None:
    """Return the checkpoint with the step and epoch in a directory's name; None for another name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else Checkpoint(step=int(match[1]), epoch=int(match[2]), path=path)


def _files(path: Path) -> list[str]:
    return [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False


def _is_elsewhere(path: Path, name: str, entry: FileEntry, *, stored: bool) -> bool:
    return (stored or entry.holders not in ((), (0,))) and name not in METADATA and not (path / name).exists()


def _differences(path: Path, entries: Sequence[tuple[str, FileEntry]]) -> list[CheckpointCorrupt]:
    """Return the errors of the files that differ from their entries. Threads: hashing and reading release the GIL."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return [error for error in pool.map(lambda item: _difference(path, *item), entries) if error is not None]


def _difference(path: Path, name: str, entry: FileEntry) -> CheckpointCorrupt | None:
    file = path / name
    if not file.is_file():
        return CheckpointCorrupt(str(path), name, f"{entry.size} bytes", "no such file")
    try:
        if (size := file.stat().st_size) != entry.size:
            return CheckpointCorrupt(str(path), name, f"{entry.size} bytes", f"{size} bytes")
        with file.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        if sha256 != entry.sha256:
            return CheckpointCorrupt(str(path), name, f"sha256 {entry.sha256}", sha256)
    except OSError as error:  # the disk fails to read the file
        return CheckpointCorrupt(str(path), name, f"{entry.size} bytes", str(error))
    return None


CHECKPOINT_KEY = "checkpoint"
"""Row of the bucket ``run`` with the latest checkpoint: directory, step, epoch, chain, manifest, kept, manifests."""
Held = Mapping[int, Mapping[str, Collection[str]]]  # node -> checkpoint -> names of the files that it has


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """A checkpoint that cannot be loaded, with the nodes on which each missing file was last seen."""

    checkpoint: str
    missing: Mapping[str, tuple[int, ...]]
    places: str = "no living node"
    """The places that have none of them."""

    def __str__(self) -> str:
        files = [
            f"{name} (last seen on node {', '.join(map(str, nodes))})" for name, nodes in sorted(self.missing.items())
        ]
        remainder = f" and {len(files) - 4} more" if len(files) > 4 else ""
        return f"{self.checkpoint}: {self.places} has {', '.join(files[:4])}{remainder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointChoice:
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
) -> CheckpointChoice:
    """Return the first checkpoint of ``order`` with every file in a place of ``held`` (a node, the store).

    ``files``: the manifest's files by checkpoint; one without a manifest is passed over. ``seen``: files of all nodes
    when they were last seen, for the message; its writers are named for a file that was never seen.
    """
    lacks: list[Lack] = []
    for name in order:
        present = {file for by_checkpoint in held.values() for file in by_checkpoint.get(name, ())}
        if name in files:
            missing = {
                file: _last_seen(name, file, seen) or entry.holders
                for file, entry in files[name].items()
                if file not in present
            }
        else:
            missing = {MANIFEST: _last_seen(name, MANIFEST, seen)}
        if not missing:
            return CheckpointChoice(checkpoint=name, lacks=tuple(lacks))
        lacks.append(Lack(checkpoint=name, missing=missing, places=places))
    return CheckpointChoice(checkpoint=None, lacks=tuple(lacks))


def _last_seen(checkpoint: str, file: str, seen: Held) -> tuple[int, ...]:
    return tuple(sorted(node for node, by_checkpoint in seen.items() if file in by_checkpoint.get(checkpoint, ())))


def targets(entry: FileEntry, *, num_nodes: int, copies: int) -> frozenset[int]:
    """Return the nodes that should have a file: its writer and the ``copies - 1`` nodes behind it, in a ring.

    A file of no node of this layout is for the first ones, one without holders (of an older release) for none.
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
    counts = {file: sum(file in by_checkpoint.get(name, ()) for by_checkpoint in held.values()) for file in files}
    return {file: count for file, count in counts.items() if count < min(copies, num_nodes)}


def digests_in(row: JsonMapping) -> dict[str, str]:
    """Return the digests of the manifests in the row of the latest checkpoint: of the latest, and of the kept ones."""
    digests: dict[str, str] = {**row.get("manifests", {})}
    if row.get("manifest"):
        digests[Path(row["directory"]).name] = row["manifest"]
    return digests


def latest_in(root: Path, row: JsonMapping | None) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the latest checkpoint of the run's row, below ``root``, and the names of earlier ones that it keeps."""
    if row is None:
        return None, ()
    return parse_name(root / Path(row["directory"]).name), tuple(row.get("kept", ()))
