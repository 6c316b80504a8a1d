"""Event loops and their coroutines: ended for certain, run beside each other, woken, and their first error; and a loop
in a thread of its own, beside a thread that trains.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

log = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.1  # Seconds after which a call of a client library, which has no cleanup, is cancelled again
CLEANUP_S = 5.0  # Seconds for the cleanup of a cancelled task, which is cancelled again afterwards
Result = TypeVar("Result")


async def first_of(*works: Awaitable[object]) -> tuple[asyncio.Future[object], ...]:
    """Run several until the first ends, and cancel the others. Raises its error, if it has one.

    Returns all futures. A task that must continue is given as ``asyncio.shield(task)``.
    """
    futures = tuple(asyncio.ensure_future(work) for work in works)
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    finally:
        await ended(*futures)
    return futures


async def all_of(
    works: Iterable[Coroutine[Any, Any, Result]], *, on_end: Callable[[], None] = lambda: None
) -> list[Result]:
    """Run works concurrently and return their results in order. The first error cancels the others and is raised.

    ``on_end``: called when each of them has ended, however it ends.
    """
    # No TaskGroup: it cancels its tasks once, and waits for ever for one that swallows the cancellation.
    tasks = [asyncio.create_task(work) for work in works]
    for task in tasks:
        task.add_done_callback(lambda _: on_end())
    try:
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    finally:
        await ended(*tasks)
    return [task.result() for task in tasks]


@asynccontextmanager
async def beside(*works: Coroutine[object, object, object]) -> AsyncIterator[None]:
    """Run background loops while entered. The error of one that ends is logged at once, and ends nothing else."""
    tasks = [asyncio.create_task(work, name=getattr(work, "__qualname__", None)) for work in works]
    for task in tasks:
        task.add_done_callback(_log_error)
    try:
        yield
    finally:
        await ended(*tasks)


async def ended(*works: "asyncio.Future[Any]", again_s: float = CLEANUP_S) -> None:
    """Cancel tasks, and again every ``again_s`` seconds, until all have ended. Their errors are not raised.

    ``asyncio.wait_for`` of Python 3.11, which client libraries use, forgets a cancellation that comes together with its
    result (CPython issue 86296). A cancellation of the caller cancels them again at once, and is raised at the end.
    """
    cancelled, logged = None, False
    while running := {work for work in works if not work.done()}:
        for work in running:
            work.cancel()
        try:
            _, late = await asyncio.wait(running, timeout=again_s)
            if late and not logged:
                log.info("cancelled again, because a cancellation did not end them tasks=%s", _names(late))
                logged = True
        except asyncio.CancelledError as error:
            cancelled = error
    for work in works:
        if not work.cancelled():
            work.exception()
    if cancelled is not None:
        raise cancelled


def _names(works: Iterable["asyncio.Future[Any]"]) -> str:
    return ", ".join(sorted(work.get_name() if isinstance(work, asyncio.Task) else "future" for work in works))


async def cancellable(work: Coroutine[object, None, Result], *, again_s: float = CANCEL_AGAIN_S) -> Result:
    """Return the result of ``work``. When this is cancelled, ``work`` is cancelled as in ``ended`` until it ends."""
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
    try:
        await asyncio.wait((task,))
    finally:
        await ended(task, again_s=again_s)
    return task.result()


async def to_the_end(work: Coroutine[object, object, Result]) -> Result:
    """Run work that must not be cut short, such as a close. A cancellation is raised when it has ended."""
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()
    raise cancelled


async def heard(call: Awaitable[Result]) -> Result:
    """Await a call that may swallow a cancellation (the client library's), which is raised afterwards.

    It is raised also in place of an error of the call: the library's request may swallow the cancellation, and then
    raise because no answer came in time.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()  # above 0 in the cleanup of a cancelled task, whose calls may end normally
    try:
        result = await call
    except Exception as error:
        if task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


def _log_error(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background loop ended name=%s", task.get_name(), exc_info=error)


def first_error(error: BaseException) -> BaseException:
    """Return the first error inside of an exception group, however deep; any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


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


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop; it is not set as the current one."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


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

    def submit(self, work: Coroutine[object, None, Result]) -> "Future[Result]":
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
            log.error("%s ended error=%r", self._name, error)
        finally:
            self._has_ended = True
            for future in tuple(self._futures):  # submitted when the loop was already ending
                future.cancel()
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        await self._serve()
