"""Graders that misbehave for a third of their calls: a reward by import path, and an HTTP server for the reward
``remote``.

In a module of its own, which keepers import: it must need nothing of pytest. A label decides how its calls go, so that
a prompt that fails fails again, and is dead after its last attempt.
"""

import asyncio
import ctypes
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from tests.web_server import web_server
from tidemill.rewards.builtin.text import digits
from tidemill.rewards.port import RewardRequest

OURS = {
    "backtracks": "no result within",
    "holds the GIL": "no result within",
    "hangs": "no result within",
    "raises": "no grade for this",
    "is rubbish": "wrote no JSON",
}
"""Kinds of calls of the reward by import path, and words of the reason for which their samples fail."""
THEIRS = {"hangs": "no answer within 0.5 s", "answers 500": "status 500", "answers rubbish": "can't decode byte"}
"""Likewise of the server."""


def kind_of(label: object, kinds: Iterable[str]) -> str:
    """Return how the calls for a label go, for a third of the labels one of ``kinds``; empty = well."""
    return (dict(enumerate(kinds))).get(int(str(label)) % (3 * len(tuple(kinds))), "")


def graded(request: RewardRequest) -> float:
    match kind_of(request.label, OURS):
        case "backtracks":
            re.fullmatch(r"(a+)+b", "a" * 60)
        case "holds the GIL":
            ctypes.PyDLL(None).sleep(1000)
        case "hangs":
            threading.Event().wait()
        case "raises":
            raise KeyError("no grade for this")
        case "is rubbish":
            _write_to_sockets(b"\x00\x00\x00\x05hello" * 10)
    return digits(request)


def _write_to_sockets(data: bytes) -> None:
    """Write to the sockets of this process, one of which leads to the actor."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            socket.socket(fileno=os.dup(descriptor)).send(data)
        except OSError:
            continue


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """Serve grades, and yield the URL."""

    async def answer(http: web.Request) -> web.StreamResponse:
        match kind_of((await http.json())["label"], THEIRS):
            case "hangs":
                await asyncio.Event().wait()
            case "answers 500":
                return web.json_response({"error": "out of order"}, status=500)
            case "answers rubbish":
                return web.Response(body=b'{"reward": [\xff\x00')
        return web.json_response({"reward": 0.5})

    application = web.Application()
    application.router.add_post("/score", answer)
    async with web_server(application, handler_cancellation=True, shutdown_timeout=0.1) as url:
        yield f"{url}/score"
