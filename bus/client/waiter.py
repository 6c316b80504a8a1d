"""A wake-up between tasks of one event loop."""

import asyncio


class Waiter:
    """``wake`` ends all present waits, or the next one where there is none.

    A wait may also end without a cause, so every caller checks its condition again, and right before it waits.
    """

    def __init__(self) -> None:
        self._waits: list[asyncio.Future[None]] = []
        self._woken = False

    def wake(self) -> None:
        """End the present waits, or the next one if there is none."""
        self._woken = True
        for wait in self._waits:
            _end(wait)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when woken, or after ``timeout_s``."""
        if not self._woken:
            loop = asyncio.get_running_loop()
            wait: asyncio.Future[None] = loop.create_future()
            self._waits.append(wait)
            timer = None if timeout_s is None else loop.call_later(timeout_s, _end, wait)
            try:
                await wait
            finally:
                if timer is not None:
                    timer.cancel()
                self._waits.remove(wait)
        self._woken = False


def _end(wait: "asyncio.Future[None]") -> None:
    if not wait.done():
        wait.set_result(None)
