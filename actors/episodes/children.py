"""Child processes that run the program of a rollout, in any interpreter. Nothing here blocks the event loop.

    episode --> child with a free place, or a new one (up to ``processes``) --> result, checked again
                    |
                    +-- ended, wrote rubbish, ran out of memory, has too many calls that hang, or went on after a cancel: it is killed
                        with all below it, and its episodes fail

A child has no credentials: it knows the gateway's address and the key of its episode.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidemill.actors.episodes.port import EpisodeResult, ProgramFailed
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.system.failure_log import FailureLog
from tidemill.bus.system.proxies import without_proxy
from tidemill.bus.wire.invariants import MAX_REWARD
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.rewards.children import frames
from tidemill.rewards.children.keeper_process import environment
from tidemill.rewards.children.limits import children_of

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("child_program.py")
STATUS_S = 10.0
"""Longest wait for the exit code of a child that has closed its socket: its episodes fail with it as the reason."""
START_S = 120.0
"""Seconds for the import of a program, with the packages that it needs."""
LOADS = 3
"""Starts of the first child of an actor, while its process ends before it has loaded the program."""
RESTART_S = 5.0
"""Seconds after a failed start in which episodes fail at once, with the same reason."""
MOST_ROUNDS = 100
"""Times that a process tree is read before it is killed as it is: one that forks all the time never stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildBounds:
    """Number of a rollout's children, and the limits of each; 0 = no limit."""

    processes: int = 4
    episodes_per_child: int = 8
    memory_mb: int = 0
    """Private memory."""
    cpu_s: int = 0
    open_files: int = 0
    file_mb: int = 0
    kill_after_s: float = 2.0
    """Time that an episode has to end after it was cancelled, before its child is killed."""

    @property
    def limits(self) -> dict[str, int]:
        """Limits of a process besides memory, by setting, for the message ``load``."""
        return {name: value for name in ("cpu_s", "open_files", "file_mb") if (value := getattr(self, name))}


BOUNDS = ChildBounds()


@dataclass(slots=True)
class ChildCounters:
    """Counts since the start."""

    started: int = 0
    killed: int = 0
    """Children that were ended for a fault of their own or of one of their episodes."""
    episodes: int = 0
    failed: int = 0
    """Episodes without a result."""
    hung: int = 0
    """Calls of tools that had no result in time, and still ran."""


