"""The program of a child process that runs rollouts: one file of the standard library, for any interpreter from Python
3.9 on.

Started as ``PYTHON child_program.py DESCRIPTOR``; the descriptor is a socket with frames, four bytes of length
(big-endian) and a JSON map, as ``bus/system/child_calls.py`` has them. Two requests:

    {"load": {"use": "MODULE:NAME", "options": {...}, "path": [...], "alone": bool, "resumes": bool, "memory_mb": int,
              "limits": {"cpu_s": int, "open_files": int, "file_mb": int}}}      result {"tools": [NAME]}
    {"base_url": URL, "api_key": KEY, "task": {...}}, an episode       result {"value": ...} or {"fault": NUMBER}

and two notes, "hung" (a call of a tool that hangs) and "lost" (output that could not be written, once for a process).

MODULE is a name, or the path of a file that ends in ``.py``.

The program is a class, made once with the options, with ``run(data, **extra)`` called for each episode, or a function
that is called as ``NAME(data, base_url=..., api_key=..., http_client=..., **options)``; async, or plain in a thread of
its own. With "resumes" it is a class that also has ``resume(data, state, **extra)``, which is called instead for a task
with a "state". Its attribute ``chat_tools``, if it has one, names the tools that it offers in chats: the model's chat
template must write them.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import io
import json
import math
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

MAX_RESULT_BYTES = 1 << 20
MAX_REASON = 2000
"""Characters of the text of an error that are sent."""
OUT_OF_MEMORY = "another episode used up the memory of their process, which was killed: rollouts.NAME.memory_mb"
_LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIMITS = {
    "memory_mb": ("RLIMIT_DATA", 1 << 20, 0),
    "cpu_s": ("RLIMIT_CPU", 1, 1),
    "open_files": ("RLIMIT_NOFILE", 1, 0),
    "file_mb": ("RLIMIT_FSIZE", 1 << 20, 0),
}
"""Limits of a process by setting: the kernel's name, the unit, and the excess of the hard limit over the soft one. The
signal of the soft one names the limit; the kernel ends the process at its processor time, at the others a call fails.
"""
_WANT_NO_LIMIT = "rollouts.NAME.{}: want 0 (no limit) on this machine"


class PolicyFault(Exception):
    """The policy has done something for which its episode ends with this reward, and is trained on."""

    def __init__(self, reward: float = 0.0) -> None:
        super().__init__(reward)
        self.reward = reward


class LossyOutput(io.FileIO):
    """Standard output or error, which loses text that a full disk or a closed pipe refuses, without an error."""

    def __init__(self, descriptor: int, report_lost: Callable[[str], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._report_lost = report_lost

    def write(self, data: Any) -> int:
        """Write as much as possible; all of it counts as written: a buffer would keep the rest and fail again."""
        try:
            return super().write(data) or len(data)
        except OSError as error:
            self._report_lost(str(error))
            return len(data)


def text_file(descriptor: int, report_lost: Callable[[str], None]) -> io.TextIOWrapper:
    """Return a text file on an open descriptor: a line is written at once, or lost."""
    file = io.BufferedWriter(LossyOutput(descriptor, report_lost))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def arrange(parent: int) -> None:
    """End with the actor, and keep processes that leave their session below this one."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def limit(name: str, value: int) -> None:
    """Limit one resource of this process, and of each that it starts. Raises OSError where the limit is refused."""
    kind, unit, slack = _LIMITS[name]
    try:
        resource = importlib.import_module("resource")
        number = getattr(resource, kind)
        soft, hard = resource.getrlimit(number)
        amount = value * unit
        if name == "memory_mb" and soft != resource.RLIM_INFINITY:
            amount = min(amount, soft)
        if hard == resource.RLIM_INFINITY:
            hard = amount + slack
        resource.setrlimit(number, (min(amount, hard), min(amount + slack, hard)))
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise OSError(f"{_WANT_NO_LIMIT.format(name)}, which refuses the limit {value}: {error}") from None


def limit_memory(memory_mb: int) -> None:
    """Limit private memory. Raises OSError where the limit is refused, or not held."""
    limit("memory_mb", memory_mb)
    try:
        mmap.mmap(-1, memory_mb << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError, OverflowError):
        return
    reason = "its RLIMIT_DATA leaves out mapped memory, as before Linux 4.7"
    raise OSError(f"{_WANT_NO_LIMIT.format('memory_mb')}, which does not hold the limit {memory_mb}: {reason}")


