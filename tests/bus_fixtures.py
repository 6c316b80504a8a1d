"""A real nats-server for each test, and a unique run id."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire.subjects import nonce

BusOpener = Callable[..., AbstractAsyncContextManager[Bus]]


@pytest.fixture
def run_id() -> str:
    return f"t-{nonce()}"


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Start an empty server for one test. The test may ``kill()`` and ``start()`` it: the port stays."""
    with EmbeddedServer(tmp_path / "nats", BusConfig(port=-1)) as server:
        yield server


@pytest.fixture
def bus_url(nats_server: EmbeddedServer, run_id: str) -> str:
    """Return the address of a server for one test, which has the layout of the run."""

    async def layout() -> None:
        async with connect(nats_server.url, run_id, BusConfig(), name="layout", wait_s=60) as bus:
            await bus.create_layout()

    asyncio.run(layout())
    return nats_server.url


@pytest.fixture
def open_bus(nats_server: EmbeddedServer, run_id: str) -> BusOpener:
    """Return the opener of a bus on a server of its own, with its layout created: ``async with open_bus() as bus``.
    Keywords: settings of BusConfig, name, run.
    """

    @asynccontextmanager
    async def opened(
        *, name: str = "test", run: str = run_id, layout: bool = True, **settings: Any
    ) -> AsyncIterator[Bus]:
        config = BusConfig(**settings)
        async with connect(nats_server.url, run, config, name=name, wait_s=60) as bus:
            if layout:
                await bus.create_layout()
            yield bus

    return opened
