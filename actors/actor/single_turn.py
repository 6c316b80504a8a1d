"""Single turn: generates one response to one prompt, as a valid sample with reward 0.

Knows responses and the shape of a sample; not where tasks come from or where samples go.
"""

from dataclasses import replace

import numpy as np

from tidemill.actors.engines.port import Generation
from tidemill.actors.engines.responses import EngineResponse, GenerationFailed, Interrupted, Prompt, Responses, seeded
from tidemill.actors.episodes.port import Made, Unfinished
from tidemill.actors.errors import BadRequest
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Kind, Partial, Sample, Status, Task, Timings

MAX_REASON = 4000
"""Characters of a reason that a sample keeps."""
STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}
"""Sample status by an engine's finish reason. A response with any other reason is unfinished."""


class SingleTurn:
    """The rollout of tasks that name none."""

    drain_s: float | None = None

    def __init__(self, responses: Responses, *, join: bool = False) -> None:
        """``join``: ask for the responses of a group in one request."""
        self._responses, self._join = responses, join

    async def group(self, task: Task, attempt: str) -> list[Made | Partial | None]:
        """Return the samples of a group as far as one request gives them. Raises Unfinished."""
        if not self._join or task.group_size < 2:
            return []
        samples: list[Sample | None] = [None] * task.group_size

        def accept(index: int, response: EngineResponse) -> None:
            samples[index] = _accepted(task, index, attempt, response)

        prompt = Prompt(
            name=f"{task.id}", tokens=task.prompt_tokens, sampling=task.sampling, min_version=task.min_version
        )
        names = [f"{task.id}.{index}.{attempt}" for index in range(task.group_size)]
        try:
            responses = await self._responses.generate_group(prompt, names, accept)
        except Interrupted as error:
            raise Unfinished(error.reason) from error
        made: list[Made | Partial | None] = []
        for index, (sample, response) in enumerate(zip(samples, responses, strict=True)):
            if sample is not None:
                made.append(Made(sample=sample))
            elif response is not None and len(response.generation.tokens):
                made.append(_partial(task, index, attempt, response.generation, response.timings))
            else:
                made.append(None)
        return made

    async def sample(
        self, task: Task, index: int, attempt: str, partial: Partial | None = None, *, first: bool = True
    ) -> Made:
        """Generate sample ``index`` of a task, continued from ``partial`` if that fits.

        Raises GenerationFailed, Unfinished.
        """
        prompt = Prompt(
            name=f"{task.id}.{index}.{attempt}",
            tokens=task.prompt_tokens,
            sampling=seeded(task.sampling, index),
            min_version=task.min_version,
        )
        continued = partial is not None and fits(partial, task, index)
        if partial is not None and continued:
            timings = Timings(queued_s=partial.timings.queued_s, generating_s=partial.timings.generating_s)
            prompt = replace(prompt, begun=_begun(partial), timings=timings)
        accepted: Sample | None = None

        def accept(response: EngineResponse) -> None:
            nonlocal accepted
            accepted = _accepted(task, index, attempt, response)

        try:
            await self._responses.generate(prompt, accept)
        except BadRequest as error:
            raise GenerationFailed(str(error)) from error
        except Interrupted as error:
            begun = error.begun
            unfinished = None if begun is None else _partial(task, index, attempt, begun, error.timings)
            raise Unfinished(error.reason, unfinished) from error
        assert accepted is not None, "a response that was not accepted is not returned"
        return Made(sample=accepted, continued=continued and partial is not None and bool(partial.actor))

    def interrupt(self) -> None:
        """Do nothing: a single turn ends with its request."""


def fits(partial: Partial, task: Task, index: int) -> bool:
    """Return whether this response can be continued as if it had never been interrupted."""
    num_tokens, sampling = len(partial.tokens), seeded(task.sampling, index)
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


def _partial(task: Task, index: int, attempt: str, begun: Generation, timings: Timings) -> Partial:
    return Partial(
        run=task.run,
        task=task.id,
        index=index,
        attempt=attempt,
        tokens=begun.tokens,
        rollout_log_probs=begun.log_probs,
        spans=begun.spans,
        response=begun.text,
        seed=seeded(task.sampling, index).seed,
        position=len(task.prompt_tokens) + len(begun.tokens),
        timings=timings,
    )


def failed(sample: Sample, reason: str) -> Sample:
    """Return the sample as FAILED, with the reason in its metadata; its tokens stay."""
    written = reason[:MAX_REASON].encode(errors="backslashreplace").decode()  # it may be the text of any error
    return replace(sample, status=Status.FAILED, reward=0.0, metadata={**sample.metadata, "error": written})


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


def _accepted(task: Task, index: int, attempt: str, response: EngineResponse) -> Sample:
    """Return the sample of a complete response. Raises WireError for one that is not valid."""
    sample = _sample(task, index, attempt, response.generation, engine=response.engine, timings=response.timings)
    check_sample(sample)
    return sample


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
        routed_experts=answer.routed_experts if task.kind is Kind.TRAIN else None,  # nothing replays an evaluation
    )
