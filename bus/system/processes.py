"""Child processes: in a session of their own, ended with this process by the kernel, with their last lines kept.

``tidemill.bus.server.nats_server``, which has no event loop, shares ``dying_with_parent`` and ``tail``.
"""

import asyncio
import collections
import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus import exit_codes
from tidemill.bus.system.coroutines import ended

log = logging.getLogger(__name__)

# Names of this machine. Only urllib wants brackets around IPv6; with them httpx fails ("Invalid port").
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_VARIABLES = ("no_proxy", "NO_PROXY")  # Clients read one or the other


def without_proxy(environment: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """Return a child's environment, in which clients reach loopback and ``hosts`` (no port, no brackets) directly."""
    listed = [host.strip() for name in _VARIABLES for host in environment.get(name, "").split(",")]
    joined = ",".join(dict.fromkeys(host for host in (*listed, *LOOPBACK, *hosts) if host))
    return {**environment, **dict.fromkeys(_VARIABLES, joined)}


def direct_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Return an opener of URLs that never goes through a proxy."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


ROOT = Path("/")
CURE = "give the machine or the container more memory, or let its processes use less (docs/troubleshooting.md)"


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a process while it ran."""

    rss_bytes: int = 0
    """Its memory (resident set); 0 = not known."""
    counters: tuple[Path | None, Path | None] = (None, None)
    """Files that count killed processes: in its control group, and on the machine; None = none is known."""
    kills: tuple[int | None, int | None] = (None, None)


def look(pid: int, root: Path = ROOT) -> Look:
    """Look at a process. ``root`` holds the directories proc and sys."""
    group, machine = _counter_of_group(_text(root / f"proc/{pid}/cgroup"), root), root / "proc/vmstat"
    return Look(_rss_bytes(_text(root / f"proc/{pid}/status")), (group, machine), (_count(group), _count(machine)))


def cause(last: Look) -> str:
    """Return the origin of a SIGKILL that Tidemill did not send. ``last``: the last look at the process."""
    memory = f"{last.rss_bytes / 1e9:.1f} GB" if last.rss_bytes >= 1e8 else f"{last.rss_bytes / 1e6:.0f} MB"
    had = f"it had {memory}" if last.rss_bytes else "its memory is not known"
    group, machine = (_grown(kills, _count(file)) for kills, file in zip(last.kills, last.counters, strict=True))
    if group or (machine and group is None):
        return f"by the kernel's OOM killer, for want of memory ({had}); {CURE}"
    if group is False or machine is False:
        return f"not by Tidemill, nor by the kernel's OOM killer by its counts ({had})"
    cure = f"{had}; see: dmesg | grep -i 'killed process'"
    return f"not by Tidemill; the kernel may have done it for want of memory ({cure})"


def _grown(before: int | None, after: int | None) -> bool | None:
    return None if before is None or after is None else after > before


def _counter_of_group(cgroups: str, root: Path) -> Path | None:
    """Return the counter of a process' control group; ``cgroups`` is the text of /proc/PID/cgroup."""
    for line in cgroups.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name = ("memory", "memory.oom_control") if controllers else ("", "memory.events")
        directory = root / "sys/fs/cgroup" / mount
        # In a container the path may be the host's, and the group itself is mounted.
        for file in (directory / path.lstrip("/") / name, directory / name):
            if _count(file) is not None:
                return file
    return None


def _count(file: Path | None) -> int | None:
    match = re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE) if file is not None else None
    return int(match[1]) if match else None


def _rss_bytes(status: str) -> int:
    match = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


