"""The SGLang server as a child process: its command line, its start, its end with all of its own children."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.errors import EngineFailed
from bus.system.processes import Child

STOP_S = 10.0
OWN = ("model-path", "host", "port", "weight-version")
"""Arguments that this module sets."""


def command_line(python: str, model_dir: Path, port: int, arguments: Mapping[str, Any]) -> list[str]:
    """Return ``python -m sglang.launch_server`` with arguments by name: ``tp_size: 2`` is ``--tp-size 2``, true a bare flag, false none,
    a list several words, a map JSON. (A list that SGLang wants as JSON is given as a string.)

    Raises ValueError for one of ``OWN``.
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


def server_child(command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> Child:
    """Return the server, not started yet, under its keeper."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.touch(mode=0o600)  # SGLang writes its settings there, keys included
    return Child("sglang", (sys.executable, "-m", "actors.serving.sglang.keeper", *command), log_file, environment, keeper=True)


def failure(child: Child, engine: str) -> EngineFailed:
    """Return the error that the server has ended, with its last lines."""
    return EngineFailed(engine, f"the SGLang server ended with code {child.returncode}; its last lines:\n{child.last_lines()}")


async def until_ended(child: Child | None) -> None:
    """Wait until the server has ended; without end where it was not started here."""
    await (asyncio.Event().wait() if child is None else child.wait())


async def until_healthy(healthy: Callable[[], Awaitable[bool]], child: Child | None, timeout_s: float) -> bool:
    """Repeat ``healthy()`` until it is True. Returns False when the server ended, or not in time."""
    deadline = time.monotonic() + timeout_s
    while (child is None or child.running) and time.monotonic() < deadline:
        if await healthy():
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await until_ended(child)
    return False
