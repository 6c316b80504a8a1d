"""Requests that start together, sent as one: SGLang's batch form of /generate.

For short responses an HTTP request costs as much as its tokens do. Requests of the same turn of the loop, for the same prompt and minimum
version, are sent together; each caller gets its own answer, all at the same time. A cancelled caller does not affect the others; when all
are cancelled, the request is dropped and the engine ends it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tidemill.bus.wire.json_object import JsonObject

Send = Callable[[JsonObject], Awaitable[Any]]
"""POST a body to /generate: one answer for one prompt, a list for a list."""
Pending = list[tuple[JsonObject, "asyncio.Future[object]"]]
"""The body and the future answer of each request of a batch."""
_BY_REQUEST = ("rid", "input_ids", "sampling_params")
"""Fields that are lists in the batch form; the others must be the same for all."""


class RequestBatcher:
    """Collects requests for one engine and sends them in batches."""

    def __init__(self) -> None:
        self._waiting: dict[object, Pending] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def request(self, body: JsonObject, send: Send) -> object:
        """Return the answer to ``body``. The batch is sent by the ``send`` of its first caller; an exception of it is raised in all."""
        loop = asyncio.get_running_loop()
        key = (tuple(body["input_ids"]), body.get("min_version"))
        answer: asyncio.Future[object] = loop.create_future()
        if key not in self._waiting:
            self._waiting[key] = []
            loop.call_soon(self._start, key, send)  # after this turn of the loop, so that its other requests are in the batch
        self._waiting[key].append((body, answer))
        return await answer

    async def close(self) -> None:
        """Cancel the batches in flight."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _start(self, key: object, send: Send) -> None:
        waiting = [(body, answer) for body, answer in self._waiting.pop(key) if not answer.done()]
        if not waiting:
            return
        task = asyncio.get_running_loop().create_task(_send_batch(waiting, send), name="request batch")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        task.add_done_callback(lambda _: [answer.cancel() for _, answer in waiting])  # for a batch that was cancelled before it began
        for _, answer in waiting:
            answer.add_done_callback(lambda _: task.cancel() if all(other.cancelled() for _, other in waiting) else None)


async def _send_batch(waiting: Pending, send: Send) -> None:
    """Send a batch and give each caller its part of the answer."""
    first = waiting[0][0]
    body = first if len(waiting) == 1 else first | {name: [one[name] for one, _ in waiting] for name in _BY_REQUEST}
    try:
        answers = await send(body)
        for (_, answer), part in zip(waiting, [answers] if len(waiting) == 1 else answers, strict=True):
            if not answer.done():
                answer.set_result(part)
    except Exception as error:  # raised in every caller
        for _, answer in waiting:
            if not answer.done():
                answer.set_exception(error)
