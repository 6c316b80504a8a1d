"""The learner's side of the weightstore: a thread that pushes versions to the engines and serves snapshots of the head.

    trainer's thread                     publisher's thread (own loop, own bus connection; see pusher.py)
    publish(step, tensors)
      waits for the previous push
      copies into a staging  --------->  push: reserve, reconcile members, transfer, head
    handle.result()  <-----------------  PushReport | PushFailed | Fenced
                                         meanwhile: snapshots of the head, for engines that join late

Consumes tensors, live rows and snapshot requests; produces rows in ``weights``, pushes and snapshots. Every wait has a deadline.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from tidemill.bus.client.addresses import reach, route_to
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import Fenced
from tidemill.bus.streams.bus import connect
from tidemill.bus.system.coroutines import first_error, new_event_loop
from tidemill.bus.wire.rows import VersionRow
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import PublisherClosed
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.pusher import Pusher, PushReport, Source
from tidemill.weightstore.transport.nccl import own_end
from tidemill.weightstore.transport.parts import Division
from tidemill.weightstore.transport.staging import Staging, StagingPool, staging_memory

_log = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 60.0
"""Time that the bus has to answer when the publisher starts."""
_CLOSE_S = 10.0
"""Time that the thread has to end, beyond the deadline of the phase that a push may be in."""
_STAGING_S = 600.0
"""A snapshot that is being written holds its staging copy for as long as the disk takes."""
_DEFAULT_BUS = BusConfig()


def _nothing(number: int) -> None:
    """Do nothing: no other rank has a part."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of the weights of a step that is to be pushed."""

    staging: Staging
    step: int
    prepare_s: float

    def release(self) -> None:
        """Give the copy back. A push under way keeps its own hold of it."""
        self.staging.release()


class PushHandle:
    """A push under way."""

    def __init__(self, future: "Future[PushReport]") -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """True once the push has ended, with success or failure."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the push has ended, with success or failure; each of its phases has a deadline."""
        try:
            self._future.exception()
        except CancelledError:
            return

    def result(self, timeout: float | None = None) -> PushReport:
        """Wait for the end of the push. Returns its report.

        Raises PushFailed, Fenced, PublisherClosed; TimeoutError when it is still under way.
        """
        try:
            return self._future.result(timeout)
        except CancelledError:
            raise PublisherClosed("publisher: closed during the push") from None


