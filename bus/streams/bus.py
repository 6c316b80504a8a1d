"""The one connection of a process to the bus, through which it reaches streams and rows; the epoch; a bus's runs."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from tidemill.bus import exit_codes
from tidemill.bus.client.addresses import parse
from tidemill.bus.client.connection import Connection, open_connection, retry
from tidemill.bus.client.jetstream import JetStream
from tidemill.bus.client.layout import create_archive, create_layout
from tidemill.bus.client.outbox import answered
from tidemill.bus.client.rows import Rows, Value
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, BusUnavailable, Forbidden
from tidemill.bus.streams.dead import DeadLetters
from tidemill.bus.streams.episode_turns import TurnStream
from tidemill.bus.streams.fenced import PlanLog
from tidemill.bus.streams.samples import SampleStream
from tidemill.bus.streams.tasks import Partials, TaskQueue
from tidemill.bus.streams.trained import TrainedStream
from tidemill.bus.wire import subjects
from tidemill.bus.wire.subjects import check_run
from tidemill.bus.wire.task_settings import RUN_NAME

_log = logging.getLogger(__name__)

_DEFAULT = BusConfig()
_PAUSE_S = 1.0
_OUTAGE_S = 3600.0

T = TypeVar("T")


class Bus:
    """An open connection of one process to one run; everything else is reached through it."""

    def __init__(self, connection: Connection, run: str, config: BusConfig, name: str) -> None:
        self.run, self.name, self.config = run, name, config
        self._connection = connection
        self.jet = JetStream(connection, run, config)
        self.refusals = self.jet.refusals  # Messages and rows that this process has passed over
        self.dead = DeadLetters(self.jet)
        self.tasks = TaskQueue(self.jet, self.dead)
        self.samples = SampleStream(self.jet)
        self.partials = Partials(self.jet)
        self.turns = TurnStream(self.jet)
        self.plans = PlanLog(self.jet)
        self.trained = TrainedStream(self.jet)
        self._rows: dict[str, Rows] = {}

    @property
    def nc(self) -> Client:
        """The client library's connection, for tests and benchmarks alone."""
        return self._connection.nc

    @property
    def js(self) -> JetStreamContext:
        """The client library's JetStream context, for tests and benchmarks; it waits a minute for an answer."""
        return self._connection.nc.jetstream(timeout=60)

    @property
    def connected_url(self) -> str:
        """URL of the present server; empty while there is none."""
        return self._connection.connected_url

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def closed(self) -> bool:
        """True once the connection is closed for good."""
        return self._connection.closed

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait until the bus is connected. Raises BusUnavailable."""
        await self._connection.wait_up(timeout_s)

    async def retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``ask``, called again while the bus is away; for an hour, or until it is closed."""
        return await retry(
            self._connection,
            ask,
            pause_s=_PAUSE_S,
            outage_s=_OUTAGE_S,
            report=lambda error: _log.warning("bus: still trying error=%s", error),
        )

    def rows(self, bucket: str) -> Rows:
        """Return one of the buckets ``weights``, ``run``, ``live``, ``wanted``, ``keys``. Raises ValueError."""
        if bucket not in self._rows:
            self._rows[bucket] = Rows(self.jet, bucket)
        return self._rows[bucket]

    async def full(self) -> str:
        """Return the reason for which the bus stores nothing, with the cure; empty when it stores or is away."""
        return await self.jet.outbox.full()

    @asynccontextmanager
    async def reporting_full(self, reason: Callable[[], str]) -> AsyncIterator[None]:
        """Answer ``full`` of every process with ``reason()`` while entered: a core message, which needs no disk."""

        async def answer(message: Msg) -> None:
            if message.reply:
                await self._connection.try_send(message.reply, reason().encode())

        async with self._connection.subscribed(subjects.full(self.run), answer):
            yield

    async def announce(self, source: str, metric: Mapping[str, object]) -> None:
        """Publish live metrics of a process; they are not stored, and may be lost. Raises BusUnavailable."""
        await self._connection.send(subjects.metric(self.run, source), json.dumps(metric).encode())

    async def create_layout(self, *, shadow: bool = False) -> None:
        """Create the streams, consumers and buckets of this run that are missing.

        ``shadow``: without TASKS, by which actors find the run of a bus. On a bus with users the streams of the run's
        shadows are created, too, because shadows may create none. Raises ConfigMismatch when a stream has another
        configuration; BusUnavailable.
        """
        await (create_archive if shadow else create_layout)(self.jet)
        for name in () if shadow or not self.config.auth else self.config.auth_shadows:
            try:
                await create_archive(JetStream(self._connection, f"{self.run}-{name}", self.config))
            except Forbidden as error:  # the bus was started without this shadow
                _log.warning("no streams for the shadow %s: %s", name, error)


