"""An event loop in a thread of its own, beside a thread that trains."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from tidemill.bus.system.coroutines import first_error, new_event_loop

_log = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """``start``, then ``submit`` from any thread, and ``close``. ``serve`` calls ``ready`` and awaits ``closing``."""

    def __init__(self, name: str, serve: Callable[[], Coroutine[object, None, None]]) -> None:
        self._name, self._serve = name, serve
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._futures: set[Future[Any]] = set()
        self._has_ended = False
        self.failure: BaseException | None = None  # Error that ended ``serve``

    @property
    def is_alive(self) -> bool:
        """False before ``start``, and when the thread has ended."""
        return self._thread.is_alive()

    def start(self, timeout_s: float) -> None:
        """Start the thread and wait until ``serve`` is ready. Raises its error, and TimeoutError."""
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"{self._name}: not ready after {timeout_s:.0f} s")
        if self.failure is not None:
            raise self.failure

    def submit(self, work: Coroutine[object, None, T]) -> "Future[T]":
        """Run ``work`` in the loop. The future is cancelled when the thread ends first; RuntimeError after it."""
        assert self._loop is not None
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # its loop has just ended
            work.close()
            raise
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        # The loop may have ended between the call above and this line, after ``_run`` cancelled the futures that it
        # knew.
        if self._has_ended:
            future.cancel()
        return future

    def close(self, timeout_s: float) -> None:
        """Let ``serve`` end, and wait for the thread. Safe to call twice, and without ``start``."""
        if self._loop is not None and self._closing is not None:
            with suppress(RuntimeError):  # its loop has ended already
                self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- the thread of the loop

    def ready(self) -> None:
        self._ready.set()

    async def closing(self) -> None:
        """Wait until ``close`` is called."""
        assert self._closing is not None
        await self._closing.wait()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:  # a push is many small requests
                runner.run(self._main())
        except BaseException as error:  # raised by ``start``, or by the next call of the owner
            self.failure = error = first_error(error)
            _log.error("%s ended error=%r", self._name, error)
        finally:
            self._has_ended = True
            for future in tuple(self._futures):  # submitted when the loop was already ending
                future.cancel()
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        await self._serve()
