"""Requests that start together, sent as one: SGLang's batch form of /generate.

For short responses an HTTP request costs as much as its tokens do. Requests of the same turn of the loop, for the same prompt and minimum
version, travel together; each caller gets its own answer, all at the same time. A caller that leaves takes nothing from the others; when
all have left, the request is dropped and the engine ends it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Send = Callable[[dict[str, Any]], Awaitable[Any]]
"""POST a body to /generate: one answer for one prompt, a list for a list."""
Waiting = list[tuple[dict[str, Any], "asyncio.Future[Any]"]]
_BY_REQUEST = ("rid", "input_ids", "sampling_params")
"""Fields that are lists in the batch form; the others must be the same for all."""


class Joined:
    """Collects bodies for one engine."""

    def __init__(self) -> None:
        self._waiting: dict[Any, Waiting] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, body: dict[str, Any], send: Send) -> Any:
        """The answer to ``body``. Raises what ``send`` raises, each caller alike."""
        loop = asyncio.get_running_loop()
        key = (tuple(body["input_ids"]), body.get("min_version"))
        answer: asyncio.Future[Any] = loop.create_future()
        if key not in self._waiting:
            self._waiting[key] = []
            loop.call_soon(self._start, key, send)
        self._waiting[key].append((body, answer))
        return await answer

    async def close(self) -> None:
        """Drop what is under way."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _start(self, key: Any, send: Send) -> None:
        waiting = [(body, answer) for body, answer in self._waiting.pop(key) if not answer.done()]
        if not waiting:
            return
        task = asyncio.get_running_loop().create_task(_carry(waiting, send), name="joined request")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        task.add_done_callback(lambda _: [answer.cancel() for _, answer in waiting])  # of one that was cancelled before it began
        for _, answer in waiting:
            answer.add_done_callback(lambda _: task.cancel() if all(other.cancelled() for _, other in waiting) else None)


async def _carry(waiting: Waiting, send: Send) -> None:
    """Send, and give everyone its part."""
    first = waiting[0][0]
    body = first if len(waiting) == 1 else first | {name: [one[name] for one, _ in waiting] for name in _BY_REQUEST}
    try:
        answers = await send(body)
        for (_, answer), part in zip(waiting, [answers] if len(waiting) == 1 else answers, strict=True):
            if not answer.done():
                answer.set_result(part)
    except Exception as error:  # every caller's own
        for _, answer in waiting:
            if not answer.done():
                answer.set_exception(error)
