"""Child processes that run the program of a rollout, in any interpreter. Nothing here blocks the event loop.

    episode --> child with a free place, or a new one (up to ``processes``) --> result, checked again
                    |
                    +-- ended, wrote rubbish, ran out of memory, has too many calls that hang, or went on after a
cancel: it is killed
                        with all below it, and its episodes fail

A child has no credentials: it knows the gateway's address and the key of its episode.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tidemill.actors.episodes.port import EpisodeResult, ProgramFailed
from tidemill.bus.processes.connection import START_S, ChildCallFailed, ChildConnection
from tidemill.bus.processes.limits import environment, kill_tree
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.system.failure_log import FailureLog
from tidemill.bus.system.functions import present_name
from tidemill.bus.system.proxies import without_proxy
from tidemill.bus.wire.invariants import MAX_REWARD
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("child_program.py")
STATUS_S = 10.0
"""Longest wait for the exit code of a child that has closed its socket: its episodes fail with it as the reason."""
LOADS = 3
"""Starts of the first child of an actor, while its process ends before it has loaded the program."""
RESTART_S = 5.0
"""Seconds after a failed start in which episodes fail at once, with the same reason."""


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
        """Limits of a process besides memory, by setting, as the child reads them."""
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


class _ProgramProcess:
    """A process with the program."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.calls: ChildConnection
        """Its load, then its episodes."""
        self.ending = False
        """True once it takes no more episodes."""


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
        """``use``: ``MODULE:NAME`` of the program. ``python``: its interpreter; empty = this process's.

        ``resumes``: the program must have a method ``resume``. ``gateway_host``: it is reached without a proxy, as
        loopback is.

        ``note_hung``: called with the description of each call of a tool that hangs.
        """
        self._use, self._options, self._python, self._resumes = use, dict(options), python, resumes
        self._bounds, self._note_hung, self._gateway_host = bounds, note_hung, gateway_host
        self._repeated = FailureLog(logger)
        self.counters = ChildCounters()
        self.chat_tools: tuple[str, ...] = ()
        """Tools that the loaded program offers in chats, which the model's chat template must write."""
        self._children: list[_ProgramProcess] = []
        self._ends: set[asyncio.Task[None]] = set()
        self._changed = Waiter()
        self._starting = asyncio.Lock()
        self._refused, self._refused_s = "", 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in list(self._children):
            self._end(child, "the actor ends")
        if self._ends:
            await asyncio.gather(*self._ends, return_exceptions=True)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the children that take episodes."""
        return [child.process.pid for child in self._children]

    async def load(self) -> None:
        """Start a child, unless there is one. Raises ProgramFailed with the reason for which the program cannot be
        loaded.

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
        message = {"episode": episode, "base_url": base_url, "api_key": api_key, "task": task}
        try:
            request = json.dumps(message).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ProgramFailed(f"want values that JSON has in prompt, label and metadata: {error}") from None
        self.counters.episodes += 1
        blocked = f"another episode, {episode}, did not end when it was cancelled, and their process was killed"
        try:
            child = await self._ready()
            try:
                return _result(await child.calls.call(request, cancel_s=self._bounds.kill_after_s, blocked=blocked))
            except ChildCallFailed as error:
                raise ProgramFailed(error.reason, ended=error.ended) from None
            finally:
                self._changed.wake()
        except ProgramFailed:
            self.counters.failed += 1
            raise

    async def _ready(self) -> _ProgramProcess:
        """Return a child with room for an episode. Raises ProgramFailed, which voids no turns: the program has not
        run.
        """
        try:
            return await self._free()
        except ProgramFailed as error:
            raise ProgramFailed(error.reason, ended=True) from None

    async def _free(self) -> _ProgramProcess:
        """Return a child with room for an episode. Raises ProgramFailed."""
        while True:
            able = [child for child in self._children if len(child.calls) < self._bounds.episodes_per_child]
            if able:
                return min(able, key=lambda child: len(child.calls))
            if len(self._children) < self._bounds.processes and not self._starting.locked():
                async with self._starting:
                    return await self._start()
            await self._changed.wait()

    async def _start(self) -> _ProgramProcess:
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

    async def _started(self) -> _ProgramProcess:
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
        child = _ProgramProcess(process)
        child.calls = ChildConnection(
            process.pid,
            lambda _, reason: self._kill(child, reason),
            closed=lambda _: self._end(child, ""),
            note=partial(self._log_note, process.pid),
            freed=self._changed.wake,
        )
        self.counters.started += 1
        try:
            async with asyncio.timeout(START_S):
                await child.calls.open(ours)
                loaded = await child.calls.call(json.dumps(self._load_request()).encode())
        except TimeoutError:
            self._kill(child, f"{self._use}: not imported within {START_S:g} s")
            raise ProgramFailed(child.calls.ended) from None
        except ChildCallFailed as error:
            self._kill(child, "not loaded")
            present = present_name(self._use.partition(":")[0])
            reason = f"{self._use}: {error.reason}" + (f" (its module is {present} now)" if present else "")
            raise ProgramFailed(error.reason if error.ended else reason, ended=error.ended) from None
        except BaseException:
            self._kill(child, "not loaded")
            raise
        tools = loaded.get("tools") if isinstance(loaded, dict) else None
        self.chat_tools = tuple(map(str, tools)) if isinstance(tools, list) else ()
        logger.info("rollout program loaded use=%s pid=%d python=%s", self._use, process.pid, python)
        return child

    def _load_request(self) -> JsonObject:
        path = [] if self._python else [entry or os.getcwd() for entry in sys.path]
        how = {"path": path, "alone": self._bounds.episodes_per_child == 1, "resumes": self._resumes}
        limits = {"memory_mb": self._bounds.memory_mb, "limits": self._bounds.limits}
        return {"load": {"use": self._use, "options": self._options, **how, **limits}}

    def _log_note(self, pid: int, kind: str, text: str) -> None:
        if kind == "hung":
            self.counters.hung += 1
            self._repeated("a call of a tool hangs", f"use={self._use} pid={pid} {text}")
            self._note_hung(text)
        elif kind == "lost":
            self._repeated("output of a rollout program is lost", f"use={self._use} pid={pid} {text}")

    def _kill(self, child: _ProgramProcess, reason: str) -> None:
        self.counters.killed += not child.ending
        self._end(child, reason)

    def _end(self, child: _ProgramProcess, reason: str) -> None:
        """Take no more results of a child, fail its episodes, and end its processes. Without a reason it has ended by
        itself.
        """
        if child.ending:
            return
        child.ending = True
        if reason:
            child.calls.end(reason)
        with contextlib.suppress(ValueError):
            self._children.remove(child)
        self._changed.wake()
        end = asyncio.create_task(self._ended(child), name=f"end of rollout child {child.process.pid}")
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)

    async def _ended(self, child: _ProgramProcess) -> None:
        reason = "its child process ended"
        if not child.calls.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    reason = f"its child process ended: {_how(await child.process.wait())}"
        child.calls.end(reason)
        await asyncio.to_thread(kill_tree, child.process.pid, alive=child.process.returncode is None)
        await child.process.wait()


def _result(message: object) -> EpisodeResult:
    """Return the result of a call. Raises ProgramFailed: user's code can write to the child's end, so nothing is taken
    for granted.
    """
    if not isinstance(message, dict):
        raise ProgramFailed(f"result: want a map, got {str(message)[:80]}")
    if "fault" in message:
        return EpisodeResult(fault=_number(message["fault"], "PolicyFault.reward"))
    value = message.get("value")
    if value is None:
        return EpisodeResult()
    if isinstance(value, dict):
        return EpisodeResult(value={str(name): _number(number, f"result[{name!r}]") for name, number in value.items()})
    return EpisodeResult(value=_number(value, "result"))


def _number(value: object, where: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or abs(value) > MAX_REWARD
    ):
        raise ProgramFailed(f"{where}: want a finite number within +-{MAX_REWARD:g}, got {str(value)[:80]}")
    return float(value)


def _how(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    limit = " (its processor time, rollouts.NAME.cpu_s)" if -status == signal.SIGXCPU else ""
    return f"killed by {signal.Signals(-status).name}{limit}"
