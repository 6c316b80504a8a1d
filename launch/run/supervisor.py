"""Process supervision on one machine: starts processes, starts them again when they end, and gives up with an error.

One *keeper* task per process. Consumes the ends of its child; produces a running child; waits for the child, and
between two starts for a back-off; unblocked by the child's end or by the supervisor's.
"""

import asyncio
import logging
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tidemill.bus import exit_codes
from tidemill.bus.system.coroutines import ended
from tidemill.launch.run.process import launched

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5  # Seconds before the first restart within the window, doubled with each further one
LONGEST_BACKOFF_S = 15.0  # Longest such time in seconds
LOOK_EVERY_S = 1.0  # Interval in seconds at which `failed` looks for processes that were added or removed


class GaveUp(RuntimeError):
    """A process ended badly more often than its budget allows, or once with a final exit code."""

    def __init__(self, name: str, code: int, times: int, window_s: float, last_lines: str, reason: str = "") -> None:
        """``reason``: the message of the error that ended it, if it wrote one."""
        super().__init__(name, code, times, window_s, last_lines, reason)
        self.name, self.code, self.times, self.window_s = name, code, times, window_s
        self.last_lines, self.reason = last_lines, reason

    @property
    def exit_code(self) -> int:
        """Exit code of the run that cannot continue without this process."""
        return exit_codes.CONFIG if self.code == exit_codes.CONFIG else exit_codes.CRASHED

    @property
    def cause(self) -> str:
        """The cause in one line."""
        return self.reason or next(
            (line.strip() for line in reversed(self.last_lines.splitlines()) if line.strip()), "it wrote nothing"
        )

    def __str__(self) -> str:
        # A command that failed before it began has written the whole message, behind its name
        if self.code == exit_codes.CONFIG:
            return f"{self.name}: {self.reason or re.sub(r'^tidemill [a-z]+: ', '', self.last_lines)}"
        often = f", {self.times} times within {self.window_s:.0f} s," if self.times > 1 else ""
        end = f"{self.name} {exit_codes.how(self.code)}{often} and is not started again"
        return f"{end}{': ' + self.reason if self.reason else ''}; its last lines:\n{self.last_lines}"


class Supervised(Protocol):
    """A process that can be started again when it has ended: a ``Child``, or one on another machine."""

    name: str
    log_file: Path | None

    @property
    def pid(self) -> int:
        """Process id, once it has been started."""
        ...

    @property
    def running(self) -> bool: ...

    async def start(self) -> None:
        """Start it. Raises OSError."""
        ...

    async def wait(self) -> int:
        """Return its exit code when it has ended."""
        ...

    async def end(self, within_s: float) -> int | None:
        """Drain it, and kill it after ``within_s``; return the exit code, None if it never ran."""
        ...

    def last_lines(self) -> str: ...

    def reason(self) -> str:
        """Return the message of the error that ended it; empty when it is not known."""
        ...


Launch = Callable[[str, Sequence[str], Path, Mapping[str, str] | None], Supervised]
"""Returns the process that runs ``tidemill ARGUMENTS`` with a log file and further variables."""


class Supervisor:
    """The processes of a run on this machine, or on those where ``launch`` starts them."""

    def __init__(
        self,
        logs: Path,
        *,
        restarts: int,
        window_s: float,
        on_event: Callable[[str], None] = log.warning,
        launch: Launch = launched,
    ) -> None:
        """``on_event`` is called with a text at every restart."""
        self._logs, self._restarts, self._window_s, self._on_event = logs, restarts, window_s, on_event
        self._launch = launch
        self._children: dict[str, Supervised] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self.restarted: dict[str, int] = {}  # Number of restarts of each process

    def keep(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        finishes: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> asyncio.Task[None]:
        """Run ``python -m tidemill ARGUMENTS`` until ``end``: it is started again whenever it ends.

        ``finishes``: code 0 means that its work is done; it is not started again then, and the returned task ends.
        The returned task raises GaveUp.
        """
        assert name not in self._keepers, f"{name} is kept already"
        self._children[name] = self._launch(name, arguments, self._logs / f"{name}.log", environment)
        self._keepers[name] = asyncio.create_task(self._keep(self._children[name], finishes), name=f"keep {name}")
        return self._keepers[name]

    async def _keep(self, child: Supervised, finishes: bool) -> None:
        bad_ends: deque[float] = deque()
        while True:
            code, reason = await _run(child)
            if code == 0 and finishes:
                log.info("ended process=%s", child.name)
                return
            if code in exit_codes.FINAL:
                raise GaveUp(child.name, code, 1, 0.0, child.last_lines(), reason)
            now = time.monotonic()
            bad_ends.append(now)
            while now - bad_ends[0] > self._window_s:
                bad_ends.popleft()
            if len(bad_ends) > self._restarts:
                raise GaveUp(child.name, code, len(bad_ends), self._window_s, child.last_lines(), reason)
            backoff_s = min(FIRST_BACKOFF_S * 2 ** (len(bad_ends) - 1), LONGEST_BACKOFF_S)
            self.restarted[child.name] = self.restarted.get(child.name, 0) + 1
            how = f"{child.name} {exit_codes.how(code)}" + (f": {reason}" if reason else "")
            self._on_event(f"{how}; started again in {backoff_s:.1f} s (log: {child.log_file})")
            await asyncio.sleep(backoff_s)

    async def failed(self) -> None:
        """Wait until a process is given up and raise its GaveUp. Returns when all have ended well."""
        while True:
            kept = list(self._keepers.values())
            if kept:
                await asyncio.wait(kept, return_when=asyncio.FIRST_COMPLETED, timeout=LOOK_EVERY_S)
            if self.given_up:
                raise next(iter(self.given_up.values()))
            if kept and all(keeper.done() for keeper in self._keepers.values()):
                return
            if not kept or any(keeper.done() for keeper in kept):
                await asyncio.sleep(LOOK_EVERY_S)

    @property
    def given_up(self) -> dict[str, GaveUp]:
        """Processes that are not started again, with the error of each."""
        done = {name: keeper for name, keeper in self._keepers.items() if keeper.done() and not keeper.cancelled()}
        return {name: error for name, keeper in done.items() if isinstance(error := keeper.exception(), GaveUp)}

    async def end(self, names: Sequence[str], *, within_s: float) -> dict[str, int | None]:
        """Drain processes, all at once; kill those left at the deadline. Returns their exit codes."""
        await ended(*(self._keepers[name] for name in names))
        codes = await asyncio.gather(*(self._children[name].end(within_s) for name in names))
        for name, code in zip(names, codes, strict=True):
            if code == -signal.SIGKILL:
                log_file = self._children[name].log_file
                self._on_event(f"{name} did not drain within {within_s:.0f} s and was killed (log: {log_file})")
            del self._keepers[name], self._children[name]
        return dict(zip(names, codes, strict=True))

    def names(self, role: str) -> list[str]:
        """Return the processes of a role: the role itself, or ``role-...``."""
        return [name for name in self._keepers if name == role or name.startswith(f"{role}-")]

    @property
    def running(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: child.pid for name, child in self._children.items() if child.running}


async def _run(child: Supervised) -> tuple[int, str]:
    """Run a child to its end. Returns its exit code, and the message of the error that ended it."""
    try:
        await child.start()
    except OSError as error:  # no room for its log, no memory, too many processes: it may be gone by the next try
        return exit_codes.CRASHED, f"it could not be started: {error}"
    log.info("started process=%s pid=%d", child.name, child.pid)
    code = await child.wait()
    return code, child.reason()
