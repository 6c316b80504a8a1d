"""Runs a program in a sandboxed process of its own (``rewards/jail.py``), with bounds on time, memory and output.

Linux on x86_64 and aarch64, without privileges. A program may compute, start threads, read the interpreter's files and
its standard input, and write to its standard output. It has no network, and changes nothing outside of itself.
"""

import contextlib
import json
import os
import platform
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.rewards import jail
from tidemill.rewards.errors import RewardFailed

JAIL = str(Path(jail.__file__).resolve())
MAX_INPUT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of one run of a program."""

    seconds: float = 6.0
    """Wall time; processor time has this limit, rounded up, too."""
    memory_mb: int = 1024
    """Address space, the interpreter's own (about 30 MB) included."""
    output_bytes: int = 1 << 20
    """Size of standard output, and of a result; a program that writes more is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    """The end of one run."""

    output: str = ""
    passed: bool = False
    """True if the run ended well: without an error, and with its tests passed, if there are any."""
    value: Any = None
    reason: str = ""
    """Why it did not end well: an error's name and text, ``time``, ``output``, or the signal that ended it."""


def obstacle() -> str:
    """Return why this machine has no such sandbox; empty if it has one."""
    if sys.platform == "linux" and platform.machine() in jail.ARCHITECTURES:
        return ""
    want = f"Linux on {' or '.join(jail.ARCHITECTURES)} for its sandbox"
    return f"want {want}, this is {sys.platform} on {platform.machine()}"


def run(
    program: str,
    bounds: Bounds,
    *,
    stdin: str = "",
    call: tuple[str, Sequence[Any]] | None = None,
    tests: str = "",
    imports: bool = False,
    python: str = "",
) -> ProgramOutcome:
    """Run a Python program to its end, and then ``call`` (a function's name and arguments) or ``tests`` (code).

    ``imports``: names of ``jail.MODULES`` need no import. ``python``: interpreter; default this one. Raises
    RewardFailed where no process can be started or confined.
    """
    if reason := obstacle():
        raise RewardFailed("code", reason, outside=True)
    word = secrets.token_hex(16)
    settings = {
        "program": program,
        "call": list(call) if call is not None else None,
        "tests": tests,
        "imports": imports,
        "word": word,
        "memory_mb": bounds.memory_mb,
        "cpu_s": int(bounds.seconds) + 1,
        "max_result": bounds.output_bytes,
    }
    process, result_at = _started(settings, python or sys.executable)
    try:
        output, result, reason = _talk(process, result_at, stdin.encode(errors="replace")[:MAX_INPUT_BYTES], bounds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(result_at)
    passes = partial(_passes, tests=bool(tests), call=call is not None, word=word)
    return _outcome(process.returncode, output, result, reason, passes)


def _started(settings: JsonMapping, python: str) -> tuple["subprocess.Popen[bytes]", int]:
    """Start an interpreter; return it, and the descriptor of its result. Raises RewardFailed."""
    settings_at = os.memfd_create("settings", os.MFD_CLOEXEC)
    os.write(settings_at, json.dumps(settings).encode())
    os.lseek(settings_at, 0, os.SEEK_SET)
    result_at, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [python, "-I", "-B", "-X", "utf8", JAIL, str(settings_at), str(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(settings_at, theirs),
            cwd="/",
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,
        )
    except OSError as error:
        os.close(result_at)
        raise RewardFailed("code", f"no process could be started: {error}", outside=True) from None
    finally:
        os.close(settings_at)
        os.close(theirs)
    return process, result_at


def _talk(process: "subprocess.Popen[bytes]", result_at: int, stdin: bytes, bounds: Bounds) -> tuple[bytes, bytes, str]:
    """Write the input, read output and result until both end; return them, and the reason to end the process before."""
    assert process.stdin is not None and process.stdout is not None
    end_s = time.monotonic() + bounds.seconds
    received = {process.stdout.fileno(): bytearray(), result_at: bytearray()}
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as waiting, process.stdin, process.stdout:
        for descriptor in received:
            waiting.register(descriptor, selectors.EVENT_READ)
        waiting.register(process.stdin, selectors.EVENT_WRITE)
        while any(descriptor in waiting.get_map() for descriptor in received):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return bytes(received[process.stdout.fileno()]), b"", "time"
            for key, _ in waiting.select(left_s):
                if key.fileobj is process.stdin:
                    stdin = _write(process.stdin.fileno(), stdin)
                    if not stdin:
                        waiting.unregister(process.stdin)
                        process.stdin.close()
                    continue
                piece = os.read(key.fd, 1 << 16)
                received[key.fd] += piece
                if not piece:
                    waiting.unregister(key.fd)
                elif len(received[key.fd]) > bounds.output_bytes:
                    return bytes(received[process.stdout.fileno()]), b"", "output"
        return bytes(received[process.stdout.fileno()]), bytes(received[result_at]), ""


def _write(descriptor: int, data: bytes) -> bytes:
    """Write as much as fits, and return the rest; it is empty once the program reads no more."""
    try:
        return data[os.write(descriptor, data[: 1 << 16]) :] if data else b""
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""


def _outcome(
    code: int, output: bytes, result: bytes, reason: str, passes: Callable[[JsonMapping], bool]
) -> ProgramOutcome:
    """Return the end of a run. Raises RewardFailed only where the program did not begin: it can write any result."""
    text = output.decode(errors="replace")
    if reason:
        return ProgramOutcome(output=text, reason=reason)
    if not result.startswith(jail.CONFINED):
        reason = result.decode(errors="replace")[:400] or _ended(code)
        raise RewardFailed("code", f"the kernel gives no sandbox: {reason}")
    try:
        report = json.loads(result.removeprefix(jail.CONFINED))
    except (ValueError, RecursionError):
        report = None
    if not isinstance(report, dict):
        return ProgramOutcome(output=text, reason=_ended(code))
    if isinstance(report.get("error"), str):
        message = report["text"] if isinstance(report.get("text"), str) else ""
        return ProgramOutcome(output=text, reason=f"{report['error']}: {message}"[:400])
    passed = passes(report)
    reason = "" if passed else f"exit code {report.get('code')}"[:40]
    return ProgramOutcome(output=text, passed=passed, value=report.get("value"), reason=reason)


def _passes(report: JsonMapping, *, tests: bool, call: bool, word: str) -> bool:
    """Return whether a run ended well: its tests, its call or its end, whichever there was."""
    if tests:
        return bool(report.get("passed") == word)
    return "value" in report if call else report.get("ended") is True


def _ended(code: int) -> str:
    """Return the end of a process without a result, by its return code, in words."""
    if code == 0:
        return "it ended itself"
    with contextlib.suppress(ValueError):  # not every signal has a name
        return signal.Signals(-code).name
    return f"exit code {code}" if code > 0 else f"signal {-code}"
