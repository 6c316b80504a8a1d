"""The manifest of a checkpoint: size and digests of every file, and the nodes that wrote it. Sealed with a digest.

A file is digested as a whole, and in blocks, so that a reader can verify a range of it. The fields of schema 2 are the
same in every release; ``blocks`` and ``holders`` are missing in older manifests.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.errors import CheckpointCorrupt

MANIFEST, STATE, SCHEMA = "manifest.json", "state.msgpack", 2
BLOCK_BYTES = 1 << 22
"""Bytes of a block, which are read, hashed and transferred at a time; the last block of a file is shorter."""
METADATA = frozenset({".metadata", "common.pt", "metadata.json", STATE})
"""Files that every node needs to begin: Megatron's index and common part, and the DataSource's state."""
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint."""

    size: _Natural
    sha256: _Digest
    """Digest of the whole file."""
    blocks: tuple[_Digest, ...] = ()
    """SHA-256 of each block; empty in manifests of older releases."""
    holders: tuple[_Natural, ...] = ()
    """Nodes that have written the file; empty in manifests of older releases."""

    def written_by(self, nodes: Sequence[int]) -> "FileEntry":
        """Return the entry with these holders."""
        return replace(self, holders=tuple(nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """Files of a checkpoint by name, relative to its directory, and the values of its writer."""

    files: Mapping[str, FileEntry]
    extra: JsonObject

    def encode(self) -> bytes:
        """Return the manifest's file."""
        content = {"schema": SCHEMA, "extra": self.extra, "files": msgspec.to_builtins(self.files)}
        return json.dumps(content | {"sha256": _seal(content)}, indent=1).encode()

    @classmethod
    def parse(cls, where: str, data: bytes) -> "CheckpointManifest":
        """Return the manifest in ``data``; ``where`` (directory or URL) is for the error. Raises CheckpointCorrupt."""
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorrupt(where, MANIFEST, "a JSON map", str(error)) from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA or "sha256" not in content:
            raise CheckpointCorrupt(
                where, MANIFEST, f"files, extra and sha256 under schema {SCHEMA}", str(content)[:80]
            )
        if (seal := content.pop("sha256")) != (sha256 := _seal(content)):
            raise CheckpointCorrupt(where, MANIFEST, f"sha256 {seal}", sha256)
        try:
            manifest = msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise CheckpointCorrupt(
                where, MANIFEST, "files with size, sha256, blocks and holders", str(error)
            ) from None
        for name, entry in manifest.files.items():
            _refuse_entry(where, name, entry)
        return manifest


def read(directory: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint directory. Raises CheckpointCorrupt."""
    try:
        data = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointCorrupt(str(directory), MANIFEST, "a manifest", "no such file") from None
    except OSError as error:
        raise CheckpointCorrupt(str(directory), MANIFEST, "a manifest", str(error)) from error
    return CheckpointManifest.parse(str(directory), data)


def digested(file: Path, *, durable: bool = False) -> FileEntry:
    """Return size and digests of a file; ``durable``: fsync it as well."""
    total, blocks, size = hashlib.sha256(), [], 0
    with file.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            size += len(block)
            total.update(block)
            blocks.append(digest_of(block))
        if durable:
            os.fsync(content.fileno())
    return FileEntry(size=size, sha256=total.hexdigest(), blocks=tuple(blocks))


def digest_of(block: bytes | memoryview) -> str:
    """Return the digest of a block as manifests have it."""
    return hashlib.sha256(block).hexdigest()


def _refuse_entry(where: str, name: str, entry: FileEntry) -> None:
    """Raise CheckpointCorrupt for a name, used as a path, that leaves the directory, and another number of blocks."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise CheckpointCorrupt(where, MANIFEST, "names of files inside the directory", name)
    if entry.blocks and len(entry.blocks) != -(-entry.size // BLOCK_BYTES):
        want = f"a digest for each block of the {entry.size} bytes of {name}"
        raise CheckpointCorrupt(where, MANIFEST, want, f"{len(entry.blocks)} blocks")


def _seal(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
