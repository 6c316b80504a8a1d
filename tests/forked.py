"""Programs of tests, forked from the process' template (``tests.template``): functions, and our modules in place of
``python -m``.

Knows nothing of what the programs do. A test of a start itself (arguments of the interpreter, time, memory) executes
``python -m tidemill``.
"""

import asyncio
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.template import INHERITED, ROOT, template
from tidemill.bus.system.processes import Child

CHILDLESS = ("actor", "bus", "engine", "feeder", "prepare", "rank", "router")
"""Commands that start no command of ours."""
EXECUTED = "CHILDREN_EXECUTED"
"""Environment variable: a forked program executes its children. For GPUs: torch refuses CUDA in a process forked after
its start.
"""
READER = "tidemill.learner.feed.shard_reader"
FORKED = ("tidemill", "tests.chaos.dying", READER)
"""Modules that are forked where a forked program starts them; others are executed."""


class Forked:
    """A running ``main(*arguments)``; its exit code is the return value of ``main``. It ends with this process at the
    latest.
    """

    def __init__(
        self,
        main: Callable[..., Any],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        output: Path,
        *,
        errors: Path | None = None,
        descriptors: Sequence[int] = (),
        cwd: Path = ROOT,
        session: bool = True,
    ) -> None:
        """``environment``: changes of this process' own. ``errors``: the file of stderr; None = that of stdout.

        ``descriptors``: those of this process that the program inherits, under the same numbers. ``session``: it leads
        one of its own; otherwise a signal to the group of its parent, which was forked itself, reaches it, too.
        """
        self.output = output
        """File of stdout."""
        self._reading = threading.Lock()
        """The exit code of a child can be read once."""
        self._code: int | None = None
        streams = [
            os.open(os.devnull, os.O_RDONLY),
            *(os.open(file, _APPENDED, 0o644) for file in (output, errors or output)),
        ]
        try:
            self.pid = _fork(
                main,
                arguments,
                environment,
                {**dict(enumerate(streams)), **{number: number for number in descriptors}},
                cwd,
                session,
            )
        finally:
            for stream in streams:
                os.close(stream)
        self._end = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._end)

    @classmethod
    def module(
        cls, module: str, words: Sequence[str], output: Path, environment: Mapping[str, str] | None = None, **rest: Any
    ) -> "Forked":
        """Fork ``python -m MODULE WORDS``."""
        return cls(run_module, (module, tuple(words)), environment or {}, output, **rest)

    @property
    def returncode(self) -> int | None:
        """The exit code, a signal's number as a negative one; None while it runs."""
        with self._reading:
            if self._code is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if found else None
            return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code, once it has ended. Raises TimeoutError."""
        ends = select.poll()
        ends.register(self._end, select.POLLIN)
        ends.poll(None if timeout_s is None else timeout_s * 1000)
        code = self.returncode
        if code is None:
            raise TimeoutError(f"process {self.pid} did not end within {timeout_s} s")
        return code

    async def ended(self) -> int:
        return await asyncio.to_thread(self.wait)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def piped(main: Callable[..., Any], *arguments: Any) -> Iterator[tuple[Connection, Forked]]:
    """Run ``main(*arguments, CONNECTION)``; yield the other end of the connection. It is killed at the end."""
    ours, theirs = Pipe()
    with tempfile.TemporaryDirectory(prefix="tidemill-forked-") as directory, ours:
        with theirs:
            descriptor = theirs.fileno()
            process = Forked(
                _with_pipe, (main, arguments, descriptor), {}, Path(directory) / "output", descriptors=[descriptor]
            )
        try:
            yield ours, process
        finally:
            process.kill()
            process.wait()


def _with_pipe(main: Callable[..., Any], arguments: tuple[Any, ...], descriptor: int) -> None:
    main(*arguments, Connection(descriptor))


def completed(command: Sequence[str], **_: Any) -> "subprocess.CompletedProcess[str]":
    """Fork ``python -P -m MODULE WORDS`` in place of ``subprocess.run``, with text in its pipes, and wait for it."""
    module, *words = command[3:]
    assert list(command[:3]) == [sys.executable, "-P", "-m"]
    with tempfile.TemporaryDirectory(prefix="tidemill-forked-") as directory:
        output, errors = Path(directory) / "output", Path(directory) / "errors"
        code = Forked.module(module, words, output, errors=errors).wait()
        return subprocess.CompletedProcess(command, code, output.read_text(), errors.read_text())


class _Process:
    """A forked child as an ``asyncio.subprocess.Process``."""

    stdin = None

    def __init__(self, pid: int, stdout: asyncio.StreamReader | None) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._end = os.pidfd_open(pid)
        self._loop.add_reader(self._end, self._on_end)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._end)
        os.close(self._end)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


def run_module(module: str, words: Sequence[str]) -> None:
    """Run ``python -m MODULE WORDS`` in this process; its own children are forked, too, unless the environment has
    ``EXECUTED``.
    """
    if INHERITED in os.environ and EXECUTED not in os.environ:
        Child.spawn = fork_child  # type: ignore[method-assign]
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


_executed = Child.spawn
_APPENDED = os.O_WRONLY | os.O_CREAT | os.O_APPEND


async def fork_child(child: Child, stdout: int, stderr: int, pass_fds: Sequence[int]) -> Any:
    """Fork a child that runs a module of ours, in the place of ``Child.spawn``; start another program as always."""
    command = tuple(word for place, word in enumerate(child.command) if (place, word) != (1, "-P"))
    python, option, module, *words = (*command, "", "", "")[: max(3, len(command))]
    if (python, option) != (sys.executable, "-m") or module not in FORKED:
        return await _executed(child, stdout, stderr, pass_fds)
    nothing, reader = os.open(os.devnull, os.O_RDONLY), None
    owned = [nothing]
    try:
        if stdout == PIPE:
            readable, stdout = os.pipe()
            owned.append(stdout)
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(readable, "rb")
            )
        streams = {0: nothing, 1: stdout, 2: stdout if stderr == STDOUT else stderr}
        pid = _fork(
            run_module, (module, words), child.environment, {**streams, **{number: number for number in pass_fds}}
        )
    finally:
        for number in owned:
            os.close(number)
    return _Process(pid, reader)


def _fork(
    main: Callable[..., Any],
    arguments: tuple[Any, ...],
    changes: Mapping[str, str],
    descriptors: Mapping[int, int],
    cwd: Path | None = None,
    session: bool = True,
) -> int:
    """Start ``main(*arguments)`` with this process' environment and ``changes``; ``cwd``: None = this process' own."""
    words, childless = (f"{main.__module__}.{main.__qualname__}",), True
    if main is run_module:
        module, words = arguments
        childless = module == READER or (module == "tidemill" and words[:1] and words[0] in CHILDLESS)
        words = ("-m", module, *words)
    return template().fork(
        main,
        arguments,
        environment={**os.environ, **changes},
        descriptors=descriptors,
        directory=str(cwd or Path.cwd()),
        words=(sys.executable, *words),
        parents=not childless,
        session=session,
    )
