"""Server-sent events, as SGLang and OpenAI's API stream them: a JSON value each, and [DONE] at the end of a stream that is whole."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

DATA = b"data: "
"""Before the data of each event."""
END = b"[DONE]"
DONE = DATA + END + b"\n\n"
MAX_LINE_BYTES = 1 << 26
"""Of an event: each state of a stream has everything so far."""


def event(content: Mapping[str, Any]) -> bytes:
    """One event, to be written."""
    return DATA + json.dumps(content).encode() + b"\n\n"


def data_of(line: bytes) -> bytes | None:
    """The data of one line of a stream: JSON, or END; None for a line without any."""
    return line.removeprefix(DATA) if line.startswith(DATA) else None


async def data_in(chunks: AsyncIterator[bytes], *, max_line_bytes: int = MAX_LINE_BYTES) -> AsyncIterator[bytes]:
    """Yield the data of each event of a stream, END included. (aiohttp's own reader refuses lines longer than its buffer.)

    Raises ClientPayloadError at a line of more than ``max_line_bytes``, as if the connection had broken.
    """
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if (data := data_of(line)) is not None:
                yield data
        if len(rest) > max_line_bytes:
            raise aiohttp.ClientPayloadError(f"a line of more than {max_line_bytes} bytes")
