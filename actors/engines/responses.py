"""One response from the engines of a pool, with its attempts: waits, repeats, continues and is cut short. Knows no task
and no sample.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.activity import Activity
from tidemill.actors.engines.port import Engine, Generation
from tidemill.actors.engines.server_pool import EnginePool, NoServer
from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, EngineGone, EngineUnavailable
from tidemill.bus.errors import WireError
from tidemill.bus.wire.messages import Sampling, Timings

logger = logging.getLogger(__name__)

FINISHED = ("stop", "length")
"""Finish reasons of a complete response. One with any other reason is unfinished."""
CUT_SHORT_S = 5.0
"""Seconds that an engine has to return its unfinished responses after an abort."""
ABORT_EVERY_S = 0.2
"""Seconds between two aborts. An engine ignores an abort that arrives before its request, so it is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request for one response. Shape letter: P = its tokens."""

    name: str
    """Beginning of the ids of its requests, also in logs."""
    tokens: NDArray[np.int32]
    """Token ids, [P]."""
    sampling: Sampling
    """With the seed of this very response."""
    min_version: int = 0
    begun: Generation | None = None
    """An unfinished response that is continued; None = none."""
    timings: Timings = field(default_factory=Timings)
    """Seconds spent on ``begun``."""
    prefer: str = ""
    """Id of the engine to be asked if it serves; empty = any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResponse:
    """A complete response."""

    generation: Generation
    engine: str
    timings: Timings


class GenerationFailed(Exception):
    """A response could not be generated, and no further attempt is made."""

    def __init__(self, reason: str, *, outside: bool = False) -> None:
        """``outside``: the cause lies outside of the row, so that responses to other rows fail, too."""
        super().__init__(reason)
        self.reason, self.outside = reason, outside

    def __str__(self) -> str:
        return f"generation: {self.reason}"


class Interrupted(Exception):
    """There is no complete response, for a reason outside the request: no engine was found, or this process is
    leaving.
    """

    def __init__(self, reason: str, begun: Generation | None, timings: Timings) -> None:
        """``begun``: the unfinished response so far, at least one token; None = none. ``timings``: seconds spent on
        it.
        """
        super().__init__(reason)
        self.reason, self.begun, self.timings = reason, begun, timings

    def __str__(self) -> str:
        return self.reason


@dataclass(slots=True, kw_only=True)
class _Tries:
    """The attempts at one response so far."""

    begun: Generation | None
    """The unfinished response so far; None = none."""
    queued_s: float
    generating_s: float
    """Seconds spent on ``begun``."""
    avoid: str = ""
    """Engine of the last attempt."""
    began_s: float = field(default_factory=time.monotonic)
    broken: int = 0
    """Number of requests that an engine accepted and did not finish."""
    last: str = ""
    grown: "Callable[[EngineResponse], None] | None" = None
    """Called with the response so far; None = it is not streamed."""
    shown: bool = False
    """True once ``grown`` has been called: the response can be continued, but not begin anew."""

    def restart(self) -> None:
        """Discard the unfinished response. One that has been streamed is kept: it is continued from its last accepted
        token.
        """
        if not self.shown:
            self.begun, self.generating_s = None, 0.0

    def interrupted(self, reason: str) -> Interrupted:
        """Return the error with the response so far."""
        begun = self.begun if self.begun is not None and len(self.begun.tokens) else None
        return Interrupted(reason, begun, Timings(queued_s=self.queued_s, generating_s=self.generating_s))


def _anything(response: EngineResponse) -> None:
    """Accept every response."""