class Publisher:
    """Pushes versions and serves snapshots in a thread of its own; called from one thread, the trainer's on rank 0.

    Needs host memory for two copies of the weights.
    """

    def __init__(
        self,
        config: WeightsConfig,
        *,
        bus_url: str,
        run: str,
        epoch: int,
        directory: Path,
        model_dir: Path | None = None,
        division: Division | None = None,
        bus_config: BusConfig = _DEFAULT_BUS,
    ) -> None:
        """Snapshots are kept in ``directory``, with the configuration and tokenizer of ``model_dir``.

        ``division``: the tensors that are staged here, and those of other ranks; without it all are staged here, and the first publish
        needs all at once.
        """
        self.config, self.run, self.epoch = config, run, epoch
        self._bus_url, self._bus_config = bus_url, bus_config
        self._directory, self._model_dir = Path(directory), model_dir
        self._own = own_end()
        self._memory = staging_memory(config, self._own)
        self._division = division
        self._pool = None if division is None else self._new_pool(division.own)
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._last: PushHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pusher: Pusher | None = None
        self._closing: asyncio.Event | None = None
        self._futures: set[Future[Any]] = set()
        self._over = False
        self._pushing: asyncio.Task[object] | None = None

    # -- the trainer's thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, fence older learners, serve snapshots. Raises BusUnavailable, Fenced, PublisherClosed."""
        self._thread.start()
        if not self._ready.wait(START_S + _CLOSE_S):
            raise PublisherClosed(f"publisher: not ready after {START_S + _CLOSE_S:.0f} s")
        if self._failure is not None:
            raise self._failure

    def publish_initial(self, model_dir: Path) -> VersionRow:
        """Make the model directory version 0 of step 0, unless there is a head already. Returns the head. Raises BusUnavailable, Fenced."""
        pusher = self._running()
        digest = "" if self._division is None else self._division.whole.digest
        return self._submit(pusher.publish_initial(str(model_dir), digest)).result(START_S)

    def publish(self, step: int, tensors: Iterable[tuple[str, Tensor]], *, wait: bool) -> PushHandle:
        """Copy the tensors now and push them as the next version; with ``wait`` return only when the push has ended.

        Waits as ``stage`` does. Returns the handle of the push, which has its outcome. Raises BadManifest, Fenced, PublisherClosed.
        """
        staged = self.stage(step, tensors)
        try:
            handle = self.push(staged)
        finally:
            staged.release()
        if wait:
            handle.wait()
        return handle

    def stage(self, step: int, tensors: Iterable[tuple[str, Tensor]], chosen: Callable[[int], None] = _nothing) -> "Staged":
        """Copy the tensors now, and return the copy; ``release`` it when it is not to be pushed (again).

        ``chosen`` is called with the number of the copy before it is filled: other ranks fill theirs of that number.
        Waits first for the end of the previous push (each of its phases has a deadline), and for the snapshot of the version before the
        head if that is still being written. Raises BadManifest, Fenced, PublisherClosed.
        """
        if self._last is not None:
            self._last.wait()
        self._running()
        if self._pool is None:
            tensors = list(tensors)
            self._division = Division(Manifest.of(tensors))
            self._pool = self._new_pool(self._division.own)
        since = time.perf_counter()
        staging = self._pool.take(_STAGING_S)
        try:
            chosen(staging.number)
            staging.fill(tensors)
        except BaseException:
            staging.release()
            raise
        return Staged(staging, step, time.perf_counter() - since)

    def push(self, staged: "Staged") -> PushHandle:
        """Push a copy as the next version in the background, and return the handle; one push at a time. Raises Fenced, PublisherClosed."""
        self._running()
        # The push has a hold of its own, which it releases at its end, so the caller may release its copy at once or push it again.
        self._last = PushHandle(self._submit(self._push(staged.staging.hold(), staged.step, staged.prepare_s)))
        return self._last

    def release(self) -> tuple[str, ...]:
        """Have the colocated engines release their memory, and engines that start wait. Returns the ids of those that released it.

        Waits for the previous push. An engine that does not answer within the phase deadline is evicted. Raises BusUnavailable, Fenced,
        PublisherClosed.
        """
        if self._last is not None:
            self._last.wait()
        return self._ended(self._submit(self._running().release()))

    def resume(self) -> tuple[str, ...]:
        """Give colocated engines their memory back and push the head to them again. Returns their ids. Raises as ``release`` does."""
        return self._ended(self._submit(self._running().resume()))

    def _ended(self, future: "Future[T]") -> T:
        try:
            return future.result()
        except CancelledError:
            raise PublisherClosed("publisher: closed meanwhile") from None

    def latest(self) -> VersionRow | None:
        """Return the newest head that this publisher knows."""
        return None if self._pusher is None else self._pusher.head

    def close(self, *, drain: bool = True) -> None:
        """End the thread; with ``drain`` the push under way is finished first. Safe to call twice, and without ``start``."""
        if drain and self._last is not None and self._thread.is_alive():
            self._last.wait()
        if self._loop is not None and self._closing is not None:
            with suppress(RuntimeError):  # its loop has ended already
                self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S + self.config.phase_deadline_s)
        if self._memory is not None:
            self._memory.close()

    def _new_pool(self, manifest: Manifest) -> StagingPool:
        return StagingPool(manifest, self.config.bucket_size(on_gpu=bool(self._own.uuid)), memory=self._memory)

    def _running(self) -> Pusher:
        if isinstance(self._failure, Fenced):
            raise self._failure
        if self._pusher is None or not self._thread.is_alive():
            raise PublisherClosed(f"publisher: not running ({self._failure!r})" if self._failure else "publisher: not running")
        return self._pusher

    def _submit(self, work: Coroutine[object, None, T]) -> "Future[T]":
        assert self._loop is not None
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # its loop has just ended
            work.close()
            raise PublisherClosed(f"publisher: {error}") from None
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        # The loop may have ended between the call above and this line, after ``_run`` cancelled the futures that it knew.
        if self._over:
            future.cancel()
        return future

    # -- the publisher's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:  # a push is many small requests
                runner.run(self._main())
        except BaseException as error:  # raised by the next call
            self._failure = error = first_error(error)
            _log.error("publisher ended error=%r", error)
        finally:
            self._over = True
            for future in tuple(self._futures):  # submitted when the loop was already ending
                future.cancel()
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as stack:
            name = f"publisher-{self.epoch}"
            bus = await stack.enter_async_context(connect(self._bus_url, self.run, self._bus_config, name=name, wait_s=START_S))
            route = await asyncio.to_thread(route_to, self._bus_url)
            pusher = Pusher(
                bus,
                self.config,
                epoch=self.epoch,
                directory=self._directory,
                model_dir=self._model_dir,
                source=Source(self._own, self._memory, () if self._division is None else self._division.others),
                at=reach(self.config.host, self.config.advertise, route, name="weights.host"),
            )
            await pusher.open(stack)
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(pusher.refresh_view(), name="publisher: live rows"),
                    group.create_task(pusher.serve_requests(), name="publisher: snapshot requests"),
                ]
                self._pusher = pusher
                self._ready.set()
                await self._closing.wait()
                # The push is no task of the group: ``run_coroutine_threadsafe`` made it, and nothing else would wait for its end.
                for task in [*background, self._pushing]:
                    if task is not None:
                        task.cancel()
                if self._pushing is not None:
                    await asyncio.gather(self._pushing, return_exceptions=True)

    async def _push(self, staging: Any, step: int, prepare_s: float) -> PushReport:
        assert self._pusher is not None
        self._pushing = asyncio.current_task()
        try:
            return await self._pusher.push(staging, step, prepare_s)
        except Fenced as error:
            self._failure = error
            raise
        finally:
            self._pushing = None
