"""Recorded responses as samples: answers the tasks of rows that have them, in place of an actor and an engine.

    TASKS (rollouts with ``use: dataset``) --lease--> the row's responses --publish--> SAMPLES --> ack

Consumes those tasks alone. Produces their samples, which the feeder then reads like any others, so that plans,
checkpoints and the accounting treat them alike. Waits for a task (unblocked by the feeder's own issue) and the bus.
Keeps no state: a task that is leased when this process dies is delivered again, and samples made twice count once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from functools import partial

import numpy as np

from tidemill.bus.errors import BusError, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.tasks import Lease
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Kind, Sample, Span, Status, Task
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.prompts.responses import RecordedSequence

log = logging.getLogger(__name__)

SENDER = "dataset"
"""Name of the actor in these samples."""
AT_ONCE = 8
"""Tasks of one rollout that are answered at once."""
LEASE_WAIT_S = 1.0
"""Longest wait of one request for a task, in seconds."""


class RecordedResponses:
    """Answers tasks with the responses that their rows have."""

    def __init__(self, bus: Bus, prompts: PromptFile, rollouts: Collection[str]) -> None:
        self._bus, self._prompts, self._rollouts = bus, prompts, rollouts

    async def run(self, version: Callable[[], int]) -> None:
        """Background loop. ``version``: returns the newest version. Raises PromptError for an unusable row."""
        async with asyncio.TaskGroup() as group:
            for name in self._rollouts:
                for _ in range(AT_ONCE):
                    group.create_task(self._answer_all(name, version), name=f"recorded {name}")

    async def _answer_all(self, rollout: str, version: Callable[[], int]) -> None:
        while True:
            begin = time.monotonic()
            try:
                lease = await self._bus.tasks.lease(LEASE_WAIT_S, kind=Kind.TRAIN, rollout=rollout)
                if lease is not None:
                    await self._answer(lease, version)
            except WireError as error:
                want = f"responses with {error.field} of {error.want}"
                raise PromptError(f"rollout {rollout}", want, error.got) from error
            except BusError as error:  # the lease runs out, and the task is delivered again
                log.warning("task not answered rollout=%s error=%s", rollout, error)
                lease = None
            if lease is None and time.monotonic() - begin < LEASE_WAIT_S / 2:  # no bus: do not spin
                await asyncio.sleep(LEASE_WAIT_S / 2)

    async def _answer(self, lease: Lease, version: Callable[[], int]) -> None:
        """Store the samples of a task, then ack it. Naks it when cancelled."""
        try:
            async with lease.kept():
                # In a thread: a conversation is rendered once for each of its turns.
                make = partial(samples_of, lease.task, self._prompts, lease.attempt, version=version())
                for sample in await asyncio.to_thread(make):
                    await self._bus.samples.publish(sample)
                await lease.ack()
        except asyncio.CancelledError:
            await lease.nak()
            raise


def samples_of(task: Task, prompts: PromptFile, attempt: str, *, version: int) -> list[Sample]:
    """Return the samples of a task: its row's recorded responses, by index. Raises PromptError for a changed row."""
    drawn = prompts.at(task.prompt_epoch, task.offset)
    where, responses = drawn.row.where, drawn.recorded
    if len(responses) != task.group_size:
        raise PromptError(where, f"{task.group_size} responses, as when its task was issued", len(responses))
    return [_sample(task, index, response, attempt, version, where) for index, response in enumerate(responses)]


def _sample(task: Task, index: int, recorded: RecordedSequence, attempt: str, version: int, where: str) -> Sample:
    length = len(recorded.loss_mask)
    sample = Sample(
        run=task.run,
        task=task.id,
        index=index,
        group_size=task.group_size,
        attempt=attempt,
        prompt=task.prompt,
        tokens=recorded.tokens,
        response_length=length,
        response=recorded.text,
        rollout_log_probs=np.zeros(length, np.float32) if recorded.log_probs is None else recorded.log_probs,
        loss_mask=recorded.loss_mask,
        # No version has made these tokens. As tokens of the newest one they are fresh: the gate is not for them.
        spans=(Span(version=max(version, task.min_version), num_tokens=length),),
        reward=recorded.reward,
        status=Status.TRUNCATED if recorded.truncated else Status.COMPLETED,
        sampling=task.sampling,
        kind=task.kind,
        label=task.label,
        metadata=dict(task.metadata),
        actor=SENDER,
        finish_reason="length" if recorded.truncated else "stop",
        created_s=time.time(),
        rollout=task.rollout,
        demonstration=recorded.log_probs is None,
    )
    try:
        check_sample(sample)
    except WireError as error:
        raise PromptError(where, f"a response with {error.field} of {error.want}", error.got) from None
    return sample
