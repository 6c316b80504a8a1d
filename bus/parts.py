"""Samples larger than one message: cut into parts, named by a manifest, joined again. Knows no transport."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bus.codec import Table, unpack
from bus.errors import WireError
from bus.forms import INT, TEXT, many

HEADER_RESERVE_BYTES = 1024
"""Room left for headers in a message of the largest size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Stands in the stream for a sample whose bytes are in parts stored before it."""

    seqs: tuple[int, ...]
    """Sequences of the parts, in order."""
    length: int
    sha256: str
    """Of the joined bytes, hexadecimal."""


_MANIFEST = Table(Manifest, "parts", seqs=many(INT), length=INT, sha256=TEXT)


def cut(data: bytes, max_payload: int) -> Iterator[bytes]:
    """Pieces that fit in a message each."""
    size = max_payload - HEADER_RESERVE_BYTES
    for start in range(0, len(data), size):
        yield data[start : start + size]


def fits(data: bytes, max_payload: int) -> bool:
    return len(data) <= max_payload - HEADER_RESERVE_BYTES


def describe(data: bytes, seqs: Sequence[int]) -> bytes:
    """Bytes of the manifest."""
    return _MANIFEST.encode(Manifest(seqs=tuple(seqs), length=len(data), sha256=hashlib.sha256(data).hexdigest()))


def read_manifest(data: bytes) -> Manifest:
    """Raises WireError."""
    manifest: Manifest = _MANIFEST.decode(unpack(data, "parts"))
    return manifest


def join(manifest: Manifest, parts: Sequence[bytes]) -> bytes:
    """The sample's bytes. Raises WireError when length or digest differ."""
    data = b"".join(parts)
    if len(data) != manifest.length:
        raise WireError("parts.length", f"{manifest.length} bytes", len(data))
    digest = hashlib.sha256(data).hexdigest()
    if digest != manifest.sha256:
        raise WireError("parts.sha256", manifest.sha256, digest)
    return data
