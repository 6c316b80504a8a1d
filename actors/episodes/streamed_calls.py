"""The model calls of a streamed request: states as the engines make them, and turns of the tokens that were sent.

engines -> newest state of each response -> states -> client    a slower client skips states
                      the whole response -> recorded, then its last state is sent
                             client gone -> recorded up to the last token sent, finish: cut
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from tidemill.actors.engines.port import Generation
from tidemill.actors.engines.responses import EngineResponse
from tidemill.actors.episodes.calls import AnsweredCall, answer_of
from tidemill.bus.system.coroutines import to_the_end
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.messages import Timings

CUT = "cut"
"""Finish reason of a turn after its client has closed the stream."""


@dataclass(slots=True, eq=False)
class StreamedTurn:
    """One response of a streamed request."""

    place: int
    notify: Callable[[], None]
    """To be called when something has changed."""
    room: ExitStack = field(default_factory=ExitStack)
    """Room of the turn in the episode's budget, left when it is recorded."""
    cut: Callable[[EngineResponse], AnsweredCall] | None = None
    """Makes a turn of an unfinished response; None while the call has not begun."""
    newest: EngineResponse | None = None
    yielded: EngineResponse | None = None
    """The state that the client is being sent."""
    sent: EngineResponse | None = None
    """The state that the client was sent; None = no token yet."""
    recorded: bool = False

    def grow(self, response: EngineResponse) -> None:
        """Take the response so far."""
        self.newest = response
        self.notify()


Call = Callable[[StreamedTurn], Awaitable[AnsweredCall]]
"""Makes a response: sets ``cut``, calls ``grow``, and returns the whole."""


class StreamedCalls:
    """The calls of one request. ``begin``, then ``states`` to the end or not, and always ``end``."""

    def __init__(
        self, calls: Sequence[Call], record: Callable[[AnsweredCall], Awaitable[None]], answer_id: str
    ) -> None:
        """``record`` records a turn."""
        self._calls, self._record, self._answer_id = calls, record, answer_id
        self._changed = asyncio.Event()
        self._turns = [StreamedTurn(place, self._changed.set) for place in range(len(calls))]
        self._tasks: list[asyncio.Task[AnsweredCall]] = []
        self._current: StreamedTurn | None = None
        """Turn of the state that was yielded last."""
        self._recording = asyncio.Lock()

    async def begin(self) -> None:
        """Start the calls, and return with the first token of any. Raises as a call does."""
        for turn, call in zip(self._turns, self._calls, strict=True):
            task = asyncio.ensure_future(call(turn))
            task.add_done_callback(lambda _: self._changed.set())
            self._tasks.append(task)
        while not any(turn.newest is not None for turn in self._turns) and not any(task.done() for task in self._tasks):
            self._changed.clear()
            await self._changed.wait()
        self._raise_failed()

    async def states(self) -> AsyncGenerator[JsonMapping, None]:
        """Yield SGLang's JSON of each response as it grows: empty, larger ones, the whole. Raises as a call does."""
        pending = list(self._turns)
        for turn in self._turns:
            yield self._state(turn, None)
        while pending:
            self._changed.clear()
            self._raise_failed()
            for turn in list(pending):
                if self._tasks[turn.place].done():
                    call = self._tasks[turn.place].result()
                    await self._record_turn(turn, call)
                    pending.remove(turn)
                    yield answer_of(call, self._answer_id, turn.place)
                elif turn.newest is not None and turn.newest is not turn.yielded:
                    turn.yielded, self._current = turn.newest, turn
                    yield self._state(turn, turn.yielded)
            if pending:
                await self._changed.wait()

    def sent(self) -> None:
        """Note that the client was sent the state that was yielded last."""
        if self._current is not None:
            self._current.sent = self._current.yielded

    @property
    def recorded(self) -> bool:
        """True if a turn was recorded."""
        return any(turn.recorded for turn in self._turns)

    async def end(self) -> None:
        """End the calls, and record the tokens sent of the unfinished ones: to the end, also when this is cancelled
        meanwhile.

        A client that hangs up is an error of the next write, and right after it a cancellation.
        """
        await to_the_end(self._end())

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for turn in self._turns:
            if turn.sent is not None and turn.cut is not None:
                await self._record_turn(turn, turn.cut(turn.sent))
            turn.room.close()

    async def _record_turn(self, turn: StreamedTurn, call: AnsweredCall) -> None:
        """Record a turn, once, also when this is cancelled meanwhile."""

        async def record() -> None:
            async with self._recording:
                if not turn.recorded:
                    turn.recorded = True
                    await self._record(call)
                    turn.room.close()

        await asyncio.shield(asyncio.ensure_future(record()))

    def _state(self, turn: StreamedTurn, response: EngineResponse | None) -> JsonMapping:
        assert turn.cut is not None, "the call has begun"
        return answer_of(turn.cut(response if response is not None else _EMPTY), self._answer_id, turn.place)

    def _raise_failed(self) -> None:
        for task in self._tasks:
            if task.done() and (task.cancelled() or task.exception() is not None):
                task.result()


_EMPTY = EngineResponse(
    generation=Generation(
        id="", tokens=np.zeros(0, np.int32), log_probs=np.zeros(0, np.float32), spans=(), finish=None
    ),
    engine="",
    timings=Timings(),
)
