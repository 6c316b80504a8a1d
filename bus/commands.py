"""Commands to running processes: fast and lossy; what must last is written to a row as well.

A command is a JSON object ``{"command": ..., "args": {...}}`` on the core subject ``tm.<run>.do.<role>.<id>``.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from nats.aio.msg import Msg

from bus import subjects
from bus.errors import WireError
from bus.link import FOREIGN, Link
from bus.refusals import Refusals
from bus.row_shapes import json_map

ALL = "all"
_MOST_WAITING = 1000
"""Commands that wait for their process; more of them are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a process is asked to do."""

    role: str
    id: str
    """``all`` = every process of the role."""
    command: str
    """drain | pause | continue | profile | ..."""
    args: dict[str, Any] = field(default_factory=dict)


class Commands:
    """Sends and receives commands of one run."""

    def __init__(self, link: Link, run: str, refusals: Refusals) -> None:
        self._link, self._run, self._refusals = link, run, refusals

    async def send(self, role: str, id: str, command: str, args: dict[str, Any] | None = None) -> None:
        """To one process, or to ``all`` of a role. Whether anybody heard is not known. Raises BusUnavailable."""
        try:
            payload = json.dumps({"command": command, "args": args or {}}).encode()
        except (TypeError, ValueError) as error:
            raise WireError("args", "what JSON can hold", str(error)) from None
        await self._link.send(subjects.command(self._run, role, id), payload)

    async def receive(self, role: str, id: str) -> AsyncIterator[Command]:
        """Commands to this process, for ever. It hears from the first ``anext`` on."""
        arrived: asyncio.Queue[Command] = asyncio.Queue(_MOST_WAITING)

        async def hear(message: Msg) -> None:
            at = f"{message.subject} {crc32(message.data):08x}"
            command = self._refusals.read("commands", at, lambda: _read(message, role))
            if command is not None and not arrived.full():
                arrived.put_nowait(command)

        subs = []
        try:
            for name in (id, ALL):
                subs.append(await self._link.nc.subscribe(subjects.command(self._run, role, name), cb=hear))
            while True:
                yield await arrived.get()
        except FOREIGN as error:
            raise self._link.unavailable("commands", error) from None
        finally:
            if not self._link.closed:
                for sub in subs:
                    await sub.unsubscribe()


def _read(message: Msg, role: str) -> Command:
    fields = json_map(message.data)
    command, args = fields.get("command"), fields.get("args", {})
    if not isinstance(command, str) or not isinstance(args, dict):
        raise WireError("command, args", "text and a map", f"{type(command).__name__} and {type(args).__name__}")
    return Command(role=role, id=message.subject.rsplit(".", 1)[1], command=command, args=args)