def import_module(module: str) -> Any:
    """Import a module by its name, or a file under the file's name."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    name = os.path.basename(module)[: -len(".py")]
    spec = importlib.util.spec_from_file_location(name, module)
    if spec is None or spec.loader is None:
        raise ImportError(f"want a Python file, got {module!r}")
    file_module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file_module)
    return file_module


class LoadedProgram(NamedTuple):
    """A program."""

    run: Callable[..., Any]
    """Function of (data, extra)."""
    resume: Callable[..., Any] | None
    options: dict[str, Any]
    """Further arguments of ``run``."""
    tools: list[str]


def load(request: dict[str, Any]) -> LoadedProgram:
    """Return the program. Raises whatever the user's module raises."""
    if request["memory_mb"]:
        limit_memory(request["memory_mb"])
    for name, value in request["limits"].items():
        limit(name, value)
    for entry in request["path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    module, _, name = request["use"].rpartition(":")
    target = import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    options = request["options"]
    if inspect.isclass(target):
        program = target(**options)
        run = getattr(program, "run", None)
        if not callable(run):
            raise TypeError("want a class with a method run(data, **extra)")
        resume = getattr(program, "resume", None) if request["resumes"] else None
        if request["resumes"] and not callable(resume):
            raise TypeError("again: resume wants a class with a method resume(data, state, **extra)")
        return LoadedProgram(run, resume, {}, [str(name) for name in getattr(program, "chat_tools", ())])
    if request["resumes"] or not callable(target):
        want = "a class with again: resume" if request["resumes"] else "a class or a function"
        raise TypeError(f"want {want}, got {type(target).__name__}")
    return LoadedProgram(target, None, options, [])


def accepted(function: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Return the extra arguments that a function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return extra
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return extra
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name}
    return {name: value for name, value in extra.items() if name in names}


def number(value: Any, where: str) -> float:
    """Return a finite number as a float. Raises TypeError, ValueError."""
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()  # numpy and torch scalars
    if not isinstance(value, (int, float)):  # bool is an int
        raise TypeError(f"{where}: want a number, a map of numbers or None, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{where}: want a finite number, got {value!r}")
    return float(value)


def result_of(value: Any) -> float | dict[str, float] | None:
    """Return a result as it is sent. Raises TypeError, ValueError, OverflowError."""
    if not isinstance(value, dict):
        return None if value is None else number(value, "result")
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"result: want texts as names of rewards, got {name!r}")
    return {name: number(part, f"result[{name!r}]") for name, part in value.items()}


