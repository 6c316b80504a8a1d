"""The manifest of a checkpoint: size and digests of every file, and the nodes that wrote it. Sealed with a digest of
its own.

A file is digested as a whole, and in blocks, so that a reader can verify a range of it without the rest. The fields of
schema 2 are those of every release; ``blocks`` and ``holders`` are missing in manifests that were written before them.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.errors import CheckpointCorrupt

MANIFEST, STATE, SCHEMA = "manifest.json", "state.msgpack", 2
BLOCK_BYTES = 1 << 22
"""Bytes of a block, which are read, hashed and transferred at a time; the last block of a file is shorter."""
METADATA = frozenset({".metadata", "common.pt", "metadata.json", STATE})
"""Files that every node needs to begin: Megatron's index and common part, and the DataSource's state. The manifest is
one, too.
"""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint."""

    size: int
    sha256: str
    """Digest of the whole file."""
    blocks: tuple[str, ...] = ()
    """SHA-256 of each block; empty in manifests of older releases."""
    holders: tuple[int, ...] = ()
    """Nodes that have written the file; empty in manifests of older releases."""

    def written_by(self, nodes: Sequence[int]) -> "FileEntry":
        """Return the entry with these holders."""
        return replace(self, holders=tuple(nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Files of a checkpoint by name, relative to its directory, and the values of its writer."""

    files: Mapping[str, FileEntry]
    extra: JsonObject

    def encode(self) -> bytes:
        """Return the manifest's file."""
        files = {
            name: {"size": one.size, "sha256": one.sha256, "blocks": list(one.blocks), "holders": list(one.holders)}
            for name, one in self.files.items()
        }
        content = {"schema": SCHEMA, "extra": self.extra, "files": files}
        return json.dumps(content | {"sha256": _seal(content)}, indent=1).encode()

    @classmethod
    def parse(cls, where: str, data: bytes) -> "Manifest":
        """Return the manifest in ``data``; ``where`` (directory or URL) is for the error. Raises CheckpointCorrupt."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorrupt(where, MANIFEST, "a JSON map", str(error)) from error
        if (
            not isinstance(found, dict)
            or found.get("schema") != SCHEMA
            or not {"files", "extra", "sha256"} <= found.keys()
        ):
            raise CheckpointCorrupt(where, MANIFEST, f"files, extra and sha256 under schema {SCHEMA}", str(found)[:80])
        if (seal := found.pop("sha256")) != (got := _seal(found)):
            raise CheckpointCorrupt(where, MANIFEST, f"sha256 {seal}", got)
        if not isinstance(found["files"], dict) or not isinstance(found["extra"], dict):
            raise CheckpointCorrupt(where, MANIFEST, "files and extra as maps", str(found)[:80])
        return cls(
            files={name: _entry(where, name, value) for name, value in found["files"].items()}, extra=found["extra"]
        )


def read(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint directory. Raises CheckpointCorrupt."""
    try:
        data = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointCorrupt(str(directory), MANIFEST, "a manifest", "no such file") from None
    except OSError as error:
        raise CheckpointCorrupt(str(directory), MANIFEST, "a manifest", str(error)) from error
    return Manifest.parse(str(directory), data)


def digested(file: Path, *, durable: bool = False) -> FileEntry:
    """Return size and digests of a file; ``durable``: fsync it as well."""
    whole, blocks, size = hashlib.sha256(), [], 0
    with file.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            size += len(block)
            whole.update(block)
            blocks.append(digest_of(block))
        if durable:
            os.fsync(opened.fileno())
    return FileEntry(size=size, sha256=whole.hexdigest(), blocks=tuple(blocks))


def digest_of(block: bytes | memoryview) -> str:
    """Return the digest of a block as manifests have it."""
    return hashlib.sha256(block).hexdigest()


def _entry(where: str, name: str, value: object) -> FileEntry:
    """Return a file's entry. The name is used as a path, so it must stay inside the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise CheckpointCorrupt(where, MANIFEST, "names of files inside the directory", name)
    values: Mapping[str, object] = value if isinstance(value, dict) else {}
    size, sha256, blocks, holders = (values.get(key) for key in ("size", "sha256", "blocks", "holders"))
    blocks, holders = blocks or [], holders or []
    if (
        type(size) is not int
        or size < 0
        or not _is_digest(sha256)
        or not isinstance(blocks, list)
        or not isinstance(holders, list)
    ):
        raise CheckpointCorrupt(where, MANIFEST, f"size, sha256, blocks and holders of {name}", str(value)[:80])
    if not all(map(_is_digest, blocks)) or (blocks and len(blocks) != -(-size // BLOCK_BYTES)):
        raise CheckpointCorrupt(
            where, MANIFEST, f"a digest for each block of the {size} bytes of {name}", f"{len(blocks)} blocks"
        )
    if not all(type(node) is int and node >= 0 for node in holders):
        raise CheckpointCorrupt(where, MANIFEST, f"numbers of nodes as holders of {name}", str(holders)[:80])
    return FileEntry(size=size, sha256=str(sha256), blocks=tuple(blocks), holders=tuple(holders))


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _seal(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
