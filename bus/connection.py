"""The one connection of a process to the bus, and the doors to what is on it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bus.commands import Commands
from bus.config import BusConfig
from bus.dead import DeadLetters
from bus.plans import PlanLog
from bus.rows import Rows
from bus.samples import SampleStream
from bus.tasks import TaskQueue


class Bus:
    """Open connection; everything else is reached through it."""

    run: str
    name: str
    config: BusConfig
    nc: Any
    js: Any
    tasks: TaskQueue
    samples: SampleStream
    plans: PlanLog
    dead: DeadLetters
    commands: Commands

    def rows(self, bucket: str) -> Rows:
        """One of the buckets ``weights``, ``run``, ``live``, ``wanted``."""
        raise NotImplementedError

    async def create_layout(self) -> None:
        """Streams, consumers and buckets of this run; does nothing where they exist. Raises ConfigMismatch, BusUnavailable."""

    @property
    def connected(self) -> bool:
        raise NotImplementedError

    async def wait_connected(self, timeout_s: float) -> None:
        """Raises BusUnavailable."""


@asynccontextmanager
async def connect(url: str, run: str, config: BusConfig = BusConfig(), *, name: str, wait_s: float = 60) -> AsyncIterator[Bus]:  # noqa: B008
    """Connect, waiting up to ``wait_s`` for the server; reconnects for ever afterwards. Raises BusUnavailable."""
    raise NotImplementedError
    yield
