"""Frames between an actor and the workers of its reward: four bytes of length (big-endian), then one JSON map.

The code of a user can write to the worker's end. So a frame that an actor reads has a bounded size, and anything but a
map is BadFrame.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping

from tidemill.bus.wire.json_object import JsonObject

MAX_RESULT_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


class BadFrame(Exception):
    """The bytes read are no frame."""


def encode(message: Mapping[str, object]) -> bytes:
    """Return the frame of a message. Raises TypeError, ValueError or RecursionError for values that JSON lacks."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def encode_call(number: int, request: bytes) -> bytes:
    """Return the frame of a call, with the JSON of its request."""
    body = b'{"id": %d, "request": %s}' % (number, request)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> JsonObject:
    """Return the map in the body of a frame. Raises BadFrame."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"no JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame(f"want a map, got {type(message).__name__}")
    return message


async def read(reader: asyncio.StreamReader, max_bytes: int = MAX_RESULT_BYTES) -> JsonObject | None:
    """Return the next message, None at the end. Raises BadFrame."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > max_bytes:
            raise BadFrame(f"a result of {size} bytes, want at most {max_bytes}")
        return decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive(connection: socket.socket) -> JsonObject | None:
    """Return the next message of a blocking socket, None at the end."""
    head = _exactly(connection, _LENGTH.size)
    body = _exactly(connection, _LENGTH.unpack(head)[0]) if head else b""
    return decode(body) if body else None


def _exactly(connection: socket.socket, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        piece = connection.recv(min(size - len(body), 1 << 20))
        if not piece:
            return b""
        body += piece
    return bytes(body)
