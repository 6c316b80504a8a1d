"""The end of a run, a row on the bus: read, waited for, and written for a learner that no restart cures.

The feeder writes the row of a run that is done (``learner/feed/outcomes.py``).
"""

import asyncio
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress

from tidemill.bus import exit_codes
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, BusUnavailable, NotFound
from tidemill.bus.liveness import HeartbeatPublisher, processes
from tidemill.bus.streams.bus import Bus, connect, current_epoch
from tidemill.bus.system.coroutines import beside, first_error
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import MAX_TEXT, EndRow, LiveRow, Outcome, row_of
from tidemill.bus.wire.subjects import END_KEY, NODE_KEY
from tidemill.launch.run.workers import LONG_WAIT_S, found_run
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY

log = logging.getLogger(__name__)

RESUME_S = 60.0  # Time for the learner of a resumed run, which may start after its workers
REFUSED_S = 3.0  # Longest wait for the bus by a learner that is refused before it connects
AT_END_S = 10.0  # Longest wait for the bus by a process that ends
LOOK_EVERY_S = 5.0  # Reads of the row beside the wake-ups of its changes
LOOKS = 2  # For a learner, of 2 s each: on a busy machine its heartbeat, one a second, may be late
NOT_RESTARTED = frozenset({exit_codes.WRONG_USE, exit_codes.CONFIG})


async def end_of(bus: Bus) -> EndRow | None:
    """Return the end of the run; None while it goes on, or has not begun. Raises BusUnavailable."""
    try:
        row, _ = await bus.rows("run").read(END_KEY)
    except NotFound:  # no process has made the streams yet
        return None
    return None if row is None else row_of(EndRow, row)


async def wait_ended(bus: Bus) -> EndRow:
    """Return the end of the run once it has ended, however long that takes. Raises BusUnavailable for a closed bus.

    The failure of a learner is no end while another one starts or works: that one removes the row.
    """
    while True:
        try:
            async for row in bus.rows("run").watch(END_KEY, LOOK_EVERY_S):
                if row is not None and await _counts(bus, end := row_of(EndRow, row[0])):
                    return end
        except NotFound:
            await asyncio.sleep(LOOK_EVERY_S)


async def _counts(bus: Bus, end: EndRow) -> bool:
    """Return whether the run has ended by a row, once that is certain; False for a row that is gone."""
    while end.outcome is Outcome.FAILED:
        others = await bus.retry(lambda: learners(bus))
        if not others:
            break
        if await _removed(bus, end, LOOK_EVERY_S):
            return False
    return True


async def learners(bus: Bus) -> list[LiveRow]:
    """Return the live rows of learners that start or work, of the first look of two that sees any. Raises
    BusUnavailable.

    Not of feeders that a later start has replaced, nor of nodes that wait for the leader of their learner.
    """
    for _ in range(LOOKS):
        if rows := await _learners(bus):
            return rows
    return []


async def _learners(bus: Bus) -> list[LiveRow]:
    newest, nodes = await current_epoch(bus), (await bus.rows("run").all(NODE_KEY)).values()
    followers = {(node.get("host"), node.get("pid")) for node, _ in nodes if node.get("node")}
    return [
        row
        for row, age_s in await processes(bus)
        if not age_s
        and ((row.role == "feeder" and row.epoch >= newest) or row.role == "learner")
        and (row.host, row.pid) not in followers
    ]


async def new_end(bus: Bus, *, resume_s: float = RESUME_S) -> EndRow:
    """Return the end of the run once it has ended. Raises BusUnavailable for a closed bus.

    A row that is there at first may belong to a run that is resumed, whose learner removes it. The row counts after
    ``resume_s`` seconds without a learner. An outage of the bus begins this time anew, because a learner may have
    worked meanwhile.
    """
    first, seen_s = await bus.retry(lambda: end_of(bus)), time.monotonic()
    while first is not None and time.monotonic() - seen_s < resume_s:
        if await _removed(bus, first, min(LOOK_EVERY_S, resume_s)):
            break
        if await _is_there(bus):
            seen_s = time.monotonic()
    return await wait_ended(bus)


async def _is_there(bus: Bus) -> bool:
    """Return whether a learner works, or may. Raises BusUnavailable for a closed bus."""
    try:
        return any(row.role in ("learner", "feeder") and not age for row, age in await processes(bus))
    except BusUnavailable:
        if bus.closed:
            raise
        return True


async def _removed(bus: Bus, end: EndRow, within_s: float) -> bool:
    """Return whether the row is removed or replaced within so many seconds."""
    with suppress(TimeoutError, BusUnavailable):
        async with asyncio.timeout(within_s):
            async for row in bus.rows("run").watch(END_KEY, LOOK_EVERY_S):
                if row is None or row_of(EndRow, row[0]) != end:
                    return True
    return False


def until_end(
    bus_url: str,
    run: str,
    draining: asyncio.Event,
    *,
    name: str,
    on: bool,
    resume_s: float = RESUME_S,
    ended: asyncio.Event | None = None,
) -> AbstractAsyncContextManager[None]:
    """While entered, set ``draining``, and ``ended`` before it, when the run has ended, if ``on``.

    ``run``: empty = the run of the bus. ``resume_s``: as for ``new_end``.
    """
    return beside(*([_drain_at_end(bus_url, run, draining, ended, name=name, resume_s=resume_s)] if on else []))


