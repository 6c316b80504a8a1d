"""One response from a pool of engines, over attempts that wait, repeat and continue. Knows no task and no sample."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.activity import Activity
from tidemill.actors.engines.port import FINISHED, Engine, GenerateOptions, Generation
from tidemill.actors.engines.server_pool import EnginePool, NoServer
from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, EngineGone, EngineUnavailable
from tidemill.bus.errors import DetailedError, WireError
from tidemill.bus.wire.messages import Sampling, Timings

logger = logging.getLogger(__name__)

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


class GenerationFailed(DetailedError):
    """A response could not be generated, and no further attempt is made."""

    reason: str
    outside: bool = False
    """True if the cause lies outside of the row, so that responses to other rows fail, too."""
    template = "generation: {reason}"


class Interrupted(DetailedError):
    """There is no complete response, for a reason outside the request: no engine was found, or this process drains."""

    reason: str
    begun: Generation | None
    """The unfinished response so far, at least one token; None = none."""
    timings: Timings
    """Seconds spent on it."""
    template = "{reason}"


def accept_all(response: EngineResponse) -> None:
    """Accept every response."""


@dataclass(slots=True, kw_only=True)
class _Attempts:
    """One response with its attempts so far."""

    prompt: Prompt
    accept: Callable[[EngineResponse], None]
    waiting: Callable[[], AbstractContextManager[object]]

    begun: Generation | None
    """The unfinished response so far; None = none."""
    queued_s: float
    generating_s: float
    """Seconds spent on ``begun``."""
    grown: Callable[[EngineResponse], None] | None
    """Called with the response so far; None = it is not streamed."""
    avoid: str = ""
    """Engine of the last attempt."""
    began_s: float = field(default_factory=time.monotonic)
    broken: int = 0
    """Number of requests that an engine accepted and did not finish."""
    last: str = ""
    """Error of the last attempt; empty = none failed."""
    shown: bool = False
    """True once ``grown`` has been called: the response can be continued, but not begin anew."""

    def restart(self) -> None:
        """Discard the unfinished response. A streamed one is continued from its last accepted token instead."""
        if not self.shown:
            self.begun, self.generating_s = None, 0.0

    def interrupted(self, reason: str) -> Interrupted:
        begun = self.begun if self.begun is not None and len(self.begun.tokens) else None
        return Interrupted(reason, begun, Timings(queued_s=self.queued_s, generating_s=self.generating_s))

    def require(self, response: EngineResponse) -> None:
        """Raise EngineFailed unless a response is accepted; the next attempt begins anew, or behind sent tokens."""
        try:
            self.accept(response)
        except WireError as error:
            self.restart()
            raise EngineFailed(response.engine, f"its answer is not a valid sample: {error}") from error


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
        accept: Callable[[EngineResponse], None] = accept_all,
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
        attempts = _Attempts(
            prompt=prompt,
            accept=accept,
            waiting=waiting,
            begun=prompt.begun,
            queued_s=prompt.timings.queued_s,
            generating_s=prompt.timings.generating_s,
            grown=grown,
        )
        while not self._cutting_short:
            try:
                if (response := await self._attempt(attempts)) is not None:
                    return response
                continue
            except NoServer as error:
                raise attempts.interrupted(str(error)) from error
            except (EngineFailed, EngineGone) as error:
                attempts.broken += 1
                attempts.last = str(error)
                self._activity.counters.requests_aborted += 1
            except EngineUnavailable as error:
                attempts.last = str(error)
            logger.info("request broken off request=%s broken=%d error=%s", prompt.name, attempts.broken, attempts.last)
            if attempts.broken >= self._retries:
                reason = f"{attempts.broken} requests broken off, the last one: {attempts.last}"
                raise GenerationFailed(reason, outside=True)
        raise attempts.interrupted("the actor is draining")

    async def generate_group(
        self, prompt: Prompt, names: Sequence[str], accept: Callable[[int, EngineResponse], None]
    ) -> list[EngineResponse | None]:
        """Make one attempt at the responses of a group in one request; names, as ``Prompt.name``, are all different.

        The prompt has the seed of the first response. Returns the responses by index: complete ones that ``accept``
        has taken, unfinished ones, and None for what is to be generated anew. Raises Interrupted without an engine.
        """
        begin = time.monotonic()
        responses: list[EngineResponse | None] = [None] * len(names)
        try:
            entry = await self._engines.wait(prompt.min_version, self._timeout_s, "", "")
        except NoServer as error:
            raise Interrupted(str(error), None, Timings(queued_s=time.monotonic() - begin)) from error
        try:
            with self._engines.using(entry, len(names)) as (name, engine):
                sent_s = time.monotonic()
                with self._noting_loss(name):
                    answers = await self._ask_group(engine, prompt, names)
                timings = Timings(queued_s=sent_s - begin, generating_s=time.monotonic() - sent_s)
                reason = ""
                for index, answer in enumerate(answers):
                    response = EngineResponse(generation=answer, engine=name, timings=timings)
                    try:
                        if answer.finish in FINISHED:
                            accept(index, response)
                        elif not self._cutting_short:
                            reason = f"broke off after {len(answer.tokens)} tokens: finish {answer.finish!r}"
                        responses[index] = response
                    except WireError as error:
                        reason = f"its answer is not a valid sample: {error}"
                if reason:
                    raise EngineFailed(name, reason)
        except (BadRequest, EngineFailed, EngineUnavailable) as error:
            complete = sum(response is not None and response.generation.finish in FINISHED for response in responses)
            aborted = (len(names) - complete) * isinstance(error, EngineFailed | EngineGone)
            self._activity.counters.requests_aborted += aborted
            logger.info("group broken off request=%s complete=%d error=%s", prompt.name, complete, error)
        return responses

    def waits_for(self) -> str:
        """Return a description of the wait for an engine and its duration; empty when no request waits."""
        return self._engines.waits_for()

    def stop_waiting(self) -> None:
        """End requests as Interrupted from now on, instead of waiting for an engine."""
        self._engines.give_up()

    async def cut_short(self) -> None:
        """Abort the requests in flight: within ``cut_short_s`` every ``generate`` returns or raises Interrupted."""
        self._cutting_short = True
        end = asyncio.get_running_loop().time() + self._cut_short_s
        for _, limit in self._in_flight.values():
            limit.reschedule(end)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                while self._in_flight:
                    await asyncio.gather(*(_abort(engine, name) for name, (engine, _) in self._in_flight.items()))
                    await asyncio.sleep(ABORT_EVERY_S)

    async def _attempt(self, attempts: _Attempts) -> EngineResponse | None:
        """Make one request; None = it was cut short. Raises EngineFailed also when the engine broke it off."""
        begin, prompt = time.monotonic(), attempts.prompt
        left_s = attempts.began_s + self._timeout_s - begin
        if attempts.last and left_s <= 0:
            reason = f"not done within {self._timeout_s:g} s, the last attempt: {attempts.last}"
            raise GenerationFailed(reason, outside=True)
        prefer = "" if attempts.last else prompt.prefer
        with attempts.waiting():
            entry = await self._engines.wait(prompt.min_version, left_s, attempts.avoid, prefer)
        with self._engines.using(entry) as (name, engine):
            attempts.avoid = name
            sent_s = time.monotonic()
            attempts.queued_s += sent_s - begin
            spent_s = attempts.generating_s
            answer = await self._request(name, engine, attempts)
            if answer is None:
                return None
            generating_s = spent_s + time.monotonic() - sent_s
            timings = Timings(queued_s=attempts.queued_s, generating_s=generating_s)
            response = EngineResponse(generation=answer, engine=name, timings=timings)
            if answer.finish in FINISHED or attempts.shown:  # tokens behind streamed ones cannot be discarded later
                attempts.require(response)
            if answer.finish in FINISHED:
                return response
            attempts.begun, attempts.generating_s = answer, generating_s
            if self._cutting_short:
                return None
            raise EngineFailed(name, f"broke off after {len(answer.tokens)} tokens: finish {answer.finish!r}")

    async def _request(self, name: str, engine: Engine, attempts: _Attempts) -> Generation | None:
        """Return the engine's answer, and note whether its process has broken off a request."""
        sent_s, spent_s, begun = time.monotonic(), attempts.generating_s, attempts.begun
        try:
            with self._noting_loss(name, lambda: attempts.begun is not begun):
                return await self._ask(name, engine, attempts)
        finally:
            if attempts.begun is not None and attempts.begun is not begun:  # a stream that broke off is continued
                attempts.generating_s = spent_s + time.monotonic() - sent_s

    @contextmanager
    def _noting_loss(self, name: str, has_grown: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Note whether the process of an engine breaks off the request of the block.

        ``has_grown``: returns whether it has returned something before it broke off.
        """
        process = self._engines.process_of(name)
        away = bool(process) and self._lost.get(name) == process
        try:
            yield
            self._lost.pop(name, None)
        except EngineGone as error:
            self._lost[name] = process
            # A relay takes connections also while its engine is away: a process that has broken off a request
            # counts once.
            if away and not has_grown():
                raise EngineUnavailable(name, error.reason) from error
            raise

    async def _ask(self, name: str, engine: Engine, attempts: _Attempts) -> Generation | None:
        """Return the engine's answer, complete or broken off; None when it was cut short without one."""
        if self._cutting_short:
            return None
        now, prompt, begun = time.monotonic(), attempts.prompt, attempts.begun
        # Random: any client of the engine may abort a request whose id it knows. The next attempt at the same engine
        # needs another id.
        request_id = f"{prompt.name}.{attempts.broken}-{secrets.token_hex(8)}"
        generate = engine.generate if attempts.grown is None else partial(_generate_streamed, name, engine, attempts)
        try:
            async with asyncio.timeout(None) as limit:  # ``cut_short`` sets the limit
                self._in_flight[request_id] = (engine, limit)
                with self._activity:
                    return await generate(
                        prompt.tokens,
                        prompt.sampling,
                        request_id=request_id,
                        min_version=prompt.min_version,
                        timeout_s=max(attempts.began_s + self._timeout_s - now, 0.001),
                        begun=begun,
                    )
        except TimeoutError:
            return None
        except (BadRequest, EngineFailed) as error:
            if begun is None:
                raise
            if attempts.shown and isinstance(error, BadRequest):
                reason = f"a part of the response has been streamed, and it cannot begin anew: {error}"
                raise GenerationFailed(reason) from error
            attempts.restart()  # the continued response may be the reason
            raise EngineFailed(name, f"could not continue a response: {error}") from error
        finally:
            del self._in_flight[request_id]

    async def _ask_group(self, engine: Engine, prompt: Prompt, names: Sequence[str]) -> Sequence[Generation]:
        """Return the engine's answers, complete or broken off; none when they were cut short without any."""
        if self._cutting_short:
            return ()
        nonce = secrets.token_hex(8)  # as for one request
        request_ids = [f"{name}.0-{nonce}" for name in names]
        try:
            async with asyncio.timeout(None) as limit:  # ``cut_short`` sets the limit
                self._in_flight.update(dict.fromkeys(request_ids, (engine, limit)))
                with self._activity:
                    bounds: GenerateOptions = {"min_version": prompt.min_version, "timeout_s": self._timeout_s}
                    return await engine.generate_group(prompt.tokens, prompt.sampling, request_ids, **bounds)
        except TimeoutError:
            return ()
        finally:
            for request_id in request_ids:
                del self._in_flight[request_id]


async def _generate_streamed(
    name: str, engine: Engine, attempts: _Attempts, tokens: NDArray[np.int32], sampling: Sampling, **options: Any
) -> Generation:
    """Return the whole response, as ``Engine.generate``; ``attempts.grown`` is called with it as it grows."""
    last, begin = None, time.monotonic()
    stream = engine.stream(tokens, sampling, **options)
    async with aclosing(stream):  # type: ignore[type-var]  # generators, by all adapters
        async for last in stream:
            begun_tokens = 0 if attempts.begun is None else len(attempts.begun.tokens)
            if last.finish is None and _covered(last) > begun_tokens:
                generating_s = attempts.generating_s + time.monotonic() - begin
                timings = Timings(queued_s=attempts.queued_s, generating_s=generating_s)
                response = EngineResponse(generation=last, engine=name, timings=timings)
                attempts.require(response)
                attempts.begun, attempts.shown = last, True
                assert attempts.grown is not None, "else it is not streamed"
                attempts.grown(response)
    if last is None or last.finish is None:
        raise EngineGone(name, "the stream ended before the response")
    return last


def _covered(generation: Generation) -> int:
    """Return the number of tokens; 0 where the versions that made them are not known yet."""
    count = len(generation.tokens)
    return count if sum(span.num_tokens for span in generation.spans) == count else 0


async def _abort(engine: Engine, request_id: str) -> None:
    with suppress(EngineError):
        await engine.abort(request_id)


def seeded(sampling: Sampling, index: int) -> Sampling:
    """Return the parameters with a separate seed for each sample of a group, the same in every attempt."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)
