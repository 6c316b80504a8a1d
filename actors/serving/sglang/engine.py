"""SGLang as an engine: a server that is started (or found), and a guard in front of it with the built-in engine's HTTP API.

    clients, learner --HTTP--> guard (this process) --HTTP--> SGLang server (a child with its own interpreter, or a URL)

The guard refuses requests that would kill the server or mix two learners, keeps versions and phases, and passes all others on. This
module ties them together; a process embeds its engine. It knows no bus: its owner sets ``phase``.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.config import EngineConfig
from actors.errors import EngineError, EngineFailed, EngineUnavailable, UnsupportedModel, VersionUnavailable
from actors.http_api import listen
from actors.request import Limits
from actors.serving.authority import Authority
from actors.serving.handles import HandleListener
from actors.serving.sglang.api import Api
from actors.serving.sglang.checksums import layout_of
from actors.serving.sglang.child import STOP_S, command_line, failure, server_child, until_ended, until_healthy
from actors.serving.sglang.releases import NEWEST, Release, release_of, written
from actors.serving.sglang.updates import WeightUpdates
from actors.text.text import Text
from bus.client.waiter import Waiter
from bus.server.ports import KeptPort
from bus.system.files import write_whole
from bus.system.processes import Child
from bus.wire.messages import Capabilities

if TYPE_CHECKING:
    from actors.serving.sglang.guard import Guard

log = logging.getLogger(__name__)

PHASES = ("joining", "catching up", "serving", "stale", "draining")
PROBE_S = 60.0
LOOK_S = 2.0
KEY_PREFIX = "k"
"""Prefix of keys: with it a key is text to YAML, and no option to a command line, whatever digits follow."""


class SglangEngine:
    """One server. ``load`` (blocking), ``start``, set ``phase = "serving"``; later ``drain`` and ``close``.

    ``on_update(version, epoch)`` is called in the loop's thread after every completed update.
    """

    def __init__(
        self,
        model_dir: Path | str,
        config: EngineConfig | None = None,
        *,
        version: int = 0,
        on_update: Callable[[int, int], None] | None = None,
        authority: Authority | None = None,
        release: Release | None = None,
    ) -> None:
        """``release``: release of the server; None = the one in its /server_info."""
        self.model_dir, self.config = Path(model_dir), config or EngineConfig(kind="sglang")
        self._first_version, self._on_update, self._release = version, on_update, release
        self.authority = authority or Authority()
        self._phase = "joining"
        self._child: Child | None = None
        self._changed = Waiter()
        self._port: KeptPort | None = None
        self._guard: Guard | None = None
        self._cache = secrets.token_hex(4)
        self._lost = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._secret: Path | None = None
        """Directory of the server's key, until the server has read it."""
        self.url = self.handles = ""
        self._listener: HandleListener | None = None
        self.unfinished = 0
        """Number of requests that the server has."""
        self.counters = {"requests": 0.0, "refused": 0.0, "asked_again": 0.0}

    # -- life ---------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the model's sizes, tokenizer and tensor names, which the guard needs. Raises UnsupportedModel."""
        file = self.model_dir / "config.json"
        try:
            values = json.loads(file.read_text())
            values = values.get("text_config", values)
            vocab_size, context = int(values["vocab_size"]), int(values["max_position_embeddings"])
            self._hidden_size = int(values["hidden_size"])
        except (OSError, ValueError, KeyError) as error:
            raise UnsupportedModel(str(file), f"want vocab_size, hidden_size and max_position_embeddings: {error!r}") from error
        if self.config.max_context > context:
            raise UnsupportedModel("engine.max_context", f"want <= {context} (max_position_embeddings), got {self.config.max_context}")
        text = Text.read(self.model_dir)
        self.limits = Limits(
            vocab_size=vocab_size, max_context=self.config.max_context or context, encode=text.encode if text is not None else None
        )
        self.text = text
        self.names = frozenset(tensor_names(self.model_dir))

    async def start(self, host: str | None = None, port: int | None = None) -> str:
        """Start the server, wait until it answers, listen, and return the guard's URL. Raises EngineFailed with the server's last lines."""
        from actors.serving.sglang.guard import Guard

        settings = self.config.sglang
        if settings.url:
            self.api = Api(settings.url)
        else:
            await self._start_server()
        if not await until_healthy(self.api.healthy, self._child, settings.start_timeout_s):
            self._refuse_ended()
            raise EngineFailed(self.api.url, f"SGLang does not answer after {settings.start_timeout_s:g} s")
        await self._forget_secret()
        info = await self.api.call("GET", "/server_info", timeout_s=PROBE_S)
        self.release = release = self._release or release_of(self.api.url, info.get("version"))
        if release.version > NEWEST:
            log.warning("SGLang %s is newer than the newest release that was tested, %s", info.get("version"), written(NEWEST))
        pause = "retract" if self.config.colocated else settings.pause
        self.ranks = int(info.get("tp_size") or 1)
        layout = layout_of(info, vocab_size=self.limits.vocab_size, hidden_size=self._hidden_size, on_cpu=release.cpu_checksums)
        self.updates = WeightUpdates(self.api, self.names, layout, pause=pause, ranks=self.ranks, on_update=self._updated)
        self.updates.version = self._first_version
        if settings.url and await self._has_version_0():
            self.updates.version = max(0, self._first_version)
            await self.updates.carry_out(self.updates.free())
        self._listener = HandleListener(self.updates, self.authority)
        self.handles = await self._listener.start()
        self._guard = Guard(self)
        self.url = await listen(self._guard.listener, self.config, host, port)
        self._looking = asyncio.create_task(self._look(), name="sglang health")
        return self.url

    async def _start_server(self) -> None:
        """Start the server with a key, so that other users of this machine cannot bypass the guard."""
        settings, arguments = self.config.sglang, self._arguments()
        self._port = KeptPort()  # it takes a minute until the server listens
        key = str(arguments.get("api_key") or "")
        if not key and "config" not in arguments:  # SGLang reads only one such file
            key = KEY_PREFIX + secrets.token_hex(24)
            self._secret = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="tidemill-sglang-"))  # mode 0700
            arguments["config"] = str(self._secret / "server.yaml")
            write_whole(self._secret / "server.yaml", f"api-key: {key}\n", private=True)
        self.api = Api(f"http://127.0.0.1:{self._port.number}", key)
        words = command_line(settings.python, self.model_dir, self._port.number, arguments)
        log_file = Path(settings.log) if settings.log else Path(tempfile.gettempdir()) / f"tidemill-sglang-{self._port.number}.log"
        self._child = server_child(words, settings.environment, log_file)
        await self._child.start()
        log.info("sglang started keeper=%d log=%s", self._child.pid, log_file)

    async def _forget_secret(self) -> None:
        if self._secret is not None:
            await asyncio.to_thread(shutil.rmtree, self._secret, ignore_errors=True)
        self._secret = None

    async def _has_version_0(self) -> bool:
        """Return whether the server was started with version 0 and not written since. Any other version may be another run's."""
        said = await self.api.call("GET", "/model_info", timeout_s=PROBE_S)
        return str(said.get("weight_version")) == "0"

    def cache_key(self) -> str:
        """Return the cache key of the served weights. Entries of older weights, or of others at a found server, are not used again."""
        return f"{self._cache} version {self.version}"

    def _arguments(self) -> dict[str, Any]:
        """Return the engine's own settings under SGLang's names; the user's arguments take precedence."""
        ours: dict[str, Any] = {"max_running_requests": self.config.max_running, "dtype": self.config.dtype}
        if self.config.device != "auto":
            ours["device"] = self.config.device
        if self.config.max_context:
            ours["context_length"] = self.config.max_context
        arguments = ours | self.config.sglang.arguments
        if self.config.colocated and arguments.get("device") != "cpu":
            arguments.setdefault("enable_memory_saver", True)  # without it SGLang releases no memory
        return arguments

    async def failed(self) -> None:
        """Wait until the server is gone or silent, then raise EngineFailed with its last lines."""
        await self._lost.wait()
        self._refuse_ended()
        raise EngineFailed(self.api.url, f"SGLang has not answered for {self.config.sglang.silent_s:g} s")

    def _refuse_ended(self) -> None:
        if self._child is not None and not self._child.running:
            raise failure(self._child, self.api.url)

    async def drain(self, timeout_s: float) -> bool:
        """Accept no more requests and finish the accepted ones. Returns False when some are left after ``timeout_s``."""
        self.phase = "draining"
        try:
            await self._until(lambda: self.unfinished == 0, timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop listening; end the server, if it was started here."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._guard is not None:
            await self._guard.listener.close()
        if self._listener is not None:
            await self._listener.close()
            await self.updates.close()
        if self._child is not None:
            await self._child.end(STOP_S, group=True)
        await self._forget_secret()
        if self._port is not None:
            self._port.close()
        if hasattr(self, "api"):
            await self.api.close()

    async def load_snapshot(self, directory: Path | str, version: int, epoch: int | None = None) -> float:
        """Load weights from a directory that the server can read. Returns the seconds for which generation was held up."""
        self.updates.admit(epoch, "load_snapshot")
        if self.updates.under_way:  # a push comes first, and may bring the version
            await self.between_updates(PROBE_S)
            if self.whole and self.version >= version:
                return 0.0
        return await self.updates.carry_out(self.updates.serve_directory(Path(directory), version))

    # -- state ----------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the served weights; -1 = none are complete."""
        return self.updates.version if hasattr(self, "updates") else self._first_version

    @property
    def whole(self) -> bool:
        return self.version >= 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(colocated=self.config.colocated, ranks=self.ranks)

    @property
    def epoch(self) -> int:
        return self.updates.epoch if hasattr(self, "updates") else 0

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        if phase not in PHASES:
            raise ValueError(f"phase: want one of {', '.join(PHASES)}, got {phase!r}")
        if phase != self._phase:
            log.info("engine phase=%s before=%s version=%d", phase, self._phase, self.version)
        self._phase = phase

    @property
    def servable(self) -> bool:
        return self._phase == "serving" and not self._lost.is_set()

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and gauges."""
        gauges = {
            "running": float(self.unfinished),
            "version": float(self.version),
            "epoch": float(self.epoch),
            "updates": float(self.updates.completed),
            "stall_s": self.updates.stall_s,
            "released": float(len(self.updates.released)),
        }
        return {**self.counters, **gauges}

    async def serve_version(self, wanted: int, timeout_s: float) -> None:
        """Wait until weights of at least this version are served. Raises VersionUnavailable after ``timeout_s``."""
        try:
            await self._until(lambda: self.version >= wanted, timeout_s)
        except TimeoutError:
            raise VersionUnavailable(
                self.url, f"version {wanted} is not served: version {self.version} is, after waiting {timeout_s:g} s"
            ) from None

    async def between_updates(self, timeout_s: float) -> None:
        """Wait while an update is under way, for ``timeout_s`` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.updates.settled.wait()

    def want_servable(self) -> None:
        """Raise EngineUnavailable unless the engine can generate now. While its memory is released, requests wait."""
        if not self.servable or (self.version < 0 and not self.updates.released):
            raise EngineUnavailable(self.url, f"it does not serve now: phase {self.phase}, version {self.version}")

    async def probe(self, timeout_s: float = PROBE_S) -> None:
        """Generate one token, in any phase, between updates. Raises EngineFailed when that fails, or its log-prob is NaN or above 0."""
        await self.between_updates(timeout_s)
        if self.updates.released:
            raise EngineFailed(self.url, "its memory is released")
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True}
        try:
            answer = await self.api.call("POST", "/generate", body, timeout_s=timeout_s)
            log_prob = float(answer["meta_info"]["output_token_logprobs"][0][0])
        except (EngineUnavailable, KeyError, IndexError, TypeError) as error:
            raise EngineFailed(self.api.url, f"the probe got no token: {error!r}") from error
        if not log_prob <= 1e-5:
            raise EngineFailed(self.api.url, f"the probe's log-prob is {log_prob}")

    def began(self, count: int) -> None:
        """Count requests that begin. Raises EngineUnavailable when there are too many."""
        limit = self.config.max_running + self.config.max_waiting
        if self.unfinished + count > limit:
            raise EngineUnavailable(self.url, f"the queue is full: {self.unfinished} unfinished requests, at most {limit}")
        self.unfinished += count
        self.counters["requests"] += count

    def ended(self, count: int) -> None:
        self.unfinished -= count
        if not self.unfinished:
            self._changed.wake()

    async def _until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not reached():
                await self._changed.wait()

    async def _look(self) -> None:
        """Poll the server until it has ended or no longer answers."""
        ended = asyncio.create_task(until_ended(self._child))
        try:
            while await self._answers(ended):
                await self.updates.let_go()
                await asyncio.wait({ended}, timeout=min(LOOK_S, self.config.sglang.silent_s / 4))
        finally:
            ended.cancel()
        log.error("sglang lost url=%s", self.api.url)
        self._lost.set()

    async def _answers(self, ended: "asyncio.Task[Any]") -> bool:
        """Return whether its scheduler answers within ``silent_s`` after the update operation under way; not once the server has ended."""
        busy = self.updates.carried_out
        asked = asyncio.create_task(self._until_answered())
        try:
            if busy is not None:
                await asyncio.wait({asked, ended, busy}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({asked, ended}, timeout=self.config.sglang.silent_s, return_when=asyncio.FIRST_COMPLETED)
            return asked.done() and asked.exception() is None and not ended.done()
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _until_answered(self) -> None:
        """Repeat a request that only the scheduler can answer, until it does. It answers while it is idle, generates or is paused."""
        while True:
            try:
                await self.api.call("GET", "/server_info")
                return
            except EngineError:
                await asyncio.sleep(LOOK_S)

    def _updated(self, version: int, epoch: int) -> None:
        if self._phase == "stale":
            self.phase = "serving"
        self._changed.wake()
        if self._on_update is not None:
            self._on_update(version, epoch)


def tensor_names(model_dir: Path) -> list[str]:
    """Return the names in the safetensors files of a directory. Raises UnsupportedModel when there are none."""
    names: list[str] = []
    for file in sorted(model_dir.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            names += [name for name in json.loads(opened.read(size)) if name != "__metadata__"]
    if not names:
        raise UnsupportedModel(str(model_dir), "want *.safetensors, there are none")
    return names
