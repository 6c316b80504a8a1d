"""Children of tests, forked from a process that has imported torch and Megatron: they start at once, while an import takes seconds.

pytest -- fork server (one a worker; it imports ``PRELOADED`` and nothing else) -- child, child, ...

Knows nothing of the programs that the children run.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

PRELOADED = [
    "tests.receiver_app",
    "tests.integration.megatron_rank_process",
    "tests.integration.megatron_ranks",
    "launch.cli.commands",
    "launch.cli.run_commands",
    "launch.cli.status",
    "launch.cli.dead_letters",
    "launch.cli.find_run",
    "launch.checks.run",
    "launch.run.up",
    "launch.samples.archive",
    "actors.rollout.actor_process",
]
"""Modules that the fork server imports when it starts: those of ranks, and of most commands of ``tests.launched``."""


def context() -> ForkServerContext:
    """Return the context of this process' one fork server."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def start_server() -> None:
    """Start the fork server and wait until it has imported its modules, for seconds: the first child would wait for it in an event loop."""
    ready = context().Process(target=int)
    ready.start()
    ready.join()


class Forked:
    """A running ``main(*arguments)``; its exit code is the return value of ``main``. It ends with the test process at the latest."""

    def __init__(
        self,
        main: Callable[..., Any],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        output: Path,
        *,
        errors: Path | None = None,
    ) -> None:
        """``environment``: changes of this process' own. ``errors``: the file of stderr; None = that of stdout."""
        self.output = output
        """File of stdout."""
        output.touch()  # a child that fails to start writes nothing
        self._asking = threading.Lock()
        """The exit code of the child can be read once: of two threads that ask at the same time, one would get another code."""
        whole = {**os.environ, **environment}  # of now: the fork server has that of its own start
        self._process = context().Process(target=_run, args=(main, arguments, whole, output, errors or output), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        found = self._process.pid
        assert found is not None
        return found

    @property
    def returncode(self) -> int | None:
        with self._asking:
            return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code, once it has ended; a signal's number is negative. Raises TimeoutError."""
        if not connection.wait([self._process.sentinel], timeout_s):
            raise TimeoutError(f"{self._process.name} did not end within {timeout_s} s")
        code = self.returncode
        assert code is not None
        return code

    async def ended(self) -> int:
        await asyncio.to_thread(connection.wait, [self._process.sentinel])
        return self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(main: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], output: Path, errors: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(*arguments))