@dataclass(slots=True, eq=False)
class _Child:
    process: asyncio.subprocess.Process
    writer: asyncio.StreamWriter
    loaded: "asyncio.Future[None]"
    episodes: "dict[str, asyncio.Future[EpisodeResult]]" = field(default_factory=dict)
    ended: str = ""
    """Why it takes no more episodes; empty while it does."""
    reading: "asyncio.Task[None] | None" = None

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message, unless it has ended."""
        if not self.ended:
            self.writer.write(frames.encode(message))


class Children:
    """``Programs`` in child processes. Enter it before the first episode."""

    def __init__(
        self,
        use: str,
        *,
        options: JsonMapping,
        python: str = "",
        bounds: ChildBounds = BOUNDS,
        resumes: bool = False,
        gateway_host: str = "",
        note_hung: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``use``: ``MODULE:NAME`` of the program. ``python``: its interpreter; empty = that of this process.

        ``resumes``: the program must have a method ``resume``. ``gateway_host``: it is reached without a proxy, as loopback is.

        ``note_hung``: called with the description of each call of a tool that hangs.
        """
        self._use, self._options, self._python, self._resumes = use, dict(options), python, resumes
        self._bounds, self._note_hung, self._gateway_host = bounds, note_hung, gateway_host
        self._repeated = FailureLog(logger)
        self.counters = ChildCounters()
        self._children: list[_Child] = []
        self._ends: set[asyncio.Task[None]] = set()
        self._changed = Waiter()
        self._starting = asyncio.Lock()
        self._refused, self._refused_s = "", 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for child in list(self._children):
            self._end(child, "the actor ends")
        if self._ends:
            await asyncio.gather(*self._ends, return_exceptions=True)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the children that take episodes."""
        return [child.process.pid for child in self._children]

    async def load(self) -> None:
        """Start a child, unless there is one. Raises ProgramFailed with the reason for which the program cannot be loaded.

        A child whose process ends while it loads, as one that is killed does, is started again.
        """
        for left in reversed(range(LOADS)):
            try:
                await self._free()
                return
            except ProgramFailed as error:
                if not (error.ended and left):
                    raise
                logger.warning("rollout program not loaded use=%s error=%s", self._use, error.reason)
                self._refused = ""

    async def run(self, episode: str, *, base_url: str, api_key: str, task: JsonMapping) -> EpisodeResult:
        """Run the program for an episode. Raises ProgramFailed.

        When cancelled, the episode is cancelled in its child, which is killed if that has no effect.
        """
        message = {"type": "run", "episode": episode, "base_url": base_url, "api_key": api_key, "task": task}
        try:
            frames.encode(message)
        except (TypeError, ValueError, RecursionError) as error:
            raise ProgramFailed(f"want values that JSON has in prompt, label and metadata: {error}") from None
        self.counters.episodes += 1
        try:
            child = await self._ready()
            future = child.episodes[episode] = asyncio.get_running_loop().create_future()
            child.send(message)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                if not future.done():
                    child.send({"type": "cancel", "episode": episode})
                    asyncio.get_running_loop().call_later(self._bounds.kill_after_s, self._give_up, child, episode)
                raise
        except ProgramFailed:
            self.counters.failed += 1
            raise

    def _give_up(self, child: _Child, episode: str) -> None:
        if episode in child.episodes:
            self._kill(child, f"another episode, {episode}, did not end when it was cancelled, and their process was killed")

    async def _ready(self) -> _Child:
        """Return a child with room for an episode. Raises ProgramFailed, which voids no turns: the program has not run."""
        try:
            return await self._free()
        except ProgramFailed as error:
            raise ProgramFailed(error.reason, ended=True) from None

    async def _free(self) -> _Child:
        """Return a child with room for an episode. Raises ProgramFailed."""
        while True:
            able = [child for child in self._children if len(child.episodes) < self._bounds.episodes_per_child]
            if able:
                return min(able, key=lambda child: len(child.episodes))
            if len(self._children) < self._bounds.processes and not self._starting.locked():
                async with self._starting:
                    return await self._start()
            await self._changed.wait()

    async def _start(self) -> _Child:
        if self._refused and time.monotonic() < self._refused_s + RESTART_S:
            raise ProgramFailed(self._refused)
        try:
            child = await self._started()
        except ProgramFailed as error:
            self._refused, self._refused_s = error.reason, time.monotonic()
            raise
        finally:
            self._changed.wake()
        self._refused = ""
        self._children.append(child)
        return child

    async def _started(self) -> _Child:
        """Start a process and wait until it has loaded the program. Raises ProgramFailed."""
        ours, theirs = socket.socketpair()
        python = self._python or sys.executable
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, str(PROGRAM), str(theirs.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                env=without_proxy(environment(os.environ), [self._gateway_host]),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ProgramFailed(f"rollouts.NAME.python: cannot start {python!r}: {error}") from None
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        child = _Child(process, writer, asyncio.get_running_loop().create_future())
        self.counters.started += 1
        child.reading = asyncio.create_task(self._read(child, reader), name=f"rollout child {process.pid}")
        path = [] if self._python else [entry or os.getcwd() for entry in sys.path]
        try:
            how = {"path": path, "alone": self._bounds.episodes_per_child == 1, "resumes": self._resumes}
            limits = {"memory_mb": self._bounds.memory_mb, "limits": self._bounds.limits}
            child.send({"type": "load", "use": self._use, "options": self._options, **how, **limits})
            async with asyncio.timeout(START_S):
                await child.loaded
        except TimeoutError:
            self._kill(child, f"{self._use}: not imported within {START_S:g} s")
            raise ProgramFailed(child.ended) from None
        except BaseException:
            self._kill(child, "not loaded")
            raise
        logger.info("rollout program loaded use=%s pid=%d python=%s", self._use, process.pid, python)
        return child

    async def _read(self, child: _Child, reader: asyncio.StreamReader) -> None:
        try:
            while (message := await frames.read(reader)) is not None:
                self._take(child, message)
        except frames.BadFrame as error:
            self._kill(child, f"its process wrote {error}")
            return
        self._end(child, "")

    def _take(self, child: _Child, message: JsonMapping) -> None:
        kind = message.get("type")
        if kind == "ready" and not child.loaded.done():
            child.loaded.set_result(None)
        elif kind == "refused" and not child.loaded.done():
            child.loaded.set_exception(ProgramFailed(f"{self._use}: {str(message.get('reason'))[:2000]}"))
        elif kind == "result":
            future = child.episodes.pop(str(message.get("episode")), None)
            self._changed.wake()
            if future is not None and not future.done():
                _settle(future, message)
            if message.get("out_of_memory"):  # after a failed allocation anything may be half done
                self._kill(child, "another episode used up the memory of their process, which was killed: rollouts.NAME.memory_mb")
            elif message.get("unusable"):
                self._kill(child, f"their process was killed with another episode: {str(message.get('error'))[:2000]}")
        elif kind == "hung":
            self.counters.hung += 1
            text = str(message.get("text"))[:2000]
            self._repeated("a call of a tool hangs", f"use={self._use} pid={child.process.pid} {text}")
            self._note_hung(text)
        else:
            raise frames.BadFrame(f"a message of type {str(kind)[:80]!r}, want a result")

    def _kill(self, child: _Child, reason: str) -> None:
        self.counters.killed += not child.ended
        self._end(child, reason)

    def _end(self, child: _Child, reason: str) -> None:
        """Take no more results of a child, fail its episodes, and end its processes. Without a reason it has ended by itself."""
        if child.ended:
            return
        child.ended = reason or "its child process ended"
        with contextlib.suppress(ValueError):
            self._children.remove(child)
        self._changed.wake()
        end = asyncio.create_task(self._ended(child, by_itself=not reason), name=f"end of rollout child {child.process.pid}")
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)

    async def _ended(self, child: _Child, *, by_itself: bool) -> None:
        pid = child.process.pid
        if by_itself:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    child.ended = f"its child process ended: {_how(await child.process.wait())}"
        futures: list[asyncio.Future[Any]] = [child.loaded, *child.episodes.values()]
        for future in futures:
            if not future.done():
                future.set_exception(ProgramFailed(child.ended, ended=True))
                future.exception()  # an episode that was cancelled does not retrieve it
        child.episodes.clear()
        child.writer.transport.abort()
        await asyncio.to_thread(kill_tree, pid, alive=child.process.returncode is None)
        await child.process.wait()
        if child.reading is not None and child.reading is not asyncio.current_task():
            child.reading.cancel()


def _settle(future: "asyncio.Future[EpisodeResult]", message: JsonMapping) -> None:
    try:
        future.set_result(_result(message))
    except ProgramFailed as error:
        future.set_exception(error)
        future.exception()


def _result(message: JsonMapping) -> EpisodeResult:
    """Return the result in a message. Raises ProgramFailed: user's code can write to the child's end, so nothing is taken for granted."""
    if "error" in message:
        raise ProgramFailed(str(message["error"])[:2000])
    if "fault" in message:
        return EpisodeResult(fault=_number(message["fault"], "PolicyFault.reward"))
    value = message.get("value")
    if value is None:
        return EpisodeResult()
    if isinstance(value, dict):
        return EpisodeResult(value={str(name): _number(each, f"result[{name!r}]") for name, each in value.items()})
    return EpisodeResult(value=_number(value, "result"))


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > MAX_REWARD:
        raise ProgramFailed(f"{where}: want a finite number within +-{MAX_REWARD:g}, got {str(value)[:80]}")
    return float(value)


def _how(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    limit = " (its processor time, rollouts.NAME.cpu_s)" if -status == signal.SIGXCPU else ""
    return f"killed by {signal.Signals(-status).name}{limit}"


def kill_tree(root: int, *, alive: bool) -> None:
    """Kill a process, its session, and everything below it. ``alive`` = false: it has been waited for, and its number may be another's."""
    found: set[int] = set()
    if alive:
        found = {root}
        for _ in range(MOST_ROUNDS):  # stopped first: a stopped process starts nothing
            for pid in found:
                _send(pid, signal.SIGSTOP)
            more = children_of(found) - found
            if not more:
                break
            found |= more
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(root, signal.SIGKILL)
    for pid in found:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
