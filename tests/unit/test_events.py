"""Server-sent events: written and read again, for any division into chunks."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import aiohttp
import pytest

from tidemill.actors.http_api import DONE, END, data_in, data_of, event

WRITTEN = event({"text": "a\n\u00e9"}) + event({}) + DONE


async def read(raw: bytes, size: int, **bound: int) -> list[bytes]:
    async def chunks() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(raw), size):
            yield raw[start : start + size]

    async with aclosing(chunks()) as given:
        return [data async for data in data_in(given, **bound)]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_what_is_written_is_read(size: int) -> None:
    assert await read(WRITTEN, size) == [b'{"text": "a\\n\\u00e9"}', b"{}", END]
    assert await read(b": comment\nid: 1\n" + event({}), size) == [b"{}"], "no line without data"
    assert await read(event({}) + b'data: {"cut', size) == [b"{}"], "an event that is cut off is none"


async def test_a_line_without_an_end_is_given_up() -> None:
    assert await read(event({"long": "x" * 80}), 10, max_line_bytes=100) != []
    with pytest.raises(aiohttp.ClientPayloadError, match="more than 100 bytes"):
        await read(event({"long": "x" * 100}), 10, max_line_bytes=100)


def test_the_data_of_a_line() -> None:
    assert [data_of(line) for line in (b"data: {}", b"", b"id: 1")] == [b"{}", None, None]
