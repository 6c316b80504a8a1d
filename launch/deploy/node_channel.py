"""Messages between the processes of one node of a learner, as lines of JSON over a Unix socket."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from typing import Annotated

import msgspec

log = logging.getLogger(__name__)

MAX_LINE = 1 << 20
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class DeviceSeen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    uuid: str
    memory_bytes: int
    slice: int


class Hello(msgspec.Struct, tag=True):
    """First message of a parent."""

    local_rank: Annotated[int, msgspec.Meta(ge=1)]
    devices: tuple[DeviceSeen, ...]


class Start(msgspec.Struct, tag=True):
    """Start the rank."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    keys: dict[str, str | list[str]]


class Signal(msgspec.Struct, tag=True):
    """Send a signal to the rank's process group."""

    number: int


class End(msgspec.Struct, tag=True):
    """End with this code."""

    code: int


class Progress(msgspec.Struct, tag=True):
    """Bytes of the rank about its steps."""

    data: bytes


class Ended(msgspec.Struct, tag=True):
    """The rank has ended."""

    code: int
    lines: tuple[str, ...]
    reason: str


class Drain(msgspec.Struct, tag=True):
    """The parent has received SIGTERM."""


Message = Hello | Start | Signal | End | Progress | Ended | Drain
_DECODER = msgspec.json.Decoder(Message)


class Channel:
    """Messages to and from one process of this node and user."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def is_own(self) -> bool:
        """Return whether the other end is a process of this user."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return user == os.getuid()

    def send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self) -> Message | None:
        """Return the next message; None when the other end is gone, or sent none that can be read."""
        try:
            line = await self._reader.readline()
            return _DECODER.decode(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("a process of this node is not understood error=%s", error)
            return None

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
