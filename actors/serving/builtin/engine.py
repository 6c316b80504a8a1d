"""The built-in engine: a model directory served over SGLang's HTTP API, for laptops, tests and small models.

                 HTTP (server.py, backend.py; loop's thread)
    /generate |              | weight updates           | pause, abort, ...
              v              v                          v
Sequence -> Scheduler    BuiltinUpdates: standby copy -> flip, between two steps
            (decoding thread; owns batch, keys/values, served weights)
"""

import asyncio
import logging
from dataclasses import asdict

from tidemill.actors.errors import EngineFailed
from tidemill.actors.serving.builtin.backend import BuiltinBackend
from tidemill.actors.serving.builtin.batch import Event
from tidemill.actors.serving.builtin.blocks import BLOCK
from tidemill.actors.serving.builtin.opening import open_model
from tidemill.actors.serving.builtin.peer_snapshots import PeerSnapshotServer
from tidemill.actors.serving.builtin.scheduler import Scheduler
from tidemill.actors.serving.builtin.sequence import Model
from tidemill.actors.serving.builtin.weight_updates import BuiltinUpdates
from tidemill.actors.serving.host import EngineHost
from tidemill.bus.wire.rows import Capabilities

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Time limit in seconds for the decoding thread to end."""
ALIVE_EVERY_S = 1.0
"""Interval in seconds at which the decoding thread is checked."""
PROBE_S = 20.0
"""Time limit in seconds of a probe."""


class BuiltinEngine(EngineHost[BuiltinUpdates]):
    """An engine that decodes in this process."""

    scheduler: Scheduler
    peer_snapshots: PeerSnapshotServer
    _backend: BuiltinBackend
    eos_ids: frozenset[int]
    _takes_adapters: bool
    _loop: asyncio.AbstractEventLoop

    def load(self) -> None:
        """Read the model. Raises UnsupportedModel, NoDevice, SnapshotBroken, UpdateRefused for wrong tensors."""
        config = self.config
        opened = open_model(self.model_dir, config)
        facts, weights, num_blocks = opened.facts, opened.weights, opened.runner.memory.num_blocks
        self._to_gpu = weights.device.type == "cuda"
        self._takes_adapters = weights.adapter_shape is not None
        self._read_limits(
            facts.vocab_size, facts.max_positions, experts=facts.routed is not None, kv_tokens=num_blocks * BLOCK
        )
        text, context = self.text, self.limits.max_context
        self.scheduler = Scheduler(
            opened.runner,
            self._first_version,
            max_running=config.max_running,
            share_prefix=config.share_prefix,
            threads=config.threads,
            post=self._post,
        )
        self._updates = BuiltinUpdates(weights, self.scheduler, on_update=self._updated)
        self.peer_snapshots = PeerSnapshotServer(self._updates.served, self.model_dir)
        self.eos_ids = frozenset(facts.eos_ids)
        model = Model(eos_ids=self.eos_ids, max_context=context, text=text)
        self._backend = BuiltinBackend(self, self.scheduler, facts, model, lambda: self.peer_snapshots)
        sizes = f"bytes={weights.size_bytes} context={context} kv_tokens={num_blocks * BLOCK}"
        log.info("engine loaded model=%s %s device=%s dtype=%s", self.model_dir, sizes, weights.device, weights.dtype)

    async def _open(self) -> BuiltinBackend:
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()
        return self._backend

    async def failed(self) -> None:
        """Wait until the decoding thread has ended, then raise EngineFailed. Found within ``ALIVE_EVERY_S`` seconds."""
        while self.scheduler.alive:  # noqa: ASYNC110 - a thread that ends wakes no waiter
            await asyncio.sleep(ALIVE_EVERY_S)
        raise EngineFailed(self.url, "its decoding thread has ended")

    async def close(self) -> None:
        """Abort the requests that are left, answering with their tokens so far; end the thread and the server."""
        # First, because the listener waits for its requests, and the scheduler ends them.
        await asyncio.to_thread(self.scheduler.close, CLOSE_S)
        await super().close()
        await self.peer_snapshots.close()

    async def probe(self, timeout_s: float = PROBE_S) -> None:
        """Generate one token, in any phase. Raises EngineFailed, also after ``timeout_s`` or for released memory."""
        if self.scheduler.released or not self.whole:
            raise EngineFailed(self.url, "its memory is released")
        await self._backend.probe(timeout_s)

    @property
    def capabilities(self) -> Capabilities:
        """Pushes in one request always; snapshots for peers while there are weights to serve."""
        return Capabilities(
            single_request_push=True,
            peer_snapshots=self.whole
            and not self.config.colocated,  # one that is being written would keep the memory that it releases
            colocated=self.config.colocated,
            adapters=self._takes_adapters,
        )

    @property
    def _alive(self) -> bool:
        return self.scheduler.alive

    def stats(self) -> dict[str, float]:
        """Return counters since the start and gauges: running, waiting, waiting_share (of the last seconds), blocks of
        keys and values in use, free, and of those free the idle ones, which later prompts may begin with.
        """
        counters, pool = self.scheduler.counters, self.scheduler.batch.pool
        running = len(self.scheduler.running)
        gauges = {
            "kv_blocks_used": pool.num_blocks - pool.available,
            "kv_blocks_free": pool.available,
            "kv_blocks_idle": pool.num_idle,
            "cached_tokens": counters.prompt_tokens - counters.prefill_tokens,
            "running": running,
            "waiting": max(0, self.unfinished - running) + self.awaiting_version,
        }
        return {**asdict(counters), "idle_s": self.idle_s, **super().stats(), **gauges}

    @property
    def idle_s(self) -> float:
        return self.scheduler.idle_s

    def _post(self, events: list[Event]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, events)
        except RuntimeError:
            log.warning("engine results dropped, the loop is closed events=%d", len(events))

    def _deliver(self, events: list[Event]) -> None:
        for sequence, num_tokens, has_ended in events:
            sequence.sink(sequence, num_tokens, has_ended)
        self.ended(sum(has_ended for _, _, has_ended in events))
