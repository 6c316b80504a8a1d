"""Server-sent events of SGLang and OpenAI: one JSON value each, and [DONE] at the end of a complete stream."""

import json
from collections.abc import AsyncIterator, Mapping

import aiohttp

DATA = b"data: "
"""Prefix of the data of each event."""
END = b"[DONE]"
"""Data of the last event of a complete stream."""
DONE = DATA + END + b"\n\n"
"""The last event, encoded."""
MAX_LINE_BYTES = 1 << 26
"""Maximum number of bytes of one event: each state of a stream has the whole response so far."""


def event(content: Mapping[str, object]) -> bytes:
    """Return one event, encoded."""
    return DATA + json.dumps(content).encode() + b"\n\n"


def named_event(content: Mapping[str, object]) -> bytes:
    """Return one event that is named by its ``type``, encoded."""
    return f"event: {content['type']}\n".encode() + event(content)


def data_of(line: bytes) -> bytes | None:
    """Return the data of one line of a stream, JSON or END; None for a line without data."""
    return line.removeprefix(DATA) if line.startswith(DATA) else None


async def data_in(chunks: AsyncIterator[bytes], *, max_line_bytes: int = MAX_LINE_BYTES) -> AsyncIterator[bytes]:
    """Yield the data of each event of a stream, END included. (aiohttp's own reader refuses lines longer than its
    buffer.) Raises ClientPayloadError at a line of more than ``max_line_bytes``, as if the connection had broken.
    """
    unended = b""
    async for chunk in chunks:
        *lines, unended = (unended + chunk).split(b"\n")
        for line in lines:
            if (data := data_of(line)) is not None:
                yield data
        if len(unended) > max_line_bytes:
            raise aiohttp.ClientPayloadError(f"a line of more than {max_line_bytes} bytes")
