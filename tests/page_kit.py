"""A page of a run on a real bus, its viewers, and a run whose every number is known."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests import data_kit
from tests.waits import LIMIT_S
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import beside
from tidemill.bus.wire.messages import Done, Plan, Sample, Settle, Task
from tidemill.launch.page.access import PageAccess
from tidemill.launch.page.answers import RunAnswers
from tidemill.launch.page.commands import commands
from tidemill.launch.page.compared import ComparedRuns
from tidemill.launch.page.reader import RunReader
from tidemill.launch.page.samples import SampleAnswers
from tidemill.launch.page.server import PageServer
from tidemill.weightstore.store.registry import VersionRegistry

VIEWER, OPERATOR = "v" * 16, "o" * 16
HOSTILE = "<script>x()</script><img src=y onerror=x()>{{7*7}}\x1b]0;t\x07\u202eevil\u2028\u200b\x00 \U0001f600 ok"
SHOWN = r"<script>x()</script><img src=y onerror=x()>{{7*7}}\x1b]0;t\x07\u202eevil\u2028\u200b\x00"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a page."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        """Return the body as JSON; NaN and infinite numbers are no JSON."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"want JSON, got {constant}")

        return json.loads(self.body, parse_constant=refuse)


@dataclass
class Page:
    """A page that is served, and the client of one viewer."""

    url: str
    server: PageServer
    reader: RunReader
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        headers = {**self.headers, **options.pop("headers", {})}
        async with asyncio.timeout(LIMIT_S):
            async with self.session.request(
                method, self.url + path, headers=headers, allow_redirects=False, **options
            ) as response:
                return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of an answer with status 200."""
        answer = await self.request("GET", f"/api/{path}", params={name: str(value) for name, value in query.items()})
        assert answer.status == 200, (path, query, answer.body)
        return answer.json

    async def until(self, path: str, fits: Any, **query: Any) -> Any:
        """Return the first answer that fits. The next event is waited for in between."""
        async with asyncio.timeout(LIMIT_S):
            async for _ in self.events():
                if fits(answer := await self.get(path, **query)):
                    return answer
        raise AssertionError("the events ended")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of one connection."""
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with self.session.get(f"{self.url}/events", headers=self.headers, timeout=timeout) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])


@asynccontextmanager
async def page_of(
    bus: Bus,
    *,
    access: PageAccess | None = None,
    operator: bool = False,
    url: str = "",
    compared: Sequence[Path] = (),
    **reader_options: Any,
) -> AsyncIterator[Page]:
    """Serve the page of a run; the client has the headers that ``access`` needs from a viewer (or the operator)."""
    reader = RunReader(bus, **reader_options)
    access = access or PageAccess()
    others = ComparedRuns(url or bus.nc.connected_url.geturl(), bus.run, compared)
    routes = commands(bus) if operator else None
    server = PageServer(reader, RunAnswers(reader), SampleAnswers(reader), access, others, routes)
    cookie = access.cookie("operator" if operator else "viewer")
    headers = {"Cookie": f"{access.cookie_name}={cookie}"} if cookie else {}
    try:
        async with beside(reader.run()), server.serving("127.0.0.1", 0) as url:
            # Without a jar: a cookie of one test's page is not sent to another.
            async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
                yield Page(url, server, reader, session, headers)
    finally:
        await reader.close()


class Run:
    """A run that a test writes: tasks, samples, plans and outcomes of one learner."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.registry = bus, VersionRegistry(bus)
        self.tasks: list[Task] = []
        self.num_steps = 0

    async def begin(self) -> "Run":
        await self.bus.tasks.fence(1)
        await self.bus.plans.fence(1)
        await self.registry.publish_initial("", 1)
        return self

    async def task(self, **changes: Any) -> Task:
        task = replace(data_kit.task(len(self.tasks) + 1), run=self.bus.run, **changes)
        self.tasks.append(replace(task, id=await self.bus.tasks.issue(task)))
        return self.tasks[-1]

    async def sample(self, task: Task, index: int, **changes: Any) -> int:
        return await self.publish(data_kit.sample(task, index, changes.pop("spans", ((0, 3),)), **changes))

    async def publish(self, sample: Sample) -> int:
        return await self.bus.samples.publish(sample)

    async def plan(self, groups: dict[int, list[int]], **changes: Any) -> None:
        """Record the plan of the next step. ``groups``: task id -> sequences of its samples."""
        self.num_steps += 1
        seqs = [seq for of_task in groups.values() for seq in of_task]
        values: dict[str, Any] = {
            "epoch": 1,
            "step": self.num_steps,
            "tasks": np.array(list(groups), np.int64),
            "seqs": np.array(seqs, np.int64),
            "group_sizes": np.array([*map(len, groups.values())], np.int32),
            "ranks": np.zeros(len(seqs), np.int32),
            "micro_batches": np.zeros(len(seqs), np.int32),
            "version_steps": {0: 0},
            "oldest_step": None,
            "data_parallel": 1,
            "num_micro_batches": 1,
            "config_digest": "",
            "chain": "",
        }
        await self.bus.plans.append(Plan(**(values | changes)))

    async def done(self, step: int, **metrics: float) -> None:
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        await self.bus.plans.append(Done(epoch=1, step=step, metrics=named))

    async def settle(self, task: int, seqs: list[int], reason: str) -> None:
        tasks, settled = np.array([task], np.int64), np.array(seqs, np.int64)
        await self.bus.plans.append(Settle(epoch=1, reason=reason, tasks=tasks, seqs=settled, step=1))


def routes_of(page: Page) -> list[str]:
    """Return the routes of a page, as METHOD /path."""
    return sorted(page.server.listener.rules)
