"""The host of an engine: its phase, its requests in number, its idle time, its versions, and its listeners; the same
for both kinds of engine.

A process embeds its engine. The host knows no bus: its owner sets ``phase``, and makes all changes of it but one:
``stale`` becomes ``serving`` by itself with the next completed update.
"""

import asyncio
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from tidemill.actors.config import EngineConfig
from tidemill.actors.errors import EngineUnavailable, UnsupportedModel, VersionUnavailable
from tidemill.actors.generate_body import RequestLimits
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.handles import HandleListener
from tidemill.actors.serving.port import PHASES, Backend, ServedEngine
from tidemill.actors.serving.server import EngineServer
from tidemill.actors.serving.updates import Updates
from tidemill.actors.text.text import Text
from tidemill.bus.client.addresses import AUTO, LOOPBACK
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.subjects import nonce

log = logging.getLogger(__name__)


WINDOW_S = 10.0
"""Seconds over which the share is taken."""
PROBE = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True}
"""Body of /generate with which an engine is probed."""


class IdleClock:
    """Seconds in which no request was unfinished; a request is noted at its begin and at its end."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._total_s, self._since_s = clock, 0.0, clock()
        self._count = 0

    def note(self, change: int) -> None:
        """Note requests that begin (positive) or end."""
        now = self._clock()
        if not self._count:
            self._total_s += now - self._since_s
        self._count, self._since_s = self._count + change, now

    @property
    def idle_s(self) -> float:
        return self._total_s + (0.0 if self._count else self._clock() - self._since_s)


class WaitingShare:
    """The share since the reading that is ``WINDOW_S`` old, at each reading."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._history: deque[tuple[float, float]] = deque()

    def read(self, idle_s: float) -> float:
        """Return the share of idle time; 0 at the first reading. ``idle_s``: all idle seconds up to now."""
        now = self._clock()
        while len(self._history) > 1 and now - self._history[1][0] > WINDOW_S:
            self._history.popleft()
        since, before_s = self._history[0] if self._history else (now, idle_s)
        self._history.append((now, idle_s))
        return min(1.0, (idle_s - before_s) / (now - since)) if now > since else 0.0


AnyUpdates = TypeVar("AnyUpdates", bound=Updates)


