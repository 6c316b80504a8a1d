"""Samples larger than one message: cut into parts, named by a manifest, joined again. Knows no transport.

A manifest is a few bytes that any actor can write, and its readers pay for the parts it names: so it is checked before
any part is fetched, and every part as it arrives.
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill.bus.errors import WireError
from tidemill.bus.wire.message_format import MessageFormat

HEADER_RESERVE_BYTES = 1024
"""Room left for headers in a message of the largest size."""
MAX_SAMPLE_BYTES = 64 << 20
"""Size limit of a sample: of a million tokens, it has 9 bytes for each, its text and its metadata."""
_FEW_PARTS = 16
"""Number of parts that may have any size."""
_SMALLEST_PART_BYTES = 256 << 10
"""Smallest mean size of more parts, or half of the payload of a message where that is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsManifest:
    """The stored message of a sample with its bytes in parts stored before it."""

    seqs: tuple[int, ...]
    length: int
    sha256: str
    """Digest of the joined bytes, hexadecimal."""


_MANIFEST = MessageFormat(PartsManifest, "parts")


def cut(data: bytes, max_payload: int) -> Iterator[bytes]:
    """Yield pieces that fit in a message each."""
    size = max_payload - HEADER_RESERVE_BYTES
    for start in range(0, len(data), size):
        yield data[start : start + size]


def fits(data: bytes, max_payload: int) -> bool:
    """Return whether a sample of these bytes fits in one message, beside its headers."""
    return len(data) <= max_payload - HEADER_RESERVE_BYTES


def describe(data: bytes, seqs: Sequence[int]) -> bytes:
    """Return the bytes of the manifest."""
    return _MANIFEST.encode(PartsManifest(seqs=tuple(seqs), length=len(data), sha256=hashlib.sha256(data).hexdigest()))


def read_manifest(data: bytes, *, seq: int, max_payload: int) -> PartsManifest:
    """Return the manifest stored at ``seq``, before which its parts must stand.

    Raises WireError, also for one that names more bytes or more parts than a sample has, or a part twice.
    """
    manifest = _MANIFEST.read(data)
    if not 0 < manifest.length <= MAX_SAMPLE_BYTES:
        raise WireError("parts.length", f"1 to {MAX_SAMPLE_BYTES} bytes", manifest.length)
    mean_bytes = max(1, min(_SMALLEST_PART_BYTES, (max_payload - HEADER_RESERVE_BYTES) // 2))
    max_parts = _FEW_PARTS + manifest.length // mean_bytes
    if not 0 < len(manifest.seqs) <= max_parts:
        raise WireError("parts.seqs", f"1 to {max_parts} parts for {manifest.length} bytes", len(manifest.seqs))
    first, last = min(manifest.seqs), max(manifest.seqs)
    if len(set(manifest.seqs)) < len(manifest.seqs) or first < 1 or last >= seq:
        got = f"{len(manifest.seqs)} from {first} to {last}"
        raise WireError("parts.seqs", f"sequences below {seq}, each once", got)
    return manifest


class Joining:
    """The parts of one manifest, in order, as they arrive: never more bytes than it states and one part."""

    def __init__(self, manifest: PartsManifest) -> None:
        self._manifest = manifest
        self._joined, self._digest = io.BytesIO(), hashlib.sha256()

    def add(self, part: bytes) -> None:
        """Add a part. Raises WireError when the parts are longer than stated."""
        length = self._joined.tell() + len(part)
        if length > self._manifest.length:
            raise WireError("parts.length", f"{self._manifest.length} bytes", f"{length} or more")
        self._joined.write(part)
        self._digest.update(part)

    def whole(self) -> bytes:
        """Return the sample's bytes. Raises WireError when length or digest differ."""
        if self._joined.tell() != self._manifest.length:
            raise WireError("parts.length", f"{self._manifest.length} bytes", self._joined.tell())
        if self._digest.hexdigest() != self._manifest.sha256:
            raise WireError("parts.sha256", self._manifest.sha256[:64], self._digest.hexdigest())
        return self._joined.getvalue()
