"""Messages between the feeder and its readers of SAMPLES, over a socket pair: a length, then msgpack.

feeder -> reader: a ``ReadRequest``, then lists of the sequences that no rank needs any more.
reader -> feeder: ``Opened``, then ``Rows``, ``Alive`` and at its end perhaps ``Failed``.
"""

import asyncio
import struct
from typing import Any

import msgspec

from tidemill.bus.wire.messages import Cursor
from tidemill.learner.buffer.sample_index import SampleIndex, Unusable
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.read_options import ReadOptions

_LENGTH = struct.Struct(">I")


class ReadRequest(msgspec.Struct, kw_only=True):
    """First message to a reader."""

    url: str
    run: str
    shards: int
    shard: int
    cursor: Cursor
    options: ReadOptions
    checked_before: list[int]
    listen: str
    """Where ranks fetch samples: tcp://host:*."""
    keys: FeedKeys


class Opened(msgspec.Struct, array_like=True, tag="opened"):
    """Ranks can fetch samples at this port."""

    port: int


class Rows(msgspec.Struct, array_like=True, tag="rows"):
    """What a reader has read: ``passed`` is the last sequence of the shard, settled ones and parts included."""

    passed: int
    pending: int
    """Messages of SAMPLES that are not read yet, as far as it is known."""
    entries: list[SampleIndex | Unusable]


class Alive(msgspec.Struct, array_like=True, tag="alive"):
    """The reader runs."""


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The error of the bus that ended a reader."""

    name: str
    args: list[Any]


FromReader = Opened | Rows | Alive | Failed
FROM_READER: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)
_REQUEST: msgspec.msgpack.Decoder[ReadRequest] = msgspec.msgpack.Decoder(ReadRequest)
_SEQS: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[int])


def frame(message: object) -> bytes:
    """Return the bytes of a message."""
    packed = msgspec.msgpack.encode(message, enc_hook=_text)
    return _LENGTH.pack(len(packed)) + packed


def _text(value: object) -> object:
    """Return a value of an error that msgpack does not have, as text; a sample stays in the reader."""
    return str(value)


async def next_frame(stream: asyncio.StreamReader) -> bytes:
    """Return the bytes of the next message. Raises IncompleteReadError, ConnectionError at the end of the stream."""
    (size,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    return await stream.readexactly(size)


async def next_request(stream: asyncio.StreamReader) -> ReadRequest:
    """Return the first message to a reader."""
    return _REQUEST.decode(await next_frame(stream))


async def next_released(stream: asyncio.StreamReader) -> list[int]:
    """Return sequences of samples that no rank needs any more."""
    return _SEQS.decode(await next_frame(stream))
