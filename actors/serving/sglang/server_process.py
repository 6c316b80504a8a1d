"""A SGLang server that answers: a child with its own interpreter, or found at a URL; watched until it ends. Calls to
it, with its failures as our errors, and the pauses of its generation.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tidemill.actors.config import EngineConfig
from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, EngineUnavailable, UpdateRefused
from tidemill.actors.serving.port import COMMAND_S
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.http.client import CONNECT_S, ApiClient, CallFailed, Failure
from tidemill.bus.system.files import write_whole
from tidemill.bus.system.processes import Child
from tidemill.rewards.model_text import EndTokens

log = logging.getLogger(__name__)

STOP_S = 10.0
"""Seconds that the server has to end after SIGTERM."""
RETURNS_EXPERTS = "enable_return_routed_experts"
"""Argument for the experts of tokens; a server without it ignores ``return_routed_experts`` in silence."""
OWN = ("model-path", "host", "port", "weight-version")
"""Arguments that this module sets."""
ENDED_S = 2.0
"""Seconds after a failed call within which the end of the server counts as its cause."""
INFO_S = 60.0
"""Time limit in seconds of a request for the server's settings."""
POLL_S = 2.0
"""Seconds between two requests that show that the server answers."""
KEY_PREFIX = "k"
"""Prefix of keys: with it a key is text to YAML, and no option to a command line, whatever digits follow."""


class Aborted(BadRequest):
    """A client aborted the request before it began (HTTP 499)."""


