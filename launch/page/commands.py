"""Commands of an operator on a page: desired numbers of processes, and decisions on dead tasks.

Only a server that was started for an operator has these routes. Each wants the operator's cookie and the Origin of the
page (``launch.page.access``), and writes what ``tidemill scale`` and ``tidemill dead`` write.
"""

import os
import socket
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from tidemill.bus.http.access import Handler, Route
from tidemill.bus.http.listener import body_in, json_in
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.dead import DROP, REQUEUE
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import DeadLetterDecision
from tidemill.launch.page.texts import made_safe
from tidemill.launch.run import desired

MAX_TASKS = 1000  # Tasks of one decision


def commands(bus: Bus) -> dict[str, Route]:
    """Return the routes of commands."""
    operator = Operator(bus)
    return {
        "POST /do/scale": Route.command(_handler(operator.scale)),
        "POST /do/requeue": Route.command(_handler(lambda body: operator.decide(body, REQUEUE))),
        "POST /do/drop": Route.command(_handler(lambda body: operator.decide(body, DROP))),
    }


class Operator:
    """Writes the operator's rows and decisions."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def scale(self, body: Mapping[str, Any]) -> JsonObject:
        """Set the desired numbers of a host, a pool or all. Raises ValueError."""
        counts, host, pool = body.get("counts"), body.get("host", ""), body.get("pool", "")
        if not isinstance(counts, Mapping) or not isinstance(host, str) or not isinstance(pool, str):
            raise ValueError("counts, host, pool: want a map of numbers, and two texts")
        if not all(type(count) is int for count in counts.values()):
            raise ValueError(f"counts: want whole numbers, got {counts!r}")
        chosen = desired.parse([f"{role}s={count}" for role, count in counts.items()])
        if not chosen:
            raise ValueError("counts: want at least one of engine, scorer, actor")
        key = desired.host_key(host) if host else desired.pool_key(pool) if pool else desired.ALL
        before, after = await desired.change(self._bus, key, chosen)
        return {"key": key, "before": before, "after": after}

    async def decide(self, body: Mapping[str, Any], word: str) -> JsonObject:
        """Requeue or drop dead tasks; the first decision on a task counts. Raises ValueError."""
        tasks = body.get("tasks")
        if not isinstance(tasks, list) or not tasks or not all(type(task) is int and task > 0 for task in tasks):
            raise ValueError("tasks: want a list of ids of dead tasks")
        if len(tasks) > MAX_TASKS:
            raise ValueError(f"tasks: want at most {MAX_TASKS}, got {len(tasks)}")
        letters = {task: await self._bus.dead.of(task) for task in tasks}
        for task, letter in letters.items():
            if letter is None or (word == REQUEUE and letter.root < 0):
                raise ValueError(f"tasks: {task} is not dead, or its prompt is not known")
        by = f"page of {os.environ.get('USER', 'unknown')} on {socket.gethostname()}"
        decisions = [DeadLetterDecision(task=task, word=word, by=by) for task in tasks]
        return {"decided": [decision.task for decision in decisions if await self._bus.dead.decide(decision)]}


async def dead_tasks(bus: Bus) -> JsonObject:
    """Return the newest dead tasks with the decisions on them."""
    letters, decisions = [dead async for _, dead in bus.dead.scan()], await bus.dead.decisions()
    names = ("task", "reason", "attempts", "actor")
    rows = [
        {name: getattr(letter, name) for name in names}
        | {"prompt": str(letter.prompt)[:200]}
        | {"decision": decisions[letter.task].word if letter.task in decisions else None}
        for letter in letters[-MAX_TASKS:]
    ]
    return {"dead": made_safe(rows[::-1])}


def _handler(command: Any) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = json_in(body_in(request))
        if not isinstance(body, Mapping):
            raise ValueError("body: want a JSON object")
        return web.json_response(await command(body))

    return handler
