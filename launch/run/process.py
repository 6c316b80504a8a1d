"""Start, drain and stop of every process of the system, and the start of its children.

The first SIGTERM, SIGINT or SIGHUP (its terminal is gone) drains; another one a second later or more, or the deadline,
cancels. (Signals that follow at once are taken for the same: timeout(1) signals its child, and then the child's process
group.) Exit codes: ``bus/exit_codes.py``.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tidemill.bus import exit_codes
from tidemill.bus.exit_codes import DONE, NOT_IN_TIME
from tidemill.bus.system.coroutines import beside, cancellable, first_error, new_event_loop
from tidemill.bus.system.processes import Child

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
CHILD = "a child of "
STOPPED = "T"  # State of a process after SIGSTOP or SIGTSTP; one that is halted by a debugger is in another


async def report_stopped(report: Callable[[str], None], *, every_s: float = LOOK_EVERY_S) -> None:
    """Background loop: report every process below this one that is stopped, and that continues or ends afterwards."""
    since: dict[int, tuple[str, float]] = {}
    while True:
        stopped = stopped_below(os.getpid())
        for pid in stopped - since.keys():
            since[pid] = program(pid), time.monotonic()
            report(f"{since[pid][0]} (process {pid}) is stopped by a signal (SIGSTOP); kill -CONT {pid} continues it")
        for pid in since.keys() - stopped:
            name, began_s = since.pop(pid)
            report(f"{name} (process {pid}) is no longer stopped, after {time.monotonic() - began_s:.0f} s")
        await asyncio.sleep(every_s)


def stopped_below(parent: int) -> set[int]:
    """Return the ids of the stopped descendants of ``parent``; none where /proc does not list them."""
    stopped, unseen = set[int](), _children(parent)
    while unseen:
        pid = unseen.pop()
        unseen += _children(pid)
        if _state(pid) == STOPPED:
            stopped.add(pid)
    return stopped


def program(pid: int) -> str:
    """Return the name of a process' program: the command of ours, the module of ``python -m``, or the program file."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [word.decode(errors="replace") for word in file.read().split(b"\0")]
        if "python" in words[0] and "-c" in words[1:3]:  # children of a reward and of a rollout program
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                parent = program(int(file.read().rpartition(")")[2].split()[1]))
            return parent if parent.startswith(CHILD) else CHILD + parent
    except OSError:
        return "a process"
    if "-m" in words[:-1]:
        place = words.index("-m") + 1
        return words[place + 1] if words[place] == "tidemill" else words[place]
    return os.path.basename(words[0]) or "a process"


def _children(pid: int) -> list[int]:
    """Return the ids of the children of a process, which the kernel lists by the thread that started them."""
    # A look at all of /proc took 4 % of an actor's processor time on a machine with 200 processes.
    children = list[int]()
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children += map(int, file.read().split())
    return children


def _state(pid: int) -> str:
    """Return the state of a process; empty when it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split(None, 1)[0]
    return ""


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CLEANUP_S = 30.0  # Seconds for the cleanup of a process that is cancelled, which is cancelled again afterwards
SAME_SIGNAL_S = 1.0  # Seconds after the first signal in which further ones count as the same


def run(
    main: Callable[[asyncio.Event], Coroutine[object, None, None]],
    *,
    drain_s: float,
    uvloop: bool = True,
    same_signal_s: float = SAME_SIGNAL_S,
    on_event: Callable[[str], None] = log.warning,
) -> int:
    """Run ``main(draining)`` to its end. Returns 0 ended or drained, 75 cancelled, else its error's code.

    ``drain_s``: seconds from the first signal, or from ``draining``, to the cancellation. ``on_event`` is called with a
    text when a process below is stopped. After a signal this process ignores further ones, once ``main`` has ended: its
    exit code stands.
    """

    async def observed(draining: asyncio.Event) -> None:
        async with beside(report_stopped(on_event)):
            await main(draining)

    with asyncio.Runner(loop_factory=new_event_loop if uvloop else None) as runner:
        return runner.run(_supervised(observed, drain_s, same_signal_s))


def run_refusing(
    main: Callable[[asyncio.Event], Coroutine[object, None, None]],
    *,
    drain_s: float,
    refusals: tuple[type[Exception], ...] = (ValueError,),
) -> int:
    """Run as ``run``; an error of ``refusals`` (wrong use of the command) is raised here, and is no crash."""
    refused: list[Exception] = []

    async def recorded(draining: asyncio.Event) -> None:
        try:
            await main(draining)
        except refusals as error:
            refused.append(error)

    code = run(recorded, drain_s=drain_s)
    if refused:
        raise refused[0]
    return code


async def _supervised(
    main: Callable[[asyncio.Event], Coroutine[object, None, None]], drain_s: float, same_signal_s: float
) -> int:
    loop, draining = asyncio.get_running_loop(), asyncio.Event()
    # Ignored by the parent's choice: SIGHUP by nohup, SIGTERM by a batch script for the process that it ends last.
    # SIGINT is no choice: shells ignore it for every job in the background.
    ignored = {number for number in (signal.SIGHUP, signal.SIGTERM) if signal.getsignal(number) == signal.SIG_IGN}
    numbers = [number for number in SIGNALS if number not in ignored]
    work = loop.create_task(cancellable(main(draining), again_s=CLEANUP_S), name="main")
    first_s: float | None = None

    def on_signal(number: int) -> None:
        nonlocal first_s
        if first_s is not None:
            # A terminal that is closed sends SIGHUP more than once: from the kernel, and from its shell.
            if loop.time() - first_s >= same_signal_s and number != signal.SIGHUP:
                work.cancel(f"second {signal.Signals(number).name}")
            return
        first_s = loop.time()
        log.info("%s: draining for at most %.0f s", signal.Signals(number).name, drain_s)
        draining.set()

    async def limit_drain() -> None:
        await draining.wait()  # set by a signal, or by the end of the run (``run_end.py``)
        await asyncio.sleep(drain_s)
        work.cancel(f"not drained after {drain_s:.0f} s")

    limit = loop.create_task(limit_drain(), name="limit of the drain")
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await work
    except asyncio.CancelledError as stop:
        log.error("stopped before it was drained: %s", stop)
        return NOT_IN_TIME
    except Exception as error:
        return exit_codes.report(first_error(error), log)
    finally:
        limit.cancel()
        for number in numbers:
            loop.remove_signal_handler(number)
            if draining.is_set():
                signal.signal(number, signal.SIG_IGN)
    return DONE


def set_up_logging(role: str, process_id: str = "", *, level: int = logging.INFO) -> None:
    """Log one line per event to stderr: time, level, process, logger, message."""
    name = f"{role} {process_id}".strip()
    logging.basicConfig(
        level=level, stream=sys.stderr, format=f"%(asctime)s %(levelname)-7s {name}: %(name)s: %(message)s", force=True
    )
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # tidemill.bus.client.connection reports it
    # Of every TLS connection that ends
    logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in record.getMessage())
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def launched(
    name: str, arguments: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """Return the child that runs ``python -m tidemill ARGUMENTS``, with its output in ``log_file``."""
    command = (sys.executable, "-P", "-m", "tidemill", *arguments)  # -P: modules of the working directory come last
    # Empty = not set. Where it is set, each process compiles 500 modules at each start, a quarter of a short run.
    ours = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}
    return Child(name, command, log_file, {**ours, **(environment or {})})
