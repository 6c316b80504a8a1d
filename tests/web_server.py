"""``web_server``: an application of aiohttp, really listening."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def web_server(application: web.Application, **options: Any) -> AsyncIterator[str]:
    """Serve the application at a free port while entered; yields its URL. ``options``: as of ``web.AppRunner``."""
    runner = web.AppRunner(application, **{"access_log": None, **options})
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
