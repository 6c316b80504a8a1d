"""Both kinds of engine behind one kit: the built-in one in this process, and a proxy in front of a real SGLang server.

Tests of ``tests/contract`` that take ``kind`` run on the built-in engine, the contract of engines also with its runner
over transformers, and with ``--sglang-python`` on SGLang as well.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp

from tests.engine_serving import Gate, Served
from tests.sglang.server import ARGUMENTS, ENVIRONMENT, config
from tests.waits import LIMIT_S
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.actors.serving.sglang.server_process import STOP_S, Api, command_line, server_child
from tidemill.bus.client.addresses import KeptPort

START_S = 300.0
MAX_RUNNING = 16
UNGUARDED = Authority(unguarded=True)


class Kind(Protocol):
    """Source of engines of one kind for tests."""

    name: str
    dtype: str
    in_standby: bool
    """True when an interrupted push leaves the older weights served; otherwise nothing is served before the next push.
    """
    seeds: bool
    """True when a request with a seed is answered equally each time; otherwise a greedy one is."""
    long: int
    """Tokens of a response that is being decoded while a test does its part."""

    def serving(self, directory: Path, *, version: int = 0) -> AbstractAsyncContextManager[Served]:
        """Serve the weights of ``directory`` with an engine for one test."""
        ...

    def hold(self, served: Served, *, after: int) -> Gate:
        """Let the engine of a test do ``after`` decoding steps, and more when the gate lets it. SGLang is only slowed
        until it is open.
        """
        ...


class Builtin:
    """A new engine for every test."""

    name, in_standby, seeds, long = "builtin", True, True, 300

    def __init__(self, dtype: str, runner: Literal["auto", "transformers"] = "auto") -> None:
        self.dtype, self._runner = dtype, runner

    @asynccontextmanager
    async def serving(self, directory: Path, *, version: int = 0) -> AsyncIterator[Served]:
        settings = EngineConfig(max_running=MAX_RUNNING, dtype=self.dtype, runner=self._runner)
        engine = BuiltinEngine(directory, settings, version=version, authority=UNGUARDED)
        await asyncio.to_thread(engine.load)
        async with _served(engine) as served:
            yield served

    def hold(self, served: Served, *, after: int) -> Gate:
        return served.hold(after=after)


class Brake(Gate):
    """Slows a server of SGLang down: a file (``tests/sglang/stand_in``). It lets no number of steps pass, and opens for
    all of them.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(0)
        self._file = file

    def put_on(self) -> None:
        self._file.touch()

    def let(self, steps: int) -> None:
        """Leave it as it is: the steps are made slowly."""

    def open(self) -> None:
        self._file.unlink(missing_ok=True)


class Sglang:
    """One server for all tests; for each of them a new proxy, and its weights loaded."""

    name, in_standby, seeds, long = "sglang", False, False, 1200

    def __init__(self, python: str, url: str, dtype: str, slowed: Path) -> None:
        """``slowed``: that of the server (``sglang_server``)."""
        self.python, self.url, self.dtype, self._brake = python, url, dtype, Brake(slowed)

    @asynccontextmanager
    async def serving(self, directory: Path, *, version: int = 0) -> AsyncIterator[Served]:
        engine = SglangEngine(
            directory, replace(config(self.python, url=self.url), dtype=self.dtype), version=-1, authority=UNGUARDED
        )
        await asyncio.to_thread(engine.load)
        try:
            async with _served(engine, first=(directory, version)) as served:
                yield served
        finally:
            self._brake.open()

    def hold(self, served: Served, *, after: int) -> Gate:
        self._brake.put_on()
        return self._brake


@asynccontextmanager
async def _served(engine: Any, first: tuple[Path, int] | None = None) -> AsyncIterator[Served]:
    client = HttpEngine(await engine.start())
    try:
        if first is not None:
            await engine.load_snapshot(*first)
        engine.phase = "serving"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
            yield Served(engine, client, session)
    finally:
        await client.close()
        await engine.close()


@contextmanager
def sglang_server(
    python: str, directory: Path, log: Path, *, dtype: str, slowed: Path | None = None, **more: Any
) -> Iterator[str]:
    """Run a server in a loop and a thread of its own; yield its URL. It decodes slowly while there is the file
    ``slowed``.
    """
    kept = KeptPort()
    port = kept.number
    words = command_line(
        python, directory, port, {**ARGUMENTS, "dtype": dtype, "max_running_requests": MAX_RUNNING, **more}
    )
    ready, stop, failed = threading.Event(), threading.Event(), list[str]()

    async def run() -> None:
        environment = ENVIRONMENT | ({"SLOWED_WHILE": str(slowed)} if slowed else {})
        child, api = server_child(words, environment, log), Api(f"http://127.0.0.1:{port}")
        await child.start()
        try:
            deadline = time.monotonic() + START_S
            while not await api.healthy():
                if not child.running or time.monotonic() > deadline:
                    failed.append(child.last_lines(40))
                    return
                await asyncio.sleep(0.5)
            ready.set()
            await asyncio.to_thread(stop.wait)
        finally:
            ready.set()
            await api.close()
            await child.end(STOP_S, group=True)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="sglang server")
    thread.start()
    try:
        ready.wait()
        assert not failed, failed[0]
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()
        kept.close()
