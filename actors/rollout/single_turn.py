"""Single turn: generates one response to one prompt, as a valid sample with reward 0.

Knows the Engine port and the shape of a sample; not where tasks come from or where samples go.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from actors.engines.pool import EnginePool, NoEngine
from actors.engines.port import Engine, Generation
from actors.errors import BadRequest, EngineError, EngineFailed, EngineGone, EngineUnavailable
from actors.rollout.activity import Activity
from bus.errors import WireError
from bus.wire.codec import check_sample
from bus.wire.messages import Partial, Sample, Sampling, Status, Task, Timings

logger = logging.getLogger(__name__)

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}
"""Sample status by an engine's finish reason. A response with any other reason is unfinished."""


CUT_SHORT_S = 5.0
"""Seconds that an engine has to return its unfinished responses after an abort."""
ABORT_EVERY_S = 0.2
"""Seconds between two aborts. An engine ignores an abort that arrives before its request, so it is repeated."""


class GenerationFailed(Exception):
    """A response could not be generated, and no further attempt is made."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"generation: {self.reason}"


class Unfinished(Exception):
    """There is no complete response, for a reason outside the task: no engine was found, or this process is leaving."""

    def __init__(self, reason: str, partial: Partial | None) -> None:
        super().__init__(reason, partial)
        self.reason, self.partial = reason, partial

    def __str__(self) -> str:
        return self.reason


@dataclass(slots=True, kw_only=True)
class _Tries:
    """The attempts at one response so far."""

    began_s: float = field(default_factory=time.monotonic)
    broken: int = 0
    """Number of requests that an engine accepted and did not finish."""
    begun: Generation | None = None
    """The unfinished response so far; None = none."""
    queued_s: float = 0.0
    generating_s: float = 0.0
    """Seconds spent on ``begun``."""
    avoid: str = ""
    """Engine of the last attempt."""
    last: str = ""

    def restart(self) -> None:
        """Discard the unfinished response."""
        self.begun, self.generating_s = None, 0.0


class SingleTurn:
    """Generates samples on any engine of the pool."""

    def __init__(
        self, engines: EnginePool, *, timeout_s: float, retries: int, activity: Activity, cut_short_s: float = CUT_SHORT_S
    ) -> None:
        """``timeout_s`` bounds one response with all its attempts and waits, ``retries`` the requests that engines broke off,
        ``cut_short_s`` the time that an engine has to return the unfinished responses when they are cut short."""
        self._engines, self._timeout_s, self._retries, self._activity = engines, timeout_s, retries, activity
        self._in_flight: dict[str, tuple[Engine, asyncio.Timeout]] = {}
        """Requests in flight by id, each with its engine and time limit."""
        self._cutting_short, self._cut_short_s = False, cut_short_s

    async def sample(self, task: Task, index: int, attempt: str, partial: Partial | None = None) -> Sample:
        """Generate sample ``index`` of a task, continued from ``partial`` if that fits. The sample is checked and its reward is 0.

        A request that its engine broke off is repeated from its last token on, at another engine if there is one. Waits for engines that
        are away, full or not serving. Raises GenerationFailed, Unfinished.
        """
        tries = _Tries()
        if partial is not None and fits(partial, task, index):
            tries.begun = _begun(partial)
            tries.queued_s, tries.generating_s = partial.timings.queued_s, partial.timings.generating_s
        while not self._cutting_short:
            try:
                if (sample := await self._try(task, index, attempt, tries)) is not None:
                    return sample
                continue
            except NoEngine as error:
                raise Unfinished(str(error), _partial(task, index, attempt, tries)) from error
            except BadRequest as error:
                raise GenerationFailed(str(error)) from error
            except (EngineFailed, EngineGone) as error:
                tries.broken += 1
                tries.last = str(error)
                self._activity.counters.requests_aborted += 1
            except EngineUnavailable as error:
                tries.last = str(error)
            logger.info("request broken off task=%d index=%d broken=%d error=%s", task.id, index, tries.broken, tries.last)
            if tries.broken >= self._retries:
                raise GenerationFailed(f"{tries.broken} requests broken off, the last one: {tries.last}")
        raise Unfinished("the actor is draining", _partial(task, index, attempt, tries))

    def waits_for(self) -> str:
        """Return a description of the wait for an engine and its duration; empty when no request waits."""
        return self._engines.waits_for()

    def stop_waiting(self) -> None:
        """End samples as Unfinished from now on, instead of waiting for an engine."""
        self._engines.give_up()

    async def cut_short(self) -> None:
        """Abort the requests in flight. Every ``sample`` now returns a complete response or raises Unfinished within ``cut_short_s``."""
        self._cutting_short = True
        end = asyncio.get_running_loop().time() + self._cut_short_s
        for _, limit in self._in_flight.values():
            limit.reschedule(end)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                while self._in_flight:
                    await asyncio.gather(*(_abort(engine, id) for id, (engine, _) in self._in_flight.items()))
                    await asyncio.sleep(ABORT_EVERY_S)

    async def _try(self, task: Task, index: int, attempt: str, tries: _Tries) -> Sample | None:
        """Make one request. Returns None when it was cut short. Raises EngineFailed also when the engine broke it off."""
        begin = time.monotonic()
        left_s = tries.began_s + self._timeout_s - begin
        if tries.last and left_s <= 0:
            raise GenerationFailed(f"not done within {self._timeout_s:g} s, the last attempt: {tries.last}")
        async with self._engines.acquire(min_version=task.min_version, timeout_s=left_s, avoid=tries.avoid) as (name, engine):
            tries.avoid = name
            asked = time.monotonic()
            tries.queued_s += asked - begin
            answer = await self._ask(name, engine, task, index, attempt, tries)
            if answer is None:
                return None
            generating_s = tries.generating_s + time.monotonic() - asked
            if answer.finish not in STATUS:
                tries.begun, tries.generating_s = answer, generating_s
                if self._cutting_short:
                    return None
                raise EngineFailed(name, f"broke off after {len(answer.tokens)} tokens: finish {answer.finish!r}")
            timings = Timings(queued_s=tries.queued_s, generating_s=generating_s)
            sample = _sample(task, index, attempt, answer, engine=name, timings=timings)
            try:
                check_sample(sample)
            except WireError as error:
                tries.restart()
                raise EngineFailed(name, f"its answer is not a valid sample: {error}") from error
            return sample

    async def _ask(self, name: str, engine: Engine, task: Task, index: int, attempt: str, tries: _Tries) -> Generation | None:
        """Return the engine's answer, complete or broken off; None when it was cut short without one."""
        if self._cutting_short:
            return None
        now = time.monotonic()
        # The time keeps it unique: an attempt that finds its engine unavailable does not count as broken.
        id = f"{task.id}.{index}.{attempt}.{tries.broken}-{now:.6f}"
        try:
            async with asyncio.timeout(None) as limit:  # ``cut_short`` sets the limit
                self._in_flight[id] = (engine, limit)
                with self._activity:
                    return await engine.generate(
                        task.prompt_tokens,
                        _sampling(task.sampling, index),
                        id=id,
                        min_version=task.min_version,
                        timeout_s=max(tries.began_s + self._timeout_s - now, 0.001),
                        begun=tries.begun,
                    )
        except TimeoutError:
            return None
        except (BadRequest, EngineFailed) as error:
            if tries.begun is None:
                raise
            tries.restart()  # the continued response may be the reason
            raise EngineFailed(name, f"could not continue a response: {error}") from error
        finally:
            del self._in_flight[id]


