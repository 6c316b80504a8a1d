"""Single turn: one response of one engine to one prompt, as a sample that holds all promises but its reward.

Knows the Engine port and the shape of a sample; not where tasks come from or where samples go.
"""

import logging
import time
from dataclasses import dataclass, field, replace

import numpy as np

from actors.activity import Activity
from actors.engines import Engines
from actors.errors import BadRequest, EngineFailed, EngineGone, EngineUnavailable
from actors.port import Generation
from bus.codec import check_sample
from bus.errors import WireError
from bus.messages import Sample, Sampling, Status, Task, Timings

logger = logging.getLogger(__name__)

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}
"""Of what an engine calls its finish; everything else is no finished response."""


class GenerationFailed(Exception):
    """A response could not be generated, and trying on is no use."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"generation: {self.reason}"


@dataclass(slots=True, kw_only=True)
class _Tries:
    """What has been tried for one response."""

    began_s: float = field(default_factory=time.monotonic)
    broken: int = 0
    """Requests that an engine took and did not finish."""
    queued_s: float = 0.0
    avoid: str = ""
    """Engine that broke the last one."""
    last: str = ""


class SingleTurn:
    """Generates samples on whatever engine there is."""

    def __init__(self, engines: Engines, *, timeout_s: float, retries: int, activity: Activity) -> None:
        """``timeout_s`` bounds one response with all its tries and waits; ``retries`` the requests broken by engines."""
        self._engines, self._timeout_s, self._retries, self._activity = engines, timeout_s, retries, activity

    async def sample(self, task: Task, index: int, attempt: str) -> Sample:
        """Generate sample ``index`` of a task; checked, its reward 0.

        A request that its engine broke off is made again, elsewhere if there is an elsewhere; engines that are away, full or not
        serving are waited for. Raises GenerationFailed; NoEngine when none was found in time, which is not the task's fault.
        """
        tries = _Tries()
        while True:
            try:
                return await self._try(task, index, attempt, tries)
            except BadRequest as error:
                raise GenerationFailed(str(error)) from error
            except (EngineFailed, EngineGone) as error:
                tries.broken += 1
                tries.last = str(error)
                self._activity.counters.requests_aborted += 1
            except EngineUnavailable as error:
                tries.last = str(error)
            logger.info("request broken task=%d index=%d broken=%d error=%s", task.id, index, tries.broken, tries.last)
            if tries.broken >= self._retries:
                raise GenerationFailed(f"{tries.broken} requests broken off, the last one: {tries.last}")

    def waits_for(self) -> str:
        """Say what is waited for; empty when nothing is."""
        return self._engines.waits_for()

    def give_up_waiting(self) -> None:
        """Who finds no engine at once gets NoEngine, from now on."""
        self._engines.give_up()

    async def _try(self, task: Task, index: int, attempt: str, tries: _Tries) -> Sample:
        """Make one request. Raises EngineFailed too when the engine broke it off."""
        begin = time.monotonic()
        left_s = tries.began_s + self._timeout_s - begin
        if tries.last and left_s <= 0:
            raise GenerationFailed(f"not done within {self._timeout_s:g} s, the last try: {tries.last}")
        async with self._engines.one(min_version=task.min_version, timeout_s=left_s, avoid=tries.avoid) as (name, engine):
            tries.avoid = name
            asked = time.monotonic()
            tries.queued_s += asked - begin
            with self._activity:
                answer = await engine.generate(
                    task.prompt_tokens,
                    _sampling(task.sampling, index),
                    id=f"{task.id}.{index}.{attempt}.{tries.broken}-{asked:.6f}",
                    min_version=task.min_version,
                    timeout_s=max(tries.began_s + self._timeout_s - asked, 0.001),
                )
            if answer.finish not in STATUS:
                raise EngineFailed(name, f"broke off after {len(answer.tokens)} tokens: finish {answer.finish!r}")
            timings = Timings(queued_s=tries.queued_s, generating_s=time.monotonic() - asked)
            sample = _sample(task, index, attempt, answer, engine=name, timings=timings)
            try:
                check_sample(sample)
            except WireError as error:
                raise EngineFailed(name, f"its answer makes no valid sample: {error}") from error
            return sample


def failed(sample: Sample, reason: str) -> Sample:
    """Give the sample as FAILED, with the reason; what it has stays."""
    return replace(sample, status=Status.FAILED, reward=0.0, metadata={**sample.metadata, "error": reason})


def failed_sample(task: Task, index: int, attempt: str, reason: str) -> Sample:
    """Give the FAILED sample of a response that does not exist."""
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
    """Give each sample of a group a seed of its own; the same one every time."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)