class EngineHost(ServedEngine, Generic[AnyUpdates]):
    """One engine. ``load`` (blocking), ``start``, set ``phase = "serving"``, without which /generate is refused; later
    ``drain`` and ``close``. ``on_update(version, epoch)`` is called in the loop's thread after every update.
    """

    limits: RequestLimits
    text: Text | None

    def __init__(
        self,
        model_dir: Path | str,
        config: EngineConfig | None = None,
        *,
        version: int = 0,
        on_update: Callable[[int, int], None] | None = None,
        authority: Authority | None = None,
    ) -> None:
        self.model_dir, self.config = Path(model_dir), config or EngineConfig()
        self.authority = authority or Authority()
        self.url = self.handles = ""
        self.nonce = nonce()
        self.unfinished = 0
        """Number of accepted responses that have not ended."""
        self.awaiting_version = 0
        """Number of requests that wait for a newer version before they are accepted."""
        self._first_version, self._on_update = version, on_update
        self._idle, self._waiting_share = IdleClock(), WaitingShare()
        self._phase = "joining"
        self._changed = Waiter()
        self._updates: AnyUpdates | None = None
        self.server: EngineServer | None = None
        self._handles: HandleListener | None = None
        self._to_gpu = False
        """True where this process copies pushed weights to a GPU."""

    @abstractmethod
    async def _open(self) -> Backend:
        """Make the engine able to generate. Raises EngineFailed."""

    @property
    @abstractmethod
    def _alive(self) -> bool:
        """False once the engine cannot generate any more, for good."""

    def _read_limits(self, vocab_size: int, max_positions: int, *, experts: bool = False, kv_tokens: int = 0) -> None:
        """Read the tokenizer and set the bounds of requests. ``kv_tokens``: tokens for which there is room; 0 = not
        known. Raises UnsupportedModel for too long a context.
        """
        if (context := self.config.max_context) > max_positions:
            want = f"want <= {max_positions} (the longest context of the model)"
            raise UnsupportedModel("engine.max_context", f"{want}, got {context}")
        longest, room = self.config.context_bounds
        kv_tokens, text = kv_tokens or room, Text.read(self.model_dir)
        max_context = min(at_most := min(longest or max_positions, max_positions), kv_tokens or at_most)
        self.text = text = None if text is None else text.bounded(max_context)
        self.limits = RequestLimits(
            vocab_size=vocab_size,
            max_context=max_context,
            kv_setting=self.config.kv_setting if max_context < at_most else "",
            encode=text.encode if text is not None else None,
            max_responses=self.config.max_running + self.config.max_waiting,
            experts=experts,
        )

    async def start(self, host: str | None = None, port: int | None = None) -> str:
        """Listen for requests and for pushes by handles. Returns the URL; the phase does not change.

        Without a bus an engine serves this machine only. ``host`` and ``port``: instead of the settings. Raises
        OSError, ValueError for an address that other machines reach without a key.
        """
        self.server = EngineServer(self, await self._open())
        if self.authority.accepts_commands:
            self._handles = HandleListener(self.updates, self.authority, to_gpu=self._to_gpu)
            self.handles = await self._handles.start()
        config, bind = self.config, self.config.host if host is None else host
        self.url = await self.server.listener.start(
            LOOPBACK if bind == AUTO else bind,
            config.port if port is None else port,
            advertise=config.advertise,
            insecure=config.insecure,
            name="engine.host",
        )
        return self.url

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait until the accepted ones have ended. Returns False after ``timeout_s``."""
        self.phase = "draining"
        try:
            await self._until(lambda: self.unfinished == 0, timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop listening, and end the updates, in this order: then no command reaches updates that have ended."""
        if self.server is not None:
            await self.server.listener.close()
        if self._handles is not None:
            await self._handles.close()
        if self._updates is not None:
            await self._updates.close()

    async def load_snapshot(self, directory: Path | str, version: int, epoch: int | None = None) -> float:
        """Load all weights of a directory, or none, after a push under way, which may bring the version. Takes released
        memory again. Returns the seconds for which generation was held up. Raises UpdateRefused or StaleEpoch.
        """
        updates = self.updates
        updates.require_current_epoch(epoch, "load_snapshot")
        while True:
            begun = updates.begun  # before the next line, which waits for the pushes that are counted in it
            if await updates.arrived_meanwhile(version):
                return 0.0
            stall_s = await updates.run_shielded(updates.serve_directory(Path(directory), version, begun=begun))
            if stall_s is not None:
                return stall_s

    @property
    def updates(self) -> AnyUpdates:
        """The engine's weight updates, once it is loaded and started."""
        assert self._updates is not None, "the engine is not loaded, or not started"
        return self._updates

    @property
    def version(self) -> int:
        return self._first_version if self._updates is None else self._updates.version

    @property
    def epoch(self) -> int:
        return 0 if self._updates is None else self._updates.epoch

    @property
    def whole(self) -> bool:
        return self._updates is not None and self._updates.whole

    @property
    def phase(self) -> str:
        """One of ``PHASES``. Setting it raises ValueError for any other text."""
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
        """True when requests are accepted: the phase is ``serving``, and the engine can generate."""
        return self._phase == "serving" and self._alive

    def require_servable(self) -> None:
        """Raise EngineUnavailable when the engine does not serve now. While its memory is released, requests wait."""
        if not self.servable or (self.version < 0 and not self.updates.released):
            raise EngineUnavailable(self.url, f"it does not serve now: phase {self.phase}, version {self.version}")

    def stats(self) -> dict[str, float]:
        """Return gauges and counters since the start; ``waiting_share`` is that of the last seconds without work."""
        return {
            "running": self.unfinished,
            "waiting_share": self._waiting_share.read(self.idle_s),
            "rows": self.config.max_running,
            "version": self.version,
            "epoch": self.epoch,
            "updates": self.updates.completed,
            "stall_s": self.updates.stall_s,
            "released": float(len(self.updates.released)),
        }

    @property
    def idle_s(self) -> float:
        """Seconds since the start without work."""
        return self._idle.idle_s

    async def serve_version(self, version: int, timeout_s: float) -> None:
        """Wait until weights of at least this version are served. Raises VersionUnavailable after ``timeout_s``."""
        self.awaiting_version += 1
        try:
            await self._until(lambda: self.version >= version, timeout_s)
        except TimeoutError:
            reason = f"version {version} is not served: version {self.version} is, after waiting {timeout_s:g} s"
            raise VersionUnavailable(self.url, reason) from None
        finally:
            self.awaiting_version -= 1

    def accept(self, count: int) -> None:
        """Count responses that begin. Raises EngineUnavailable when there are too many."""
        limit = self.limits.max_responses
        if self.unfinished + count > limit:
            reason = f"the queue is full: {self.unfinished} unfinished requests, at most {limit}"
            raise EngineUnavailable(self.url, reason)
        self.unfinished += count
        self._idle.note(count)

    def ended(self, count: int) -> None:
        self.unfinished -= count
        self._idle.note(-count)
        if count and not self.unfinished:
            self._changed.wake()

    async def _until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not reached():
                await self._changed.wait()

    def _updated(self, version: int, epoch: int) -> None:
        if self._phase == "stale":
            self.phase = "serving"
        self._changed.wake()
        if self._on_update is not None:
            self._on_update(version, epoch)