def reason_of(error: BaseException) -> str:
    """Return the type and text of an error, and the place of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if os.path.abspath(frame.filename) != os.path.abspath(__file__)]
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    if user_frames:
        text += f" ({os.path.basename(user_frames[-1].filename)}, line {user_frames[-1].lineno})"
    return text.encode("utf-8", "replace").decode()[:MAX_REASON]


class EpisodeServer:
    """The episodes of this process."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.program: LoadedProgram
        self.alone = False
        self.memory_mb = 0
        self.running: dict[int, asyncio.Future[None]] = {}
        self._client: Any = None
        self._loop, self._lost = asyncio.get_running_loop(), False

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; a result that is too large, or has values that JSON lacks, is a failure of its call."""
        try:
            body = json.dumps(message, allow_nan=False).encode()
            if len(body) > MAX_RESULT_BYTES:
                raise ValueError(f"result: want at most {MAX_RESULT_BYTES} bytes, got {len(body)}")
        except ValueError as error:
            body = json.dumps({"id": message["id"], "failed": str(error)}).encode()
        self.writer.write(_LENGTH.pack(len(body)) + body)

    def take(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if "cancel" in message:
            if number in self.running:
                self.running[number].cancel()
        elif "load" in message["request"]:
            self.send({"id": number, **self.load(message["request"]["load"])})
        else:
            self.running[number] = asyncio.ensure_future(self.episode(number, message["request"]))

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        self.memory_mb, self.alone = request["memory_mb"], request["alone"]
        try:
            self.program = load(request)
        except MemoryError as error:
            return {"failed": self.out_of_memory(error)}
        except BaseException as error:  # the module is the user's, and may raise anything
            return {"failed": reason_of(error)}
        return {"result": {"tools": self.program.tools}}

    def report_hung(self, text: str) -> None:
        """Report a call that hangs, to the actor's log and status row."""
        self.send({"note": "hung", "text": str(text)[:MAX_REASON]})

    def report_lost(self, reason: str) -> None:
        """Report, once, that output could not be written, to the actor's log. Called from any thread that prints."""
        if not self._lost:
            self._lost = True
            with suppress(RuntimeError):  # the loop is closed: the actor has ended this process
                self._loop.call_soon_threadsafe(self.send, {"note": "lost", "text": reason[:MAX_REASON]})

    async def episode(self, number: int, request: dict[str, Any]) -> None:
        try:
            answer: dict[str, Any] = {"result": {"value": result_of(await self.call(request))}}
        except asyncio.CancelledError:
            answer = {"failed": "cancelled"}
        except MemoryError as error:  # after a failed allocation anything may be half done
            answer = {"failed": self.out_of_memory(error), "last": OUT_OF_MEMORY}
        except BaseException as error:
            answer = self.fault(error) if type(error).__name__ == "PolicyFault" else {"failed": reason_of(error)}
            if type(error).__name__ == "ProcessUnusable":
                text = str(error)[:MAX_REASON]
                answer = {"failed": text, "last": f"their process was killed with another episode: {text}"}
        self.running.pop(number, None)
        self.send({"id": number, **answer})

    def out_of_memory(self, error: MemoryError) -> str:
        """Return the reason of an episode, or an import, that needs more memory than there is."""
        bound = f"want at most {self.memory_mb} MB of private memory (rollouts.NAME.memory_mb)"
        return f"{bound if self.memory_mb else 'no memory is left'}: {reason_of(error)}"

    def fault(self, error: BaseException) -> dict[str, Any]:
        """Return the answer for a PolicyFault, of this file or of a class of that name."""
        try:
            return {"result": {"fault": number(getattr(error, "reward", 0.0), "PolicyFault.reward")}}
        except (TypeError, ValueError, OverflowError) as wrong:
            return {"failed": reason_of(wrong)}

    async def call(self, request: dict[str, Any]) -> Any:
        program, url, key = self.program, request["base_url"], request["api_key"]
        extra = {"base_url": url, "api_key": key, "http_client": self.client(), "saves": program.resume is not None}
        if self.alone:  # variables belong to the process, not to an episode
            os.environ.update(OPENAI_BASE_URL=url, OPENAI_API_KEY=key)
            os.environ.update(ANTHROPIC_BASE_URL=url.rsplit("/v1", 1)[0], ANTHROPIC_API_KEY=key)
        run, data = program.run, dict(request["task"])
        if program.resume is not None and "state" in data:
            run, extra["state"] = program.resume, data.pop("state")
        arguments = {**program.options, **accepted(run, extra)}
        if inspect.iscoroutinefunction(run):
            return await run(data, **arguments)
        result = await in_thread(run, data, arguments)
        return await result if inspect.isawaitable(result) else result

    def client(self) -> Any:
        """Return the HTTP client of this process, where httpx is installed."""
        if self._client is None:
            try:
                httpx = importlib.import_module("httpx")
            except ImportError:
                return None
            self._client = httpx.AsyncClient(timeout=None)
        return self._client


async def in_thread(function: Callable[..., Any], data: Any, arguments: dict[str, Any]) -> Any:
    """Return the result of a plain function, which runs in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        """Call the function, and settle the future in the loop's thread."""
        try:
            value = function(data, **arguments)
        except StopIteration:  # no future takes it
            loop.call_soon_threadsafe(done.set_exception, RuntimeError("StopIteration"))
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, value)

    threading.Thread(target=work, daemon=True).start()
    # A thread cannot be stopped: a cancelled episode has ended when its function has, or when the actor ends this
    # process.
    cancelled = False
    while True:
        try:
            value = await asyncio.shield(done)
            break
        except asyncio.CancelledError:
            if done.done() or cancelled:
                raise
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return value


async def serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    child = EpisodeServer(writer)
    sys.modules["tidemill_rollout"].__dict__["report_hung"] = child.report_hung
    if sys.stdout is not None:  # None: its descriptor is closed, and print does nothing
        sys.stdout = text_file(1, child.report_lost)
    if sys.stderr is not None:
        sys.stderr = text_file(2, child.report_lost)
    child.send({"up": True})
    while True:
        try:
            (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            child.take(json.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return


def main() -> None:
    arrange(int(sys.argv[2]))
    sys.modules["tidemill_rollout"] = types.ModuleType("tidemill_rollout")
    sys.modules["tidemill_rollout"].__dict__["PolicyFault"] = PolicyFault
    sys.path[0] = os.getcwd()  # the program is there, or on PYTHONPATH, and not beside this file
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.argv[:] = sys.argv[:1]
    asyncio.run(serve(connection))
    os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    main()
