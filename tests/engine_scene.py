"""Engines without a model: the test sets their addresses and their answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.waits import turn
from tidemill.actors.engines.port import Generation
from tidemill.actors.engines.responses import seeded
from tidemill.actors.engines.server_discovery import ServerStatus
from tidemill.actors.engines.server_pool import EnginePool
from tidemill.bus.errors import BusError
from tidemill.bus.wire.messages import Sampling, Span

Answer = Generation | Exception | Callable[[Sampling], Generation] | tuple[Generation | Exception, ...]
"""A tuple has the states of a stream, and the error that breaks it off."""


def generation(
    *, tokens: Sequence[int] = (5, 6, 7), log_prob: float = -0.5, finish: str = "stop", **changes: Any
) -> Generation:
    """Return a response as engines return it."""
    spans = (Span(version=3, num_tokens=len(tokens)),) if tokens else ()
    settings: dict[str, Any] = {
        "id": "r",
        "tokens": np.array(tokens, np.int32),
        "log_probs": np.full(len(tokens), log_prob, np.float32),
        "spans": spans,
        "finish": finish,
        "text": "abc",
        **changes,
    }
    return Generation(**settings)


class ScriptedEngine:
    """Implementation of the Engine port: returns its answers one after the other, the last one for ever; records its
    requests.
    """

    def __init__(self, url: str, answers: Sequence[Answer] = ()) -> None:
        self.url, self.answers = url, list(answers) or [generation()]
        self.asked: list[tuple[Sampling, dict[str, Any]]] = []
        self.closed = False
        self.hold: asyncio.Event | None = None
        """When set, answers wait for it; responses end their wait at an abort, too."""
        self.aborted: list[str] = []

    async def generate(
        self,
        prompt: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        request_id: str = "",
        min_version: int = 0,
        timeout_s: float = 300.0,
        begun: Generation | None = None,
    ) -> Generation:
        self.asked.append(
            (sampling, {"request_id": request_id, "min_version": min_version, "timeout_s": timeout_s, "begun": begun})
        )
        await turn()
        if self.hold is not None:
            await self.hold.wait()
        return self._next_answer(sampling)

    async def generate_group(
        self, prompt: Any, sampling: Sampling, request_ids: Sequence[str], **options: Any
    ) -> list[Generation]:
        self.asked.append((sampling, {"request_ids": list(request_ids), **options}))
        await turn()
        if self.hold is not None:
            await self.hold.wait()
        return [self._next_answer(seeded(sampling, index)) for index in range(len(request_ids))]

    def _next_answer(self, sampling: Sampling) -> Generation:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        assert not isinstance(answer, tuple), "the states of a stream"
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Generation) else answer(sampling)

    async def stream(self, prompt: Any, sampling: Sampling, **options: Any) -> AsyncIterator[Generation]:
        if not isinstance(self.answers[0], tuple):
            yield await self.generate(prompt, sampling, **options)
            return
        self.asked.append((sampling, options))
        states = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for state in states if isinstance(states, tuple) else ():
            await turn()
            if isinstance(state, Exception):
                raise state
            yield state

    async def abort(self, request_id: str | None = None) -> None:
        self.aborted.append(request_id or "all")
        if self.hold is not None and isinstance(self.answers[0], Generation):
            self.hold.set()

    async def healthy(self) -> bool:
        return True

    async def version(self) -> int:
        return 3

    async def close(self) -> None:
        self.closed = True


class Scene:
    """An engine discovery with a view set by the test, and the engines in it."""

    def __init__(self, engines: dict[str, Sequence[Answer]]) -> None:
        """``engines``: id -> its answers; all of them serve version 3."""
        self._answers = engines
        self.clients: dict[str, ScriptedEngine] = {}
        self.view = {id: ServerStatus(url=f"http://{id}", id=id, serving=True, version=3) for id in engines}
        self.blind: BusError | None = None
        self._reads = asyncio.Event()

    async def discover(self) -> list[ServerStatus]:
        self._reads.set()
        if self.blind is not None:
            raise self.blind
        return list(self.view.values())

    def watch(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        self.changed = wake
        return nullcontext()

    async def close(self) -> None:
        pass

    def client(self, url: str) -> ScriptedEngine:
        id = url.removeprefix("http://")
        self.clients[id] = ScriptedEngine(url, self._answers.get(id, ()))
        return self.clients[id]

    async def seen(self) -> None:
        """Return when the engines have been looked up twice from now: the present view is then in use."""
        for _ in range(2):
            self._reads.clear()
            await self._reads.wait()


@asynccontextmanager
async def running_engines(scene: Scene, quarantine_s: tuple[float, float] = (0.02, 0.1)) -> AsyncIterator[EnginePool]:
    """Run engines that poll the scene; those in it at the beginning are known."""
    engines = EnginePool(scene, scene.client, quarantine_s=quarantine_s)
    running = asyncio.create_task(engines.run())
    try:
        if scene.view:
            async with engines.acquire(timeout_s=60):
                pass
        yield engines
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
