"""How every process of the system starts, drains and stops, and how it starts and ends its children.

The first SIGTERM or SIGINT drains; another one a second later or more, or the deadline, cancels. (Those that follow at once are the same:
timeout(1) signals its child, and then the group that the child is in.) Exit codes: ``bus/exit_codes.py``.
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

from bus import exit_codes
from bus.exit_codes import DONE, NOT_IN_TIME
from bus.loop import new_event_loop
from bus.patience import cancellable

log = logging.getLogger(__name__)

LAST_LINES = 20
LAST_BYTES = 1 << 16
"""Of a child's output, that are looked through for its last lines."""
SAME_SIGNAL_S = 1.0
"""Signals to end that come so soon after the first are the first one again."""
_PR_SET_PDEATHSIG = 1


def run(
    main: Callable[[asyncio.Event], Coroutine[Any, Any, None]], *, drain_s: float, uvloop: bool = True, same_signal_s: float = SAME_SIGNAL_S
) -> int:
    """Run ``main(draining)`` to its end; the exit code."""
    with asyncio.Runner(loop_factory=new_event_loop if uvloop else None) as runner:
        return runner.run(_supervised(main, drain_s, same_signal_s))


async def _supervised(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]], drain_s: float, same_signal_s: float) -> int:
    loop, draining = asyncio.get_running_loop(), asyncio.Event()
    work = loop.create_task(cancellable(main(draining)), name="main")
    first_s = 0.0

    def on_signal(number: int) -> None:
        nonlocal first_s
        if draining.is_set():
            if loop.time() - first_s >= same_signal_s:
                work.cancel(f"second {signal.Signals(number).name}")
            return
        first_s = loop.time()
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
        return exit_codes.report(_first(error), log)
    return DONE


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
        self._log_began = 0
        """Size of the log when the process was started: what stands before is of an earlier one."""

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
            self._log_began = output.tell()
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
        """What it wrote last, since its last start."""
        return "\n".join(self._output()[-count:])

    def reason(self) -> str:
        """The message of the error that ended it; empty when it wrote none."""
        return exit_codes.reason(self._output())

    def _output(self) -> list[str]:
        try:
            with self.log_file.open("rb") as log_file:
                size = log_file.seek(0, os.SEEK_END)
                log_file.seek(max(self._log_began, size - LAST_BYTES))
                return log_file.read().decode(errors="replace").splitlines()
        except OSError:
            return []


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