def fits(partial: Partial, task: Task, index: int) -> bool:
    """Return whether this response can be continued as if it had never been interrupted."""
    num_tokens, sampling = len(partial.tokens), _sampling(task.sampling, index)
    return (
        (partial.run, partial.task, partial.index, partial.seed) == (task.run, task.id, index, sampling.seed)
        and partial.position == len(task.prompt_tokens) + num_tokens
        and 0 < num_tokens < sampling.max_new_tokens
    )


def _begun(partial: Partial) -> Generation:
    return Generation(
        id="",
        tokens=partial.tokens,
        log_probs=partial.rollout_log_probs,
        spans=partial.spans,
        finish=None,
        text=partial.response,
        duration_s=partial.timings.generating_s,
    )


def _partial(task: Task, index: int, attempt: str, tries: _Tries) -> Partial | None:
    """Return the unfinished response as a partial; None when it has no tokens."""
    begun = tries.begun
    if begun is None or not len(begun.tokens):
        return None
    return Partial(
        run=task.run,
        task=task.id,
        index=index,
        attempt=attempt,
        tokens=begun.tokens,
        rollout_log_probs=begun.log_probs,
        spans=begun.spans,
        response=begun.text,
        seed=_sampling(task.sampling, index).seed,
        position=len(task.prompt_tokens) + len(begun.tokens),
        timings=Timings(queued_s=tries.queued_s, generating_s=tries.generating_s),
    )


async def _abort(engine: Engine, id: str) -> None:
    with suppress(EngineError):
        await engine.abort(id)


def failed(sample: Sample, reason: str) -> Sample:
    """Return the sample as FAILED, with the reason in its metadata; its tokens stay."""
    return replace(sample, status=Status.FAILED, reward=0.0, metadata={**sample.metadata, "error": reason})


def failed_sample(task: Task, index: int, attempt: str, reason: str) -> Sample:
    """Return the FAILED sample of a response that does not exist."""
    nothing = Generation(
        id="",
        tokens=np.zeros(0, np.int32),
        log_probs=np.zeros(0, np.float32),
        spans=(),
        finish="abort",
        prompt_tokens=len(task.prompt_tokens),
    )
    return failed(_sample(task, index, attempt, nothing, engine="", timings=Timings()), reason)


def _sample(task: Task, index: int, attempt: str, answer: Generation, *, engine: str, timings: Timings) -> Sample:
    return Sample(
        run=task.run,
        task=task.id,
        index=index,
        group_size=task.group_size,
        attempt=attempt,
        prompt=task.prompt,
        tokens=np.concatenate([task.prompt_tokens, answer.tokens]).astype(np.int32, copy=False),
        response_length=len(answer.tokens),
        response=answer.text,
        rollout_log_probs=answer.log_probs,
        loss_mask=np.ones(len(answer.tokens), np.uint8),
        spans=answer.spans,
        reward=0.0,
        status=STATUS.get(answer.finish or "", Status.ABORTED),
        sampling=task.sampling,
        kind=task.kind,
        label=task.label,
        metadata=dict(task.metadata),
        engine=engine,
        timings=timings,
        finish_reason=answer.finish or "",
    )


def _sampling(sampling: Sampling, index: int) -> Sampling:
    """Return the parameters with a separate seed for each sample of a group, the same in every attempt."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)