class Responses:
    """Responses of any engine of the pool."""

    def __init__(
        self,
        engines: EnginePool,
        *,
        timeout_s: float,
        retries: int,
        activity: Activity,
        cut_short_s: float = CUT_SHORT_S,
    ) -> None:
        """``timeout_s`` bounds one response with all its attempts and waits, ``retries`` the requests that engines
        broke off, ``cut_short_s`` the time that an engine has to return the unfinished responses when they are cut
        short.
        """
        self._engines, self._timeout_s, self._retries, self._activity = engines, timeout_s, retries, activity
        self._in_flight: dict[str, tuple[Engine, asyncio.Timeout]] = {}
        """Requests in flight by id, each with its engine and time limit."""
        self._cutting_short, self._cut_short_s = False, cut_short_s
        self._lost: dict[str, str] = {}
        """Engines that have answered nothing since a connection to them broke, with their processes."""

    async def generate(
        self,
        prompt: Prompt,
        accept: Callable[[EngineResponse], None] = _anything,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        grown: Callable[[EngineResponse], None] | None = None,
    ) -> EngineResponse:
        """Return a complete response.

        A request that its engine broke off is repeated from its last token on, at another engine if there is one. Waits
        for engines that are away, full or not serving. ``accept`` raises WireError for an answer that is no valid
        response: it counts as broken off, and begins anew. ``waiting`` is entered while an engine is waited for.
        ``grown`` is called with the accepted response so far, each time longer than before; such a response is only
        continued, and fails at once where an engine refuses that as a bad request.
        Raises BadRequest, GenerationFailed, Interrupted.
        """
        tries = _Tries(
            begun=prompt.begun, queued_s=prompt.timings.queued_s, generating_s=prompt.timings.generating_s, grown=grown
        )
        while not self._cutting_short:
            try:
                if (response := await self._try(prompt, tries, accept, waiting)) is not None:
                    return response
                continue
            except NoServer as error:
                raise tries.interrupted(str(error)) from error
            except (EngineFailed, EngineGone) as error:
                tries.broken += 1
                tries.last = str(error)
                self._activity.counters.requests_aborted += 1
            except EngineUnavailable as error:
                tries.last = str(error)
            logger.info("request broken off request=%s broken=%d error=%s", prompt.name, tries.broken, tries.last)
            if tries.broken >= self._retries:
                raise GenerationFailed(f"{tries.broken} requests broken off, the last one: {tries.last}", outside=True)
        raise tries.interrupted("the actor is draining")

    def waits_for(self) -> str:
        """Return a description of the wait for an engine and its duration; empty when no request waits."""
        return self._engines.waits_for()

    def stop_waiting(self) -> None:
        """End requests as Interrupted from now on, instead of waiting for an engine."""
        self._engines.give_up()

    async def cut_short(self) -> None:
        """Abort the requests in flight. Every ``generate`` now returns a response or raises Interrupted within
        ``cut_short_s``.
        """
        self._cutting_short = True
        end = asyncio.get_running_loop().time() + self._cut_short_s
        for _, limit in self._in_flight.values():
            limit.reschedule(end)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                while self._in_flight:
                    await asyncio.gather(*(_abort(engine, id) for id, (engine, _) in self._in_flight.items()))
                    await asyncio.sleep(ABORT_EVERY_S)

    async def _try(
        self,
        prompt: Prompt,
        tries: _Tries,
        accept: Callable[[EngineResponse], None],
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> EngineResponse | None:
        """Make one request. Returns None when it was cut short. Raises EngineFailed also when the engine broke it
        off.
        """
        begin = time.monotonic()
        left_s = tries.began_s + self._timeout_s - begin
        if tries.last and left_s <= 0:
            raise GenerationFailed(
                f"not done within {self._timeout_s:g} s, the last attempt: {tries.last}", outside=True
            )
        async with AsyncExitStack() as held:
            acquired = self._engines.acquire(
                min_version=prompt.min_version,
                timeout_s=left_s,
                avoid=tries.avoid,
                prefer="" if tries.last else prompt.prefer,
            )
            with waiting():
                name, engine = await held.enter_async_context(acquired)
            tries.avoid = name
            asked = time.monotonic()
            tries.queued_s += asked - begin
            spent_s, begun, process = tries.generating_s, tries.begun, self._engines.process_of(name)
            away = bool(process) and self._lost.get(name) == process
            try:
                answer = await self._ask(name, engine, prompt, tries, accept)
                self._lost.pop(name, None)
            except EngineGone as error:
                self._lost[name] = process
                # A relay takes connections also while its engine is away: a process that has broken off a request
                # counts once.
                if away and tries.begun is begun:
                    raise EngineUnavailable(name, error.reason) from error
                raise
            finally:
                if tries.begun is not None and tries.begun is not begun:  # a stream that broke off is continued
                    tries.generating_s = spent_s + time.monotonic() - asked
            if answer is None:
                return None
            generating_s = spent_s + time.monotonic() - asked
            timings = Timings(queued_s=tries.queued_s, generating_s=generating_s)
            response = EngineResponse(generation=answer, engine=name, timings=timings)
            if answer.finish in FINISHED or tries.shown:  # tokens behind streamed ones cannot be discarded later
                _require(accept, response, tries)
            if answer.finish in FINISHED:
                return response
            tries.begun, tries.generating_s = answer, generating_s
            if self._cutting_short:
                return None
            raise EngineFailed(name, f"broke off after {len(answer.tokens)} tokens: finish {answer.finish!r}")

    async def _ask(
        self, name: str, engine: Engine, prompt: Prompt, tries: _Tries, accept: Callable[[EngineResponse], None]
    ) -> Generation | None:
        """Return the engine's answer, complete or broken off; None when it was cut short without one."""
        if self._cutting_short:
            return None
        now = time.monotonic()
        # Random: any client of the engine may abort a request whose id it knows. The next attempt at the same engine
        # needs another id.
        id = f"{prompt.name}.{tries.broken}-{secrets.token_hex(8)}"
        begun = tries.begun
        generate = engine.generate if tries.grown is None else _Streamed(name, engine, tries, accept).generate
        try:
            async with asyncio.timeout(None) as limit:  # ``cut_short`` sets the limit
                self._in_flight[id] = (engine, limit)
                with self._activity:
                    return await generate(
                        prompt.tokens,
                        prompt.sampling,
                        id=id,
                        min_version=prompt.min_version,
                        timeout_s=max(tries.began_s + self._timeout_s - now, 0.001),
                        begun=begun,
                    )
        except TimeoutError:
            return None
        except (BadRequest, EngineFailed) as error:
            if begun is None:
                raise
            if tries.shown and isinstance(error, BadRequest):
                raise GenerationFailed(
                    f"a part of the response has been streamed, and it cannot begin anew: {error}"
                ) from error
            tries.restart()  # the continued response may be the reason
            raise EngineFailed(name, f"could not continue a response: {error}") from error
        finally:
            del self._in_flight[id]


@dataclass(frozen=True, slots=True)
class _Streamed:
    """One streamed request to an engine."""

    name: str
    engine: Engine
    tries: _Tries
    accept: Callable[[EngineResponse], None]

    async def generate(self, tokens: NDArray[np.int32], sampling: Sampling, **more: Any) -> Generation:
        """Return the whole response, as ``Engine.generate``; ``tries.grown`` is called with it as it grows."""
        tries, last, begin = self.tries, None, time.monotonic()
        stream = self.engine.stream(tokens, sampling, **more)
        async with aclosing(stream):  # type: ignore[type-var]  # generators, by all adapters
            async for last in stream:
                if last.finish is None and _covered(last) > len(tries.begun.tokens if tries.begun is not None else ()):
                    timings = Timings(
                        queued_s=tries.queued_s, generating_s=tries.generating_s + time.monotonic() - begin
                    )
                    response = EngineResponse(generation=last, engine=self.name, timings=timings)
                    _require(self.accept, response, tries)
                    tries.begun, tries.shown = last, True
                    assert tries.grown is not None, "else it is not streamed"
                    tries.grown(response)
        if last is None or last.finish is None:
            raise EngineGone(self.name, "the stream ended before the response")
        return last


def _covered(generation: Generation) -> int:
    """Return the number of tokens; 0 where the versions that made them are not known yet."""
    count = len(generation.tokens)
    return count if sum(span.num_tokens for span in generation.spans) == count else 0


def _require(accept: Callable[[EngineResponse], None], response: EngineResponse, tries: _Tries) -> None:
    """Raise EngineFailed unless a response is accepted; the next attempt begins anew, or behind the tokens that were
    streamed.
    """
    try:
        accept(response)
    except WireError as error:
        tries.restart()
        raise EngineFailed(response.engine, f"its answer is not a valid sample: {error}") from error


async def _abort(engine: Engine, id: str) -> None:
    with suppress(EngineError):
        await engine.abort(id)


def seeded(sampling: Sampling, index: int) -> Sampling:
    """Return the parameters with a separate seed for each sample of a group, the same in every attempt."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)
