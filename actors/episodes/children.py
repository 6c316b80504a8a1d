"""Child processes that run the program of a rollout, in any interpreter. Nothing here blocks the event loop.

    episode --> child with a free place, or a new one (up to ``processes``) --> result, checked again
                    |
                    +-- ended, wrote rubbish, ran out of memory, has too many calls that hang, or went on
                        after a cancel: it is killed with all below it, and its episodes fail

A child has no credentials: it knows the gateway's address and the key of its episode.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from tidemill.actors.episodes.port import EpisodeResult, ProgramFailed
from tidemill.actors.rollout_settings import RESUME, RolloutConfig
from tidemill.bus.system.child_calls import START_S, ChildCallFailed, ChildConnection
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.system.functions import present_name
from tidemill.bus.system.limits import environment, kill_tree
from tidemill.bus.system.output import FailureLog
from tidemill.bus.system.processes import without_proxy
from tidemill.bus.wire.invariants import MAX_REWARD
from tidemill.bus.wire.json_object import JsonMapping, JsonObject, is_number

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("child_program.py")
STATUS_S = 10.0
"""Longest wait for the exit code of a child that has closed its socket: its episodes fail with it as the reason."""
LOADS = 3
"""Starts of the first child of an actor, while its process ends before it has loaded the program."""
RESTART_S = 5.0
"""Seconds after a failed start in which episodes fail at once, with the same reason."""


KILL_AFTER_S = 2.0
"""Seconds that an episode has to end after it was cancelled, before its child is killed."""


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
    """A process with the program."""

    process: asyncio.subprocess.Process
    connection: ChildConnection = field(init=False)
    """Its calls: the load, then episodes."""
    ending: bool = False
    """True once it takes no more episodes."""


class Children:
    """``Programs`` in child processes. Enter it before the first episode."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model: str = "",
        gateway_host: str = "",
        note_hung: Callable[[str], None] = lambda text: None,
        kill_after_s: float = KILL_AFTER_S,
    ) -> None:
        """``model``: directory of the model. ``gateway_host``: it is reached without a proxy, as loopback is.

        ``note_hung``: called with the description of each call of a tool that hangs.
        """
        self._config, self._use, self._options = config, config.program, config.arguments(model)
        self._gateway_host, self._note_hung, self._kill_after_s = gateway_host, note_hung, kill_after_s
        self._repeated = FailureLog(logger)
        self.counters = ChildCounters()
        self.chat_tools: tuple[str, ...] = ()
        """Tools that the loaded program offers in chats, which the model's chat template must write."""
        self._children: list[_Child] = []
        self._ends: set[asyncio.Task[None]] = set()
        self._changed = Waiter()
        self._starting = asyncio.Lock()
        self._refused, self._refused_s = "", 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
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
        for attempt in range(1, LOADS + 1):
            try:
                await self._free_child()
                return
            except ProgramFailed as error:
                if not error.ended or attempt == LOADS:
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
        has_run = False
        try:
            child = await self._free_child()
            has_run = True
            return _result(await child.connection.call(request, cancel_s=self._kill_after_s, blocked=blocked))
        except (ProgramFailed, ChildCallFailed) as error:
            self.counters.failed += 1
            # Where no child could be started, the program has not run, and no turn is void.
            raise ProgramFailed(error.reason, ended=error.ended or not has_run) from None
        finally:
            self._changed.wake()

    async def _free_child(self) -> _Child:
        """Return a child with room for an episode. Raises ProgramFailed."""
        while True:
            free = [child for child in self._children if len(child.connection) < self._config.episodes_per_child]
            if free:
                return min(free, key=lambda child: len(child.connection))
            if len(self._children) < self._config.processes and not self._starting.locked():
                async with self._starting:
                    return await self._add_child()
            await self._changed.wait()

    async def _add_child(self) -> _Child:
        if self._refused and time.monotonic() < self._refused_s + RESTART_S:
            raise ProgramFailed(self._refused)
        try:
            child = await self._start_child()
        except ProgramFailed as error:
            self._refused, self._refused_s = error.reason, time.monotonic()
            raise
        finally:
            self._changed.wake()
        self._refused = ""
        self._children.append(child)
        return child

    async def _start_child(self) -> _Child:
        """Start a process and wait until it has loaded the program. Raises ProgramFailed."""
        ours, theirs = socket.socketpair()
        python = self._config.python or sys.executable
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, str(PROGRAM), str(theirs.fileno()), str(os.getpid())),
                # A session of its own: the user's program and all that it starts are killed by it.
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
        child = _Child(process)
        child.connection = ChildConnection(
            process.pid,
            lambda _, reason: self._kill(child, reason),
            closed=lambda _: self._end(child, ""),
            note=partial(self._log_note, process.pid),
            freed=self._changed.wake,
        )
        self.counters.started += 1
        try:
            async with asyncio.timeout(START_S):
                await child.connection.open(ours)
                description = await child.connection.call(json.dumps(self._load_request()).encode())
        except TimeoutError:
            self._kill(child, f"{self._use}: not imported within {START_S:g} s")
            raise ProgramFailed(child.connection.ended) from None
        except ChildCallFailed as error:
            self._kill(child, "not loaded")
            present = present_name(self._use.partition(":")[0])
            reason = f"{self._use}: {error.reason}" + (f" (its module is {present} now)" if present else "")
            raise ProgramFailed(error.reason if error.ended else reason, ended=error.ended) from None
        except BaseException:
            self._kill(child, "not loaded")
            raise
        tools = description.get("tools") if isinstance(description, dict) else None
        self.chat_tools = tuple(map(str, tools)) if isinstance(tools, list) else ()
        logger.info("rollout program loaded use=%s pid=%d python=%s", self._use, process.pid, python)
        return child

    def _load_request(self) -> JsonObject:
        config = self._config
        limits = {name: value for name in ("cpu_s", "open_files", "file_mb") if (value := getattr(config, name))}
        return {
            "load": {
                "use": self._use,
                "options": self._options,
                "path": [] if config.python else [entry or os.getcwd() for entry in sys.path],
                "alone": config.episodes_per_child == 1,
                "resumes": config.again == RESUME,
                "memory_mb": config.memory_mb,
                "limits": limits,
            }
        }

    def _log_note(self, pid: int, kind: str, text: str) -> None:
        if kind == "hung":
            self.counters.hung += 1
            self._repeated("a call of a tool hangs", f"use={self._use} pid={pid} {text}")
            self._note_hung(text)
        elif kind == "lost":
            self._repeated("output of a rollout program is lost", f"use={self._use} pid={pid} {text}")

    def _kill(self, child: _Child, reason: str) -> None:
        self.counters.killed += not child.ending
        self._end(child, reason)

    def _end(self, child: _Child, reason: str) -> None:
        """Take no more results of a child, fail its episodes, end its processes; no ``reason`` = it ended itself."""
        if child.ending:
            return
        child.ending = True
        if reason:
            child.connection.end(reason)
        with contextlib.suppress(ValueError):
            self._children.remove(child)
        self._changed.wake()
        end = asyncio.create_task(self._end_process(child), name=f"end of rollout child {child.process.pid}")
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)

    async def _end_process(self, child: _Child) -> None:
        reason = "its child process ended"
        if not child.connection.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    reason = f"its child process ended: {_end_of(await child.process.wait())}"
        child.connection.end(reason)
        await asyncio.to_thread(kill_tree, child.process.pid, alive=child.process.returncode is None)
        await child.process.wait()


def _result(message: object) -> EpisodeResult:
    """Return the checked result of a call: user's code can write to the child's end. Raises ProgramFailed."""
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
    # Not NaN, either: it fails every comparison.
    if not is_number(value) or not abs(value) <= MAX_REWARD:
        raise ProgramFailed(f"{where}: want a finite number within +-{MAX_REWARD:g}, got {str(value)[:80]}")
    return float(value)


def _end_of(status: int) -> str:
    """Return in words how a process has ended."""
    if status >= 0:
        return f"exit code {status}"
    limit = " (its processor time, rollouts.NAME.cpu_s)" if -status == signal.SIGXCPU else ""
    return f"killed by {signal.Signals(-status).name}{limit}"
