"""Records of a streamed request, without HTTP: the tokens that were sent, once."""

import asyncio

import numpy as np

from tests.refusals import refusal
from tests.waits import turn
from tidemill.actors.engines.port import Generation
from tidemill.actors.engines.responses import EngineResponse, GenerationFailed
from tidemill.actors.episodes.calls import CUT, AnsweredCall, StreamedCalls, StreamedTurn
from tidemill.actors.episodes.recorder import TurnOutput
from tidemill.bus.wire.messages import Span, Timings


def response(count: int, finish: str | None = None) -> EngineResponse:
    made = Generation(
        id="g",
        tokens=np.arange(count, dtype=np.int32),
        log_probs=np.full(count, -0.5, np.float32),
        spans=(Span(version=3, num_tokens=count),) if count else (),
        finish=finish,
    )
    return EngineResponse(generation=made, engine="e", timings=Timings())


def called(of: EngineResponse, finish: str = CUT) -> AnsweredCall:
    made = of.generation
    output = TurnOutput(tokens=made.tokens, log_probs=made.log_probs, spans=made.spans, finish=finish)
    return AnsweredCall(np.array([1], np.int32), output, of, None)


class Engine:
    """A call that grows when the test makes it grow."""

    def __init__(self) -> None:
        self.turn: StreamedTurn | None = None
        self.left = False
        self.whole: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()

    async def __call__(self, turn: StreamedTurn) -> AnsweredCall:
        self.turn, turn.cut = turn, called
        turn.room.callback(lambda: setattr(self, "left", True))
        turn.grow(response(1))
        return called(await self.whole, "stop")


def streamed(*engines: Engine) -> tuple[StreamedCalls, list[tuple[str, int]]]:
    recorded: list[tuple[str, int]] = []

    async def record(one: AnsweredCall) -> None:
        await turn()
        recorded.append((one.output.finish, len(one.output.tokens)))

    return StreamedCalls(engines, record, "id"), recorded


async def test_what_was_made_but_not_sent_is_not_recorded() -> None:
    engine = Engine()
    calls, recorded = streamed(engine)
    await calls.begin()
    states = calls.states()
    assert [len((await anext(states))["output_ids"]) for _ in range(2)] == [0, 1]
    calls.sent()
    assert engine.turn is not None
    engine.turn.grow(response(2))
    engine.turn.grow(response(3))
    assert len((await anext(states))["output_ids"]) == 3, "states in between are skipped"
    engine.turn.grow(response(4))
    await states.aclose()
    await calls.end()
    assert recorded == [(CUT, 1)] and engine.whole.cancelled()


async def test_a_whole_response_is_recorded_before_its_last_state_and_only_once() -> None:
    engine, other = Engine(), Engine()
    calls, recorded = streamed(engine, other)
    await calls.begin()
    engine.whole.set_result(response(2, "stop"))
    states = calls.states()
    while (state := await anext(states))["meta_info"]["finish_reason"] is None:
        calls.sent()
    assert (state["index"], recorded) == (0, [("stop", 2)])
    assert engine.left and not other.left, "room in the budget is left with the record"
    await states.aclose()
    await calls.end()
    assert sorted(recorded) == [(CUT, 1), ("stop", 2)]


async def test_nothing_is_recorded_where_no_token_was_sent_and_errors_are_raised() -> None:
    engine = Engine()
    calls, recorded = streamed(engine)
    await calls.begin()
    states = calls.states()
    await anext(states)
    calls.sent()  # the empty state
    engine.whole.set_exception(GenerationFailed("broken"))
    with refusal(GenerationFailed, reason="broken"):
        while True:
            await anext(states)
    await calls.end()
    assert recorded == []


async def test_a_cancelled_end_records_what_was_sent() -> None:
    """A client that hangs up ends a write with an error; the cancellation of its request comes while that is
    handled.
    """
    engine = Engine()
    calls, recorded = streamed(engine)
    await calls.begin()
    states = calls.states()
    assert [len((await anext(states))["output_ids"]) for _ in range(2)] == [0, 1]
    calls.sent()
    await states.aclose()
    ending = asyncio.ensure_future(calls.end())
    for _ in range(2):
        await turn()
        ending.cancel()
    await asyncio.wait({ending})
    assert recorded == [(CUT, 1)] and engine.left and ending.cancelled()
