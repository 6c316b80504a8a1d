"""A new event loop: uvloop's where that is installed, asyncio's own otherwise."""

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop; it is not set as the current one."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
