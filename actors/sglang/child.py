"""The SGLang server as a process of ours: its command line, its start, its end with all of its own children."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.errors import EngineFailed

log = logging.getLogger(__name__)

STOP_S = 10.0
LAST_LINES = 20
OWN = ("model-path", "host", "port", "weight-version")
"""Arguments that this file gives."""


def command_line(python: str, model_dir: Path, port: int, arguments: Mapping[str, Any]) -> list[str]:
    """``python -m sglang.launch_server`` with arguments by name: ``tp_size: 2`` is ``--tp-size 2``, true a bare flag, false none,
    a list several words, a map JSON. (A list that SGLang wants as JSON is given as a string.)

    Raises ValueError for one that is not the user's to give.
    """
    words = [python, "-m", "sglang.launch_server", "--model-path", str(model_dir), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--weight-version", "0"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if flag in OWN:
            raise ValueError(f"engine.sglang.arguments.{name}: is given by the engine itself; want another setting")
        if value is None or value is False or value == []:
            continue
        words.append(f"--{flag}")
        if value is not True:
            words += [_word(one) for one in (value if isinstance(value, list | tuple) else [value])]
    return words


def _word(value: object) -> str:
    return json.dumps(value) if isinstance(value, Mapping | list | bool) else str(value)


class ServerChild:
    """One server. ``start`` once; ``ended`` is set when it is gone."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log_file: Path) -> None:
        self._command, self._environment, self._log_file = command, dict(environment), log_file
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()

    async def start(self) -> None:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file = os.open(self._log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)  # SGLang writes its settings there, keys and all
        with os.fdopen(log_file, "ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "actors.sglang.keeper", *self._command),
                env={**os.environ, **self._environment},
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._waiting = asyncio.create_task(self._wait(), name="sglang server")
        log.info("sglang started keeper=%d log=%s", self._process.pid, self._log_file)

    async def _wait(self) -> None:
        assert self._process is not None
        await self._process.wait()
        self.ended.set()

    def failure(self, engine: str) -> EngineFailed:
        """Say that it ended, with its last words."""
        assert self._process is not None
        return EngineFailed(engine, f"the SGLang server ended with code {self._process.returncode}; its last lines:\n{self.last_lines()}")

    async def stop(self) -> None:
        """SIGTERM to the server, SIGKILL to all of it after a while; nobody of it is left."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await self.ended.wait()
            except TimeoutError:
                log.warning("sglang did not end within %.0f s and is killed", STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._waiting is not None
        await self._waiting

    def last_lines(self, count: int = LAST_LINES) -> str:
        try:
            return "\n".join(self._log_file.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""


async def until_healthy(url: str, healthy: Any, ended: asyncio.Event, timeout_s: float) -> bool:
    """Ask ``healthy()`` until it is True; False when the server ended, or not in time."""
    deadline = time.monotonic() + timeout_s
    while not ended.is_set() and time.monotonic() < deadline:
        if await healthy():
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await ended.wait()
    return False