async def _drain_at_end(
    bus_url: str, run: str, draining: asyncio.Event, ended: asyncio.Event | None, *, name: str, resume_s: float
) -> None:
    run = run or await found_run(bus_url, name, draining)
    if run:
        async with connect(bus_url, run, BusConfig(), name=name, wait_s=LONG_WAIT_S) as bus:
            end = await new_end(bus, resume_s=resume_s)
        log.info("the run has ended, so this process drains outcome=%s reason=%s", end.outcome, end.reason)
        if ended is not None:
            ended.set()
        draining.set()


class LearnerStart:
    """The live row of a learner that starts, kept by a thread: its checks may take minutes, and hold no loop."""

    def __init__(self, config: RunConfig, bus_url: str) -> None:
        self._config, self._bus_url = config, bus_url
        self._shown, self._over = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="start of the learner", daemon=True)

    def begin(self) -> None:
        """Show the row; wait until it is stored, for ``REFUSED_S`` at most."""
        self._thread.start()
        self._shown.wait(REFUSED_S)

    def end(self) -> None:
        """Remove the row."""
        if self._loop is not None:
            with suppress(RuntimeError):  # closed: there was no bus, or no run on it
                self._loop.call_soon_threadsafe(self._over.set)

    def join(self) -> None:
        """Remove the row, and wait until it is gone, for ``REFUSED_S`` at most."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(REFUSED_S)

    def _run(self) -> None:
        with suppress(BusError):
            asyncio.run(self._show())
        self._shown.set()

    async def _show(self) -> None:
        self._loop = asyncio.get_running_loop()
        config = self._config
        # One key for all starts, so that none that is killed leaves a row for ever; each writes its own row again.
        row = LiveRow(role="learner", id="start", host=socket.gethostname(), pid=os.getpid(), phase="starting")
        async with connect(self._bus_url, config.run, config.bus, name="learner", wait_s=REFUSED_S) as bus:
            await current_epoch(bus)  # raises NotFound where there is no such run yet
            async with HeartbeatPublisher(bus, row) as heartbeat:
                await heartbeat.stored()
                self._shown.set()
                await self._over.wait()


class LearnerEnd:
    """The end of a learner: whether its run is done, and the row of one that failed for good."""

    def __init__(self, config: RunConfig, bus_url: str, *, leads: bool) -> None:
        """``leads``: this process runs node 0, which records the end."""
        self._config, self._bus_url, self._leads = config, bus_url, leads
        self._start = LearnerStart(config, bus_url)
        self.drained = False  # It was drained by a signal, and its run is not done

    def begin(self) -> None:
        """Show other learners that this one starts, before its checks."""
        if self._leads:
            self._start.begin()

    def lives(self) -> None:
        """Note that the learner has a live row of its own."""
        self._start.end()

    @asynccontextmanager
    async def noted(self, draining: asyncio.Event) -> AsyncIterator[None]:
        """Note how the body ends. Passes its errors on."""
        try:
            yield
        except Exception as failure:
            await self.record_failure(first_error(failure))
            raise
        finally:
            self.lives()
        if draining.is_set():
            self.drained = True
            with _reported():
                async with self._bus() as bus:
                    end = await end_of(bus)
                    self.drained = end is None or end.outcome is not Outcome.DONE

    async def record_failure(self, error: BaseException, *, wait_s: float = AT_END_S) -> None:
        """Write the row of a learner that no restart cures, where there is a bus within ``wait_s``."""
        await asyncio.to_thread(self._start.join)  # of two that fail at once, the last one sees no other
        if self._leads and exit_codes.of(error) in NOT_RESTARTED:
            with _reported(), suppress(NotFound):  # a run without streams has no workers that wait for its end
                await self._write_failure(error, wait_s)

    async def _write_failure(self, error: BaseException, wait_s: float) -> None:
        async with self._bus(wait_s) as bus:
            rows, epoch = bus.rows("run"), await current_epoch(bus)
            if others := await learners(bus):
                text = "the row of the end is not written: another learner of run %s starts or works: %s"
                log.warning(text, bus.run, ", ".join(f"{row.role} {row.id}" for row in others))
                return
            checkpoint, _ = await rows.read(CHECKPOINT_KEY)
            row = EndRow(
                outcome=Outcome.FAILED,
                code=exit_codes.of(error),
                reason=exit_codes.message(error)[:MAX_TEXT],
                step=int(checkpoint["step"]) if checkpoint else 0,
                time_s=time.time(),
                epoch=epoch,
            )
            value = dataclasses.asdict(row)

            def failed(before: JsonObject | None) -> JsonObject | None:
                """Return the row; None for a run that is done already: a start with other settings failed."""
                return None if before and before["outcome"] == Outcome.DONE else value

            changed = await rows.change(END_KEY, failed, replace_unreadable=True)
            # A learner raises the epoch before it removes the row of an earlier end: one of the two sees the other.
            if changed.after is value and await current_epoch(bus) > epoch:
                await rows.delete(END_KEY)

    @asynccontextmanager
    async def _bus(self, wait_s: float = AT_END_S) -> AsyncIterator[Bus]:
        config = self._config
        opened = connect(self._bus_url, config.run, config.bus, name="learner", wait_s=wait_s)
        # A bus that is there gets more time than ``wait_s``: the looks for other learners take four seconds of it.
        async with asyncio.timeout(AT_END_S), opened as bus:
            yield bus


@contextmanager
def _reported() -> Iterator[None]:
    """Log an error of the bus: the exit code of the process is more than the row."""
    try:
        yield
    except (BusError, TimeoutError) as error:
        log.warning("the row of the end was not reached error=%s", str(error) or "no answer")