class Api(ApiClient):
    """One server at ``url``, with its ``key``, if it has one. Calls raise EngineUnavailable (HTTP 408, 429, 502 to 504,
    or no answer), BadRequest (other 4xx), EngineFailed (other 5xx).
    """

    def __init__(self, url: str, key: str = "") -> None:
        async def headers() -> Mapping[str, str]:
            return {"Authorization": f"Bearer {key}"} if key else {}

        super().__init__(url, error_of_call, headers=headers)

    async def command(self, path: str, body: Mapping[str, object], *, timeout_s: float = COMMAND_S) -> None:
        """Send a command of an update. Raises UpdateRefused when it fails in whatever way."""
        try:
            answer = await self.call("POST", path, body, timeout_s=timeout_s)
        except BadRequest as error:
            raise UpdateRefused(error.reason) from error
        except EngineError as error:
            raise UpdateRefused(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UpdateRefused(f"{path}: {answer.get('message')}")

    async def healthy(self) -> bool:
        """Return whether /health answers 200 within ``CONNECT_S`` seconds."""
        try:
            await self.call("GET", "/health", timeout_s=CONNECT_S)
        except EngineError:
            return False
        return True


def error_of_call(failed: CallFailed) -> EngineError:
    reason = f"{failed.path}: {failed.reason}"
    match failed.failure:
        case Failure.NOT_CONNECTED | Failure.NO_ANSWER | Failure.BROKEN | Failure.UNAVAILABLE:
            return EngineUnavailable(failed.url, reason)
        case Failure.UNREADABLE | Failure.FAILED:
            return EngineFailed(failed.url, reason)
        case Failure.ABORTED:
            return Aborted(reason)
        case Failure.UNAUTHORIZED | Failure.STALE | Failure.REFUSED:
            return BadRequest(reason)


class Pauses:
    """Pauses of one server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.mode: str | None = None
        """Mode of the pause; None = there is none."""
        self.began_s = 0.0
        """Time of time.perf_counter at which the newest pause began."""
        self.since_s, self.last_s = float("inf"), (float("inf"), 0.0)
        """By time.monotonic: earliest beginning of the pause (inf = none); beginning and end of the pause before."""

    async def pause(self, mode: str) -> None:
        """Pause at a client's request."""
        before, self.mode = self.mode, mode  # the requests that it ends are answered before it is
        try:
            await self._send(mode)
        except UpdateRefused:
            self.mode = before
            raise
        if before is None:
            self.began_s = time.perf_counter()

    async def hold(self, mode: str) -> None:
        """Pause for an update. The pause is reckoned from here, and is none if the server refuses it."""
        begun_s = time.perf_counter()
        await self._send(mode)
        if self.mode is None:
            self.began_s = begun_s
        self.mode = mode

    async def resume(self) -> None:
        """Continue generation."""
        await self._api.command("/continue_generation", {"torch_empty_cache": False})
        self.ended()

    def ended(self) -> None:
        """Record that the server generates."""
        self.mode = None
        if self.since_s < float("inf"):
            self.since_s, self.last_s = float("inf"), (self.since_s, time.monotonic())

    async def _send(self, mode: str) -> None:
        before = self.since_s
        self.since_s = min(before, time.monotonic())
        try:
            await self._api.command("/pause_generation", {"mode": mode})
        except UpdateRefused as error:
            if isinstance(error.__cause__, BadRequest):  # otherwise the server may be paused all the same
                self.since_s = before
            raise


class ServerProcess:
    """One server. ``open`` it, ``watch`` it in a task, ``close`` it."""

    def __init__(self, api: Api, child: Child | None, silent_s: float, closing: AsyncExitStack) -> None:
        """``child``: None for a server that was found; ``closing``: steps that close it."""
        self.api, self._child, self._silent_s, self._closing = api, child, silent_s, closing
        self.lost = asyncio.Event()
        """Set once the server has ended or does not answer."""

    @classmethod
    async def open(cls, model_dir: Path, config: EngineConfig) -> "ServerProcess":
        """Start the server unless it has a URL. Raises EngineFailed with its last lines if it does not answer."""
        settings = config.sglang
        async with AsyncExitStack() as stack:
            async with AsyncExitStack() as secret:
                if settings.url:
                    api, child = Api(settings.url), None
                    stack.push_async_callback(api.close)
                else:
                    api, child = await _started(stack, secret, model_dir, config)
                if not await until_healthy(api.healthy, child, settings.start_timeout_s):
                    raise _failure(api, child, f"SGLang does not answer after {settings.start_timeout_s:g} s")
            return cls(api, child, settings.silent_s, stack.pop_all())

    async def close(self) -> None:
        """End the server, if it was started here."""
        await self._closing.aclose()

    async def failed(self) -> None:
        """Wait until the server has ended or is silent, then raise EngineFailed with its last lines."""
        await self.lost.wait()
        raise _failure(self.api, self._child, f"SGLang has not answered for {self._silent_s:g} s")

    async def cause_of(self, error: EngineError) -> EngineError:
        """Return the error that the server has ended, if it ends within ``ENDED_S``; else ``error``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDED_S):
                await until_ended(self._child)
                return _failure(self.api, self._child, "")
        return error

    async def watch(
        self, operation: Callable[[], "asyncio.Task[object] | None"], between: Callable[[], Awaitable[None]]
    ) -> None:
        """Poll the server until it has ended or no longer answers, with ``between`` between two polls. ``operation``:
        update under way, during which the server may answer nothing else.
        """
        end = asyncio.create_task(until_ended(self._child))
        try:
            while await self._answers(end, operation()):
                await between()
                await asyncio.wait({end}, timeout=min(POLL_S, self._silent_s / 4))
        finally:
            end.cancel()
        log.error("sglang lost url=%s", self.api.url)
        self.lost.set()

    async def _answers(self, end: "asyncio.Task[object]", busy: "asyncio.Task[object] | None") -> bool:
        """Return whether the server has not ended and answers within ``silent_s`` after the operation under way."""
        answered = asyncio.create_task(self._until_answered())
        try:
            if busy is not None:
                await asyncio.wait({answered, end, busy}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({answered, end}, timeout=self._silent_s, return_when=asyncio.FIRST_COMPLETED)
            return answered.done() and answered.exception() is None and not end.done()
        finally:
            answered.cancel()
            await asyncio.gather(answered, return_exceptions=True)

    async def _until_answered(self) -> None:
        """Repeat a request that only the scheduler can answer, also when idle or paused, until it does."""
        while True:
            try:
                await self.api.call("GET", "/server_info")
                return
            except EngineError:
                await asyncio.sleep(POLL_S)


def _failure(api: Api, child: Child | None, silent: str) -> EngineFailed:
    """Return the error that the server has ended, with its last lines, or that it is ``silent``."""
    if child is None or child.running:
        return EngineFailed(api.url, silent)
    return EngineFailed(
        api.url, f"the SGLang server ended with code {child.returncode}; its last lines:\n{child.last_lines()}"
    )


async def _started(
    stack: AsyncExitStack, secret: AsyncExitStack, model_dir: Path, config: EngineConfig
) -> tuple[Api, Child]:
    """Start the server with a key, so that other users of this machine cannot bypass the proxy. ``secret`` removes the
    key's file, which the server reads at its start.
    """
    settings, arguments = config.sglang, server_arguments(config) | end_of_turn(model_dir)
    port = stack.enter_context(KeptPort())  # it takes a minute until the server listens
    key = str(arguments.get("api_key") or "")
    if not key:
        key = KEY_PREFIX + secrets.token_hex(24)
        directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="tidemill-sglang-"))  # mode 0700
        secret.push_async_callback(asyncio.to_thread, shutil.rmtree, directory, ignore_errors=True)
        arguments["config"] = str(directory / "server.yaml")
        write_whole(directory / "server.yaml", f"api-key: {key}\n", private=True)
    api = Api(f"http://127.0.0.1:{port.number}", key)
    stack.push_async_callback(api.close)
    words = command_line(settings.python, model_dir, port.number, arguments)
    log_file = Path(settings.log or f"{tempfile.gettempdir()}/tidemill-sglang-{port.number}.log")
    child = server_child(words, settings.environment, log_file)
    stack.push_async_callback(child.end, STOP_S, group=True)
    await child.start()
    log.info("sglang started pid=%d log=%s", child.pid, log_file)
    return api, child


def server_arguments(config: EngineConfig) -> dict[str, object]:
    """Return the engine's own settings under SGLang's names; the user's arguments take precedence."""
    ours: dict[str, object] = {"max_running_requests": config.max_running, "dtype": config.dtype}
    if config.device != "auto":
        ours["device"] = config.device
    if config.max_context:
        ours["context_length"] = config.max_context
    if config.kv_tokens:
        ours["max_total_tokens"] = config.kv_tokens
    arguments = ours | config.sglang.arguments
    if arguments["dtype"] == "auto":  # SGLang's own auto would be the model's, and float16 for a float32 model
        arguments["dtype"] = "float32" if arguments.get("device") == "cpu" else "bfloat16"
    if config.colocated and arguments.get("device") != "cpu":
        arguments.setdefault("enable_memory_saver", True)  # without it SGLang releases no memory
    if config.routed_experts:
        arguments.setdefault(RETURNS_EXPERTS, True)
    return arguments


def end_of_turn(model_dir: Path) -> dict[str, object]:
    """Return the argument with the chat template's end of turn, if SGLang would not find it in a file."""
    tokens = EndTokens.read(model_dir)
    if tokens.turn is None or tokens.turn in tokens.named:
        return {}
    return {"json_model_override_args": {"eos_token_id": [*tokens.configured, tokens.turn]}}


def command_line(python: str, model_dir: Path, port: int, arguments: Mapping[str, object]) -> list[str]:
    """Return ``python -m sglang.launch_server`` with arguments by name: ``tp_size: 2`` is ``--tp-size 2``, true a bare
    flag, false none, a list several words, a map JSON. (A list that SGLang wants as JSON is given as a string.)

    Raises ValueError for one of ``OWN``.
    """
    words = [python, "-m", "sglang.launch_server", "--model-path", str(model_dir)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--weight-version", "0"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if flag in OWN:
            raise ValueError(f"engine.sglang.arguments.{name}: set by the engine itself; remove it")
        if value is None or value is False or value == []:
            continue
        words.append(f"--{flag}")
        if value is not True:
            words += [_word(item) for item in (value if isinstance(value, list | tuple) else [value])]
    return words


def _word(value: object) -> str:
    return json.dumps(value) if isinstance(value, Mapping | list | bool) else str(value)


def server_child(command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> Child:
    """Return the server, not started yet, in a process group that ends with this process."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.touch(mode=0o600)  # SGLang writes its settings there, keys included
    keeper = (sys.executable, "-P", "-m", "tidemill.actors.serving.sglang.process_group", *command)
    environment = {"PYTHONSAFEPATH": "1", **environment}  # a types.py in the working directory would hide Python's own
    return Child("sglang", keeper, log_file, environment, keeper=True)


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
