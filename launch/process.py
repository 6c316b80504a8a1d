"""How every process of the system starts, drains and stops, and how it starts and ends its children.

The first SIGTERM or SIGINT drains; the second, or the deadline, cancels. Exit 0 = drained or done, 75 = not in time, 1 = crashed,
76 = another learner has taken over.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from bus.errors import Fenced
from bus.loop import new_event_loop
from bus.patience import cancellable

log = logging.getLogger(__name__)

DONE, CRASHED, NOT_IN_TIME, TAKEN_OVER = 0, 1, 75, Fenced.exit_code
LAST_LINES = 20
_PR_SET_PDEATHSIG = 1


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]], *, drain_s: float, uvloop: bool = True) -> int:
    """Run ``main(draining)`` to its end; the exit code."""
    with asyncio.Runner(loop_factory=new_event_loop if uvloop else None) as runner:
        return runner.run(_supervised(main, drain_s))


async def _supervised(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]], drain_s: float) -> int:
    loop, draining = asyncio.get_running_loop(), asyncio.Event()
    work = loop.create_task(cancellable(main(draining)), name="main")

    def on_signal(number: int) -> None:
        if draining.is_set():
            work.cancel(f"second {signal.Signals(number).name}")
            return
        log.info("%s: draining for at most %.0f s", signal.Signals(number).name, drain_s)
        draining.set()
        loop.call_later(drain_s, work.cancel, f"not drained after {drain_s:.0f} s")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await work
    except asyncio.CancelledError as stop:
        log.error("stopped before it was drained: %s", stop)
        return NOT_IN_TIME
    except Exception as error:
        return _bad_end(_first(error))
    return DONE


def _bad_end(error: BaseException) -> int:
    if getattr(error, "exit_code", CRASHED) == TAKEN_OVER:
        log.error("ended, and not to be started again: %s", error)
        return TAKEN_OVER
    log.error("crashed: %s", error, exc_info=error)
    return CRASHED


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def set_up_logging(role: str, id: str = "", *, level: int = logging.INFO) -> None:
    """One line an event, on stderr: time, level, who, where, what."""
    who = f"{role} {id}".strip()
    logging.basicConfig(level=level, stream=sys.stderr, format=f"%(asctime)s %(levelname)-7s {who}: %(name)s: %(message)s", force=True)
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # bus.link says it better
    logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in record.getMessage())  # of every TLS connection that ends
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Child:
    """A process started by this one: own process group, output in a file, ended by the kernel when this process ends."""

    def __init__(self, name: str, arguments: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None) -> None:
        """``arguments`` follow ``python -m launch``; ``environment`` is what is set besides that of this process."""
        self.name, self.arguments, self.log_file, self.environment = name, tuple(arguments), log_file, dict(environment or {})
        self.process: asyncio.subprocess.Process | None = None
        self.started_s = 0.0

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "launch", *self.arguments),
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        self.started_s = time.monotonic()

    async def wait(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return await self.process.wait()

    def send(self, number: signal.Signals) -> None:
        """To its whole group."""
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the event loop does not know it yet
            if self.running:
                os.killpg(self.pid, number)

    def ask_to_end(self) -> None:
        """SIGTERM to the process itself; it passes it on to its own children as it sees fit."""
        with contextlib.suppress(ProcessLookupError):
            if self.running:
                os.kill(self.pid, signal.SIGTERM)

    async def end(self, within_s: float) -> int | None:
        """SIGTERM, and SIGKILL to its whole group after ``within_s``; its exit code, None if it never ran."""
        if self.process is None:
            return None
        self.ask_to_end()
        try:
            async with asyncio.timeout(within_s):
                return await self.wait()
        except TimeoutError:
            log.warning("%s did not end within %.0f s and is killed", self.name, within_s)
            self.send(signal.SIGKILL)
            return await self.wait()

    def last_lines(self, count: int = LAST_LINES) -> str:
        try:
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""


def _die_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)  # loaded before the fork

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before prctl
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


async def first_of(*works: Awaitable[Any]) -> None:
    """Run several until the first ends; the others are cancelled. Its error, if it has one, is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
