"""Bodies of HTTP answers, read up to a bound: a compressed one may be a thousand times larger than it was sent. Imports no HTTP library."""

from collections.abc import AsyncIterator
from typing import Protocol


class _Content(Protocol):
    def iter_any(self) -> AsyncIterator[bytes]: ...


async def content_of(content: _Content, most_bytes: int) -> bytes:
    """Return the body of an answer, ``response.content`` of aiohttp, which unpacks it piece by piece.

    Raises ValueError for more than ``most_bytes``.
    """
    found = bytearray()
    async for piece in content.iter_any():
        found += piece
        if len(found) > most_bytes:
            raise ValueError(f"an answer of more than {most_bytes} bytes")
    return bytes(found)
