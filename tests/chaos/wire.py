"""A TCP proxy to the bus that can be held: nothing passes or breaks, new connections are accepted and stay silent, as
in a cut network.
"""

import asyncio
import contextlib
from typing import Self


class Wire:
    """Async context manager of the proxy; use ``url`` instead of the server's."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rsplit(":", 1)[1])
        self._pumps: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        """Pass on the held bytes, late and in order."""
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        try:
            await self._open.wait()
            upstream, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, upstream_writer))
                both.create_task(self._pump(upstream, writer))
        except* OSError:
            pass
        finally:
            writer.close()
            self._pumps.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