LAST_LINES = 20
LAST_BYTES = 1 << 16
_LINE_BYTES = 1 << 20
_LOOK_EVERY_S = 1.0  # Interval of reading a child's memory: the last value is reported when the kernel kills it
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int = 0) -> Callable[[], None]:
    """Return a ``preexec_fn``: the kernel kills the child when the thread that started it ends, however it ends
    (Linux).

    ``parent``: process id of the parent, where the child itself calls this and the function; 0 = this process.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before the fork
    parent = parent or os.getpid()

    def arrange() -> None:
        if libc is None:
            return
        # Between fork and exec only calls that take no lock are safe: libc was loaded before.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os.kill(os.getpid(), signal.SIGKILL)

    return arrange


# An interpreter without site-packages that becomes the command. Arguments: our process id, then the command.
_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(command: Sequence[str]) -> tuple[list[str], Callable[[], None] | None]:
    """Return the command and the ``preexec_fn`` of a child that ends with this thread, from any thread.

    Python runs ``preexec_fn`` in a forked copy of this process, which first destroys what belongs to its other threads.
    In a copy made by another thread than the main one these are the main thread's objects, and destructors of libraries
    crashed there (SIGSEGV). Without ``preexec_fn`` nothing of this process runs in the child.
    """
    if sys.platform != "linux" or threading.current_thread() is threading.main_thread():
        return [*command], die_with_parent()
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command], None


def tail(log_file: Path, since: int = 0) -> list[str]:
    """Return the last lines of a file, at most 64 KB and from byte ``since`` on; none when it cannot be read.

    A file that is shorter was emptied since then (logrotate, ``copytruncate``).
    """
    try:
        with log_file.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since if since <= size else 0, size - LAST_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


class Child:
    """A process started by this one, in a session of its own. It can be started again when it has ended."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_file: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        keeper: bool = False,
    ) -> None:
        """``environment`` is added to this process's. Without ``log_file``, ``wait`` passes the output on to stderr.

        ``keeper``: the child ends by itself, after its own children, when its standard input is closed; the kernel does
        not kill it with this process, as it does any other child.
        """
        self.name, self.command, self.log_file = name, tuple(command), log_file
        self.environment, self._keeper = dict(environment or {}), keeper
        self.process: asyncio.subprocess.Process | None = None
        self._log_began = 0  # Size of the log when the process was started: the lines before are of an earlier process
        self._passed_on: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.last_look = Look()
        """Memory and counters of the process when it was last looked at."""
        self._killed_by_us = False
        self._reason_file: exit_codes.ReasonFile | None = None
        self._reason = ""

    @property
    def pid(self) -> int:
        """Process id. Raises AssertionError before the first ``start``."""
        return self._started().pid

    @property
    def running(self) -> bool:
        """True from ``start`` to the end of the process."""
        return self.process is not None and self.process.returncode is None

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs, and before it was started."""
        return None if self.process is None else self.process.returncode

    async def start(self, pass_fds: Sequence[int] = ()) -> None:
        """Start the process; ``pass_fds`` stay open. Output goes to the log file, or to a pipe that ``wait`` reads."""
        self._reason, self._killed_by_us, self.last_look = "", False, Look()
        with contextlib.ExitStack() as stack:
            output, error = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
            if self.log_file is not None:
                self.log_file.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self.log_file.open("ab"))
                self._log_began = file.tell()
                output = error = file.fileno()
                self._note_reason()
                self._reason_file = exit_codes.ReasonFile()
                pass_fds = (*pass_fds, *self._reason_file.inherited)
            self.process = await self.spawn(output, error, pass_fds)

    async def spawn(self, stdout: int, stderr: int, pass_fds: Sequence[int]) -> asyncio.subprocess.Process:
        """Execute ``command`` with these descriptors, or constants of ``asyncio.subprocess``. (Tests fork instead.)"""
        return await asyncio.create_subprocess_exec(
            *self.command,
            env=without_proxy({**os.environ, **self.environment}),
            stdin=asyncio.subprocess.PIPE if self._keeper else asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            limit=_LINE_BYTES,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=None if self._keeper else die_with_parent(),
        )

    async def wait(self) -> int:
        """Return the exit code when it has ended; output that is passed on has then been read to its end."""
        process = self._started()
        looking = asyncio.create_task(self._look())
        try:
            if process.stdout is not None:
                async for line in process.stdout:
                    text = line.decode(errors="replace").rstrip("\n")
                    self._passed_on.append(text)
                    sys.stderr.write(f"{self.name}: {text}\n")
            return await process.wait()
        finally:
            await ended(looking)
            if not self.running:
                self._note_reason()

    async def _look(self) -> None:
        """Look at the process now and then, for the case that the kernel kills it."""
        while True:
            last = look(self.pid)
            if last.rss_bytes:  # it has none when it has ended
                self.last_look = last
            await asyncio.sleep(_LOOK_EVERY_S)

    async def exited(self) -> int:
        """Return the exit code as soon as it has ended; processes that it started may hold its output open."""
        process = self._started()
        while process.returncode is None:  # noqa: ASYNC110 - asyncio's own wait is also one for the end of the output
            await asyncio.sleep(0.02)
        return process.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its whole process group, while it runs."""
        if self.running:
            self._send_group(number)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process itself, which passes it on to its own children where necessary."""
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the event loop has not noticed yet
            if self.running:
                os.kill(self.pid, signal.SIGTERM)

    async def end(self, within_s: float, *, group: bool = False) -> int | None:
        """Send SIGTERM, and SIGKILL to its whole group after ``within_s``; return the exit code, None if it never ran.

        ``group``: SIGTERM goes to its whole group, too, and no process of the group outlives it.
        """
        if self.process is None:
            return None
        if group:
            self.send(signal.SIGTERM)
        else:
            self.ask_to_end()
        try:
            async with asyncio.timeout(within_s):
                return await self.wait()
        except TimeoutError:
            log.warning("%s did not end within %.0f s and is killed", self.name, within_s)
            self.send(signal.SIGKILL)
            return await self.wait()
        finally:
            if group:
                self._send_group(signal.SIGKILL)

    def lines(self) -> list[str]:
        """Return its last lines since its last start: of the log file, or the lines that were passed on."""
        return list(self._passed_on) if self.log_file is None else tail(self.log_file, self._log_began)

    def last_lines(self, count: int = LAST_LINES) -> str:
        """Return its last ``count`` lines since its last start."""
        return "\n".join(self.lines()[-count:])

    def reason(self) -> str:
        """Return the message of the error that ended it, or the origin of a SIGKILL; empty when neither is known."""
        return self._reason or exit_codes.reason(self.lines())

    def _note_reason(self) -> None:
        """Keep the message of an ended process, or the origin of its SIGKILL, and free the file of the message."""
        if self._reason_file is not None:
            self._reason = self._reason_file.read()
            self._reason_file.close()
            self._reason_file = None
        if self.returncode == -signal.SIGKILL and not self._killed_by_us:
            self._reason = self._reason or exit_codes.reason(self.lines()) or cause(self.last_look)

    def _send_group(self, number: signal.Signals) -> None:
        self._killed_by_us = self._killed_by_us or (number == signal.SIGKILL and self.running)
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the event loop has not noticed yet
            os.killpg(self.pid, number)

    def _started(self) -> asyncio.subprocess.Process:
        assert self.process is not None, f"{self.name} was not started"
        return self.process
