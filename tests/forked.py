"""Children of tests, forked from a process that has imported torch and Megatron: they start at once, while an import takes seconds.

pytest -- fork server (one a worker; it imports ``PRELOADED`` and nothing else) -- child, child, ...

Knows nothing of the programs that the children run.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

PRELOADED = ["tests.receiver_app", "tests.integration.megatron_rank_process", "tests.integration.megatron_ranks"]
"""Modules that the fork server imports when it starts."""


def context() -> ForkServerContext:
    """Return the context of this process' one fork server."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


class Forked:
    """A running ``main(*arguments)``; its exit code is the return value of ``main``. It ends with the test process at the latest."""

    def __init__(self, main: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str], output: Path) -> None:
        self.output = output
        """File of stdout and stderr."""
        output.touch()  # a child that fails to start writes nothing
        self._process = context().Process(target=_run, args=(main, arguments, dict(environment), output), daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
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
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(main: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(environment)
    sys.exit(main(*arguments))
