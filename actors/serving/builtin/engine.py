"""The built-in engine: a model directory served over SGLang's HTTP API, for laptops, tests and small models.

                 HTTP (server.py, backend.py; loop's thread)
    /generate |              | weight updates           | pause, abort, ...
              v              v                          v
Sequence -> Scheduler    BuiltinUpdates: standby copy -> flip, between two steps
            (decoding thread; owns batch, keys/values, served weights)

The decoder runs its own families, because it is faster (``docs/benchmarks.md``) and takes adapters; a model that it
lacks is run by the library transformers.
"""

import asyncio
import logging
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from tidemill.actors.config import EngineConfig
from tidemill.actors.errors import EngineFailed, NoDevice, UnsupportedModel
from tidemill.actors.serving.builtin.backend import BuiltinBackend
from tidemill.actors.serving.builtin.batch import Event
from tidemill.actors.serving.builtin.blocks import BLOCK, RowSizes, budget, host_memory
from tidemill.actors.serving.builtin.peer_snapshots import PeerSnapshotServer
from tidemill.actors.serving.builtin.runner import DecoderRunner, ModelRunner
from tidemill.actors.serving.builtin.scheduler import Scheduler
from tidemill.actors.serving.builtin.sequence import Model
from tidemill.actors.serving.builtin.shape import ModelFacts, ModelShape, choose_runner
from tidemill.actors.serving.builtin.weight_updates import BuiltinUpdates
from tidemill.actors.serving.builtin.weights import Weights, WeightSet, load_from_directory
from tidemill.actors.serving.host import EngineHost
from tidemill.bus.system.functions import find_object
from tidemill.bus.wire.rows import Capabilities

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Time limit in seconds for the decoding thread to end."""
ALIVE_EVERY_S = 1.0
"""Interval in seconds at which the decoding thread is checked."""
PROBE_S = 20.0
"""Time limit in seconds of a probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model that is ready to decode."""

    facts: ModelFacts
    weights: WeightSet
    runner: ModelRunner


def open_model(model_dir: Path, config: EngineConfig) -> OpenedModel:
    """Load a model directory. Raises UnsupportedModel, NoDevice, SnapshotBroken, UpdateRefused for wrong tensors,
    FunctionRefused.
    """
    shape, reason = choose_runner(config.runner, lambda: ModelShape.read(model_dir))
    device = _device(config)
    name = config.dtype if config.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    if shape is not None:
        opened = _open_decoder(model_dir, config, shape, dtype, device)
    else:
        opened = _open_transformers(model_dir, config, dtype, device)
    runner = "decoder" if shape is not None else "transformers"
    log.info("model opened runner=%s reason=%s model=%s", runner, reason, model_dir)
    return opened


def _device(config: EngineConfig) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise NoDevice("engine.device", "auto or cpu where torch finds no GPU", config.device)
    return torch.device(("cuda" if has_gpu else "cpu") if config.device == "auto" else config.device)


def _num_blocks(sizes: RowSizes, config: EngineConfig, device: torch.device) -> int:
    has_gpu = device.type == "cuda"
    return budget(
        sizes,
        max_running=config.max_running,
        max_context=config.max_context,
        kv_tokens=config.kv_tokens,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if has_gpu else host_memory(),
    )


def _open_decoder(
    model_dir: Path, config: EngineConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> OpenedModel:
    num_blocks = _num_blocks(RowSizes.of(shape, dtype.itemsize), config, device)
    weights = Weights(shape, dtype=dtype, device=device)
    load_from_directory(weights, model_dir)
    runner = DecoderRunner(weights, num_blocks=num_blocks)
    return OpenedModel(facts=shape.facts, weights=weights, runner=runner)


def _open_transformers(model_dir: Path, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> OpenedModel:
    if find_spec("transformers") is None:
        want = "want the library transformers, which runs the families that the decoder lacks, got none of the name"
        raise UnsupportedModel(str(model_dir), f"{want}; install it: pip install 'transformers==5.24.*'")
    # On use: the library takes seconds to import.
    from tidemill.actors.serving.builtin.transformers_cache import probe, row_sizes
    from tidemill.actors.serving.builtin.transformers_runner import (
        TransformersRunner,
        facts_of,
        load_transformers_model,
    )

    if config.family:
        find_object(config.family, "learner.family")
    weights = load_transformers_model(model_dir, dtype=dtype, device=device)
    facts, probed = facts_of(weights.model, model_dir), probe(weights.model)
    num_blocks = _num_blocks(row_sizes(probed, facts.max_positions), config, device)
    runner = TransformersRunner(weights, probed, num_blocks=num_blocks)
    log.info("self-test passed distance=%.1e nats model_type=%s", runner.self_test(), facts.family)
    return OpenedModel(facts=facts, weights=weights, runner=runner)


class BuiltinEngine(EngineHost[BuiltinUpdates]):
    """An engine that decodes in this process."""

    scheduler: Scheduler
    peer_snapshots: PeerSnapshotServer
    backend: BuiltinBackend
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
        self.backend = BuiltinBackend(self, self.scheduler, facts, model, lambda: self.peer_snapshots)
        sizes = f"bytes={weights.size_bytes} context={context} kv_tokens={num_blocks * BLOCK}"
        log.info("engine loaded model=%s %s device=%s dtype=%s", self.model_dir, sizes, weights.device, weights.dtype)

    async def _open(self) -> BuiltinBackend:
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()
        return self.backend

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
        await self.backend.probe(timeout_s)

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
        keys and values in use, free, of those free the idle ones, which later prompts may begin with, and idle ones
        that were taken for other tokens.
        """
        counters, pool = self.scheduler.counters, self.scheduler.batch.pool
        running = len(self.scheduler.running)
        gauges = {
            "kv_blocks_used": pool.num_blocks - pool.available,
            "kv_blocks_free": pool.available,
            "kv_blocks_idle": pool.num_idle,
            "kv_blocks_evicted": pool.evicted,
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