@asynccontextmanager
async def connect(
    url: str, run: str, config: BusConfig = _DEFAULT, *, name: str, wait_s: float = 60
) -> AsyncIterator[Bus]:
    """Connect, waiting up to ``wait_s`` for the server; afterwards reconnect for ever.

    Raises BusUnavailable naming url and reason, BusError for a server that is too old, ValueError for a bad run id.
    """
    check_run(run)
    async with open_connection(url, name, wait_s) as connection:
        yield Bus(connection, run, config, name)


async def raise_epoch(bus: Bus) -> int:
    """Make this process the newest learner, and return its epoch (the first is 1)."""

    def raised(row: Value | None) -> Value:
        return {"epoch": 1 if row is None else int(row["epoch"]) + 1, "by": bus.name}

    return int((await bus.rows("run").change(subjects.EPOCH_KEY, raised)).after["epoch"])


async def current_epoch(bus: Bus) -> int:
    """Return the epoch of the newest learner; 0 = no learner has ever started."""
    row = await bus.rows("run").get(subjects.EPOCH_KEY)
    return 0 if row is None else int(row[0]["epoch"])


LOOK_EVERY_S = 1.0
_ANSWER_S = 5.0
_NAMES = "$JS.API.STREAM.NAMES"


class SeveralRuns(ValueError):
    """A bus carries more than one run, and none was named."""

    exit_code = exit_codes.CONFIG


async def runs_on(connection: Connection, *, having: str = subjects.TASKS) -> list[str]:
    """Return the names of the runs, sorted; ``having``: a stream that they have, which shadows have but for TASKS.

    Raises BusUnavailable; BusError when the server lists no streams.
    """
    stream = re.compile(re.escape(subjects.stream("@", having)).replace("@", f"({RUN_NAME.pattern})"))
    names_of_runs: list[str] = []
    offset = 0
    while True:
        message = await connection.request(_NAMES, json.dumps({"offset": offset}).encode(), _ANSWER_S)
        answer = answered(_NAMES, message.data)
        if "error" in answer:
            raise BusError(f"runs of the bus: {answer['error'].get('description', answer['error'])}")
        names = answer.get("streams") or []
        names_of_runs += [match[1] for name in names if (match := stream.fullmatch(name))]
        offset += len(names)
        if not names or offset >= int(answer.get("total", 0)):
            return sorted(names_of_runs)


async def runs_of(url: str, *, name: str, wait_s: float, having: str = subjects.TASKS) -> list[str]:
    """Return the names of the runs on the bus at ``url``, as ``runs_on``."""
    async with open_connection(url, name, wait_s) as connection:
        return await runs_on(connection, having=having)


async def find_run(url: str, *, name: str, wait_s: float) -> str:
    """Return the name of the one run on the bus at ``url``, which may start within ``wait_s``.

    Raises SeveralRuns naming them, BusUnavailable.
    """
    deadline = time.monotonic() + wait_s
    async with open_connection(url, name, wait_s) as connection:
        while True:
            names = await runs_on(connection)
            if len(names) == 1:
                return names[0]
            if names:
                runs = f"{len(names)} runs ({', '.join(names)})"
                raise SeveralRuns(f"--run: {parse(url)} carries {runs}; want the name of one")
            if time.monotonic() > deadline:
                raise BusUnavailable(f"run on {parse(url)}", f"none there within {wait_s:.0f} s")
            await asyncio.sleep(LOOK_EVERY_S)
