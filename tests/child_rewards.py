"""Rewards for the tests of child processes: well-behaved ones, and one for each way in which a reward can fail its
actor.

In a module of its own, which keepers import: it must need nothing of pytest.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tidemill.rewards.port import RewardRequest


def length(request: RewardRequest, *, bonus: float = 0.0) -> float:
    return len(request.response) + bonus


def loud(request: RewardRequest) -> float:
    print("x" * 100_000, flush=True)
    print("x" * 100_000, file=sys.stderr, flush=True)
    return 1.0


def of_episode(request: RewardRequest) -> dict[str, float]:
    found = {"all": request.response_length, "sampled": request.sampled_length, "turns": request.num_turns}
    return {"score": 1.0, **found, "messages": len(request.transcript)}


def of_label(request: RewardRequest) -> Any:
    return request.label


def own_interpreter(request: RewardRequest) -> float:
    """Return 1 if this process was not forked from the keeper."""
    return float(b"tidemill.rewards.processes.worker" in Path("/proc/self/cmdline").read_bytes())


def echo(request: RewardRequest) -> dict[str, float]:
    """Return numbers by which a test sees that the whole request has arrived."""
    assert isinstance(request.label, dict)
    return {
        "response": float(len(request.response)),
        "tokens": float(request.tokens.sum()),
        "metadata": float(request.metadata["n"]),
        "prompt": float(len(request.prompt)),
        "label": float(request.label["gold"]),
        "truncated": float(request.status == "truncated"),
    }


def backtracks(request: RewardRequest) -> float:
    """Hold the GIL for longer than any test: each ``a`` doubles the time."""
    return float(re.fullmatch(r"(a+)+b", request.response) is None)


def misbehaves(request: RewardRequest) -> float:
    """Act as the response names."""
    match request.response:
        case "ok":
            return 1.0
        case "pid":
            return float(os.getpid())
        case "raise":
            raise KeyError("judge")
        case "exit":
            sys.exit(3)
        case "leave":
            os._exit(7)
        case "abort":
            os.abort()
        case "hang":
            threading.Event().wait()
        case "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass
        case "memory":
            return float(len(bytearray(1 << 40)))
        case "large":
            return {"x" * (2 << 20): 1.0}  # type: ignore[return-value]
        case "rubbish":
            _write_to_sockets(b"\x00\x00\x00\x05hello" * 10)
            threading.Event().wait()
        case "huge":
            _write_to_sockets(b"\x7f\xff\xff\xff")
            threading.Event().wait()
        case "keeper":
            os.kill(os.getppid(), signal.SIGKILL)
            threading.Event().wait()
    raise AssertionError(request.response)


def _write_to_sockets(data: bytes) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            socket.socket(fileno=os.dup(descriptor)).send(data)
        except OSError:
            continue


def leaves_processes(request: RewardRequest, *, file: str) -> float:
    """Write the ids of two processes that outlive everything but SIGKILL, one in a session of its own and without a
    parent; then hang.
    """
    plain = subprocess.Popen(["sleep", "1000"])
    if os.fork() == 0:
        os.setsid()
        alone = subprocess.Popen(["sleep", "1000"])
        Path(file).write_text(f"{plain.pid} {alone.pid}\n")
        os._exit(0)
    os.wait()
    threading.Event().wait()
    return 0.0


def environment(request: RewardRequest) -> float:
    return float(request.response in os.environ)


_calls = 0


async def counted(request: RewardRequest) -> float:
    """Return the number of the call: all calls have the same process. ``block``: after creating the file ``label``."""
    global _calls
    _calls += 1
    if request.response == "block":
        Path(str(request.label)).touch()  # noqa: ASYNC240
        while True:
            time.sleep(1)  # noqa: ASYNC251
    if request.response == "wait":
        await asyncio.Event().wait()
    return float(_calls)


async def hangs(request: RewardRequest) -> float:
    await asyncio.Event().wait()
    return 0.0


def raises(request: RewardRequest) -> float:
    raise ConnectionError("the judge answered 500")


def overflows(request: RewardRequest) -> float:
    return 1e39


def nan(request: RewardRequest) -> float:
    return float("nan")


threads_started: list[threading.Thread] = []
if os.environ.get("CHILD_REWARDS_THREAD"):
    threads_started.append(threading.Thread(target=threading.Event().wait, daemon=True))
    threads_started[0].start()
