"""A streamed request that a test can follow token by token."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.engine_serving import Gate, Served


class Watched:
    """One streamed request in progress, and its tokens so far."""

    def __init__(self, served: Served, body: dict[str, Any], gate: Gate | None = None) -> None:
        self.tokens = 0
        self.gate = gate or Gate(0)
        """That of the engine, if it has one."""
        self._grown = asyncio.Event()
        self._served = served
        self.task = asyncio.create_task(self._read(body))
        self.task.add_done_callback(lambda _: self._grown.set())  # ``beyond`` reports one that has failed

    async def _read(self, body: dict[str, Any]) -> Any:
        """Read to the end, and return the last state, which is complete."""
        state: Any = None
        async with self._served.session.post(self._served.engine.url + "/generate", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    state = json.loads(line[6:])
                    self.tokens = len(state["output_ids"])
                    self._grown.set()
        return state

    async def beyond(self, tokens: int) -> None:
        """Wait until it has more than ``tokens`` tokens."""
        while self.tokens <= tokens:
            assert not self.task.done(), f"ended with {self.tokens} tokens, wanted more than {tokens}"
            self._grown.clear()
            await self._grown.wait()


@asynccontextmanager
async def watching(
    served: Served, prompt: Sequence[int], *, gate: Gate | None = None, **sampling: Any
) -> AsyncIterator[Watched]:
    body = {
        "input_ids": list(prompt),
        "sampling_params": sampling,
        "rid": "watched",
        "stream": True,
        "return_logprob": True,
    }
    watched = Watched(served, body, gate)
    try:
        yield watched
    finally:
        watched.task.cancel()
        await asyncio.gather(watched.task, return_exceptions=True)
