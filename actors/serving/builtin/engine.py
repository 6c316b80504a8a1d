"""The built-in engine: a model directory served over SGLang's HTTP API, for laptops, tests and small models.

                     HTTP (server.py, loop's thread)
        /generate |              | weight updates           | pause, abort, ...
                  v              v                          v
    Sequence -> Scheduler    WeightUpdates: standby copy -> flip, between two steps
                (decoding thread; owns batch, keys/values, served weights)

This module ties them together; a process embeds its engine. It knows no bus: its owner sets ``phase``.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from actors.config import EngineConfig
from actors.errors import EngineFailed, EngineUnavailable, UnsupportedModel, VersionUnavailable
from actors.http_api import listen
from actors.request import Generate, Limits, SamplingParams, seeds
from actors.serving.authority import Authority
from actors.serving.builtin.filling import fill_from_directory
from actors.serving.builtin.lending import Lending
from actors.serving.builtin.progress import Progress
from actors.serving.builtin.scheduler import CLIENT_GONE, Event, Scheduler
from actors.serving.builtin.sequence import Model, Sequence
from actors.serving.builtin.shape import ModelShape
from actors.serving.builtin.updates import WeightUpdates
from actors.serving.builtin.weights import Weights
from actors.serving.handles import HandleListener
from actors.text.text import Text
from bus.client.waiter import Waiter
from bus.wire.messages import Capabilities
from weightstore.listener import Listener

log = logging.getLogger(__name__)

PHASES = ("joining", "catching up", "serving", "stale", "draining")
WINDOW_S = 10.0
"""Seconds over which ``waiting_share`` is taken."""
CLOSE_S = 10.0
ALIVE_EVERY_S = 1.0


class BuiltinEngine:
    """One engine. ``load`` (blocking), ``start``, set ``phase = "serving"``; later ``drain`` and ``close``.

    It answers /generate only in phase ``serving``. Phase ``stale`` becomes ``serving`` by itself with the next completed update;
    its owner makes all other changes. ``on_update(version, epoch)`` is called in the loop's thread after every flip.
    """

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
        self._first_version, self._on_update = version, on_update
        self.authority = authority or Authority()
        self._phase = "joining"
        self._unfinished = 0
        self._awaiting_version = 0
        """Number of requests that wait for a newer version before they are queued."""
        self._changed = Waiter()
        self._history: deque[tuple[float, float]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Listener | None = None
        self.url = self.handles = ""
        self._listener: HandleListener | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the model directory. Raises UnsupportedModel when this engine cannot decode its model."""
        config = self.config
        shape = ModelShape.read(self.model_dir)
        context = config.max_context or shape.max_positions
        if context > shape.max_positions:
            raise UnsupportedModel("engine.max_context", f"want <= {shape.max_positions} (max_position_embeddings), got {context}")
        device = torch.device(config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        self.device = device
        weights = Weights(shape, dtype=getattr(torch, config.dtype), device=device)
        fill_from_directory(weights, self.model_dir)
        self.shape, self.text = shape, Text.read(self.model_dir)
        self.eos_ids = frozenset(shape.eos_ids) | frozenset(self.text.eos_ids if self.text else ())
        self.limits = Limits(
            vocab_size=shape.vocab_size,
            max_context=context,
            encode=self.text.encode if self.text is not None else None,
            max_responses=self.config.max_running + self.config.max_waiting,
        )
        self.scheduler = Scheduler(
            weights,
            self._first_version,
            max_running=config.max_running,
            max_context=context,
            share_prefix=config.share_prefix,
            threads=config.threads,
            post=self._post,
        )
        self.updates = WeightUpdates(weights, self.scheduler, on_update=self._updated)
        self.lending = Lending(self.updates.served, self.model_dir)
        log.info("engine loaded model=%s bytes=%d context=%d device=%s", self.model_dir, weights.size_bytes, context, device)

    async def start(self, host: str | None = None, port: int | None = None) -> str:
        """Start decoding, listen, and return the URL. The phase does not change."""
        from actors.serving.builtin.server import Server

        self._loop = asyncio.get_running_loop()
        self.scheduler.start()
        self._server = Server(self).listener
        self._listener = HandleListener(self.updates, self.authority)
        self.handles = await self._listener.start()
        self.url = await listen(self._server, self.config, host, port)
        return self.url

    async def drain(self, timeout_s: float) -> bool:
        """Accept no more requests and finish the accepted ones. Returns False when some are left in the end (``close`` aborts them)."""
        self.phase = "draining"
        try:
            await self._until(lambda: self._unfinished == 0, timeout_s)
        except TimeoutError:
            return False
        return True

    async def failed(self) -> None:
        """Wait until the decoding thread has ended, then raise EngineFailed."""
        while self.scheduler.alive:  # noqa: ASYNC110 - a thread that dies tells nobody
            await asyncio.sleep(ALIVE_EVERY_S)
        raise EngineFailed(self.url, "its decoding thread has ended")

    async def close(self) -> None:
        """Abort the requests that are left (each is answered with its tokens so far), stop listening, end the thread."""
        await asyncio.to_thread(self.scheduler.close, CLOSE_S)
        if self._server is not None:
            await self._server.close()
        if self._listener is not None:
            await self._listener.close()
        await self.updates.close()
        await self.lending.close()

    async def load_snapshot(self, directory: Path | str, version: int, epoch: int | None = None) -> float:
        """Load all weights of a directory on this machine, or none. Returns the seconds for which decoding was held up.

        Memory that was released is taken again. A push that is under way comes first, and may bring the version. Raises UpdateRefused or
        StaleEpoch, and then serves the same weights as before.
        """
        self.updates.admit(epoch, "load_snapshot")
        if await self.updates.came_meanwhile(version):
            return 0.0
        return await self.updates.carry_out(self.updates.serve_directory(Path(directory), version))

    # -- state ----------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def whole(self) -> bool:
        """True when there are weights to serve: not from the release of their memory until an update."""
        return self.updates.whole

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(single_request_push=True, peer_snapshots=self.whole, colocated=self.config.colocated)

    @property
    def epoch(self) -> int:
        """The highest learner epoch seen."""
        return self.updates.epoch

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
        return self._phase == "serving" and self.scheduler.alive

    def want_servable(self) -> None:
        """Raise EngineUnavailable when the engine does not serve now."""
        if not self.servable:
            raise EngineUnavailable(self.url, f"it does not serve now: phase {self.phase}, version {self.version}")

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and gauges: running, waiting, waiting_share (of the last seconds), version."""
        counters = self.scheduler.counters
        running = len(self.scheduler.running)
        now, idle_s = time.monotonic(), self.scheduler.idle_s
        while len(self._history) > 1 and now - self._history[1][0] > WINDOW_S:
            self._history.popleft()
        since, idle_before_s = self._history[0] if self._history else (now, idle_s)
        self._history.append((now, idle_s))
        elapsed_s = now - since
        gauges = {
            "running": running,
            "waiting": max(0, self._unfinished - running) + self._awaiting_version,
            "waiting_share": min(1.0, (idle_s - idle_before_s) / elapsed_s) if elapsed_s > 0 else 0.0,
            "version": self.version,
            "epoch": self.epoch,
            "updates": self.updates.completed,
            "stall_s": self.updates.stall_s,
            "released": float(len(self.scheduler.released)),
        }
        return {**asdict(counters), "idle_s": idle_s, **gauges}

    # -- generating -----------------------------------------------------------------------------------------------------

    def submit(self, generate: Generate) -> Progress:
        """Queue the requested responses, in any phase. Raises EngineUnavailable when the queue is full."""
        limit = self.limits.max_responses
        if self._unfinished + len(generate.prompts) > limit:
            raise EngineUnavailable(self.url, f"the queue is full: {self._unfinished} unfinished requests, at most {limit}")
        progress = Progress()
        model = Model(eos_ids=self.eos_ids, max_context=self.limits.max_context, text=self.text)
        for prompt, params, rid, seed in zip(generate.prompts, generate.params, generate.rids, seeds(generate), strict=True):
            progress.add(
                Sequence(
                    rid,
                    prompt,
                    params,
                    seed=seed,
                    model=model,
                    sink=progress.tell,
                    stream=generate.stream,
                    continued_tokens=generate.continued_tokens,
                )
            )
        self._unfinished += len(progress.sequences)
        self.scheduler.submit(list(progress.sequences))
        return progress

    def abandon(self, progress: Progress) -> None:
        """Abort the responses that have not ended: their client has gone."""
        mine = set(progress.sequences)
        self.scheduler.abort(mine.__contains__, CLIENT_GONE)

    async def serve_version(self, wanted: int, timeout_s: float) -> None:
        """Wait until weights of at least this version are served. Raises VersionUnavailable after ``timeout_s``."""
        if self.version >= wanted:
            return
        self._awaiting_version += 1
        try:
            await self._until(lambda: self.version >= wanted, timeout_s)
        except TimeoutError:
            raise VersionUnavailable(
                self.url, f"version {wanted} is not served: version {self.version} is, after waiting {timeout_s:g} s"
            ) from None
        finally:
            self._awaiting_version -= 1

    async def probe(self, timeout_s: float = 20.0) -> None:
        """Generate one token, in any phase. Raises EngineFailed when that fails, or its log-prob is not finite."""
        if self.scheduler.released or not self.whole:
            raise EngineFailed(self.url, "its memory is released")
        generate = Generate(
            prompts=[np.zeros(1, np.int32)],
            params=[SamplingParams(max_new_tokens=1, temperature=0.0)],
            rids=["probe"],
            many=False,
            stream=False,
            return_logprob=True,
            continued_tokens=0,
            min_version=0,
            min_version_timeout_s=0.0,
        )
        progress = self.submit(generate)
        try:
            async with asyncio.timeout(timeout_s):
                (sequence,) = await progress.finished()
        except TimeoutError:
            self.abandon(progress)
            raise EngineFailed(self.url, f"no token within {timeout_s:g} s") from None
        if sequence.error is not None:
            raise EngineFailed(self.url, sequence.error)

    async def _until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not reached():
                await self._changed.wait()

    def _post(self, events: list[Event]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._tell, events)
        except RuntimeError:
            log.warning("engine results dropped, the loop is closed events=%d", len(events))

    def _tell(self, events: list[Event]) -> None:
        ended = 0
        for sequence, num_tokens, has_ended in events:
            sequence.sink(sequence, num_tokens, has_ended)
            ended += has_ended
        self._unfinished -= ended
        if ended and self._unfinished == 0 and self._phase == "draining":
            self._changed.wake()

    def _updated(self, version: int, epoch: int) -> None:
        if self._phase == "stale":
            self.phase = "serving"
        self._changed.wake()
        if self._on_update is not None:
            self._on_update(version, epoch)
