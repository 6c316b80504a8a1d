"""Discovery of the runs on a bus, for a process that has only its URL."""

import asyncio
import json
import re
import time

from tidemill.bus import exit_codes
from tidemill.bus.client.address import parse
from tidemill.bus.client.connection import Connection, open_connection
from tidemill.bus.client.outbox import answered
from tidemill.bus.config import RUN_NAME
from tidemill.bus.errors import BusError, BusUnavailable
from tidemill.bus.wire import subjects

LOOK_EVERY_S = 1.0
"""Interval of looking for a run that is to start."""
_ANSWER_S = 5.0
_TASKS = re.compile(re.escape(subjects.stream("@", subjects.TASKS)).replace("@", f"({RUN_NAME.pattern})"))


class SeveralRuns(ValueError):
    """A bus carries more than one run, and none was named."""

    exit_code = exit_codes.CONFIG


async def runs_on(connection: Connection) -> list[str]:
    """Return the names of the runs, sorted. Raises BusUnavailable; BusError when the server refuses to list its streams."""
    found: list[str] = []
    offset = 0
    while True:
        request = json.dumps({"offset": offset}).encode()
        answer = answered("$JS.API.STREAM.NAMES", (await connection.request("$JS.API.STREAM.NAMES", request, _ANSWER_S)).data)
        if "error" in answer:
            raise BusError(f"runs of the bus: {answer['error'].get('description', answer['error'])}")
        names = answer.get("streams") or []
        found += [match[1] for name in names if (match := _TASKS.fullmatch(name))]
        offset += len(names)
        if not names or offset >= int(answer.get("total", 0)):
            return sorted(found)


async def find_run(url: str, *, name: str, wait_s: float) -> str:
    """Return the name of the one run on the bus at ``url``. Waits up to ``wait_s``: the bus, or the run, may start later.

    Raises SeveralRuns naming them, BusUnavailable.
    """
    deadline = time.monotonic() + wait_s
    async with open_connection(url, name, wait_s) as connection:
        while True:
            found = await runs_on(connection)
            if len(found) == 1:
                return found[0]
            if found:
                raise SeveralRuns(f"--run: {parse(url)} carries {len(found)} runs ({', '.join(found)}); want the name of one")
            if time.monotonic() > deadline:
                raise BusUnavailable(f"run on {parse(url)}", f"none there within {wait_s:.0f} s")
            await asyncio.sleep(LOOK_EVERY_S)
