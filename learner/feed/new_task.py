"""A task from the demand of the DataSource: prompt, seed and position."""

import asyncio
from dataclasses import replace

from tidemill.bus.wire.messages import Task
from tidemill.learner.buffer.admission import TaskDemand
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.prompts.curriculum import Curriculum
from tidemill.learner.prompts.prompt_file import Drawn, PromptFile, sampler_seed


async def prompt_for(
    demand: TaskDemand, prompts: PromptFile, curriculum: Curriculum, *, num_epochs: int
) -> Drawn | None:
    """Return the prompt of a task; None for a new prompt when all passes of the run are issued. Raises PromptError."""
    # In a thread: a row may have megabytes, which are tokenized for seconds, and the loops of the feeder share this
    # one.
    if demand.reissue_of is not None:
        return await asyncio.to_thread(prompts.at, demand.prompt_epoch, demand.offset)
    return await asyncio.to_thread(
        next_prompt, prompts, demand.prompt_epoch, demand.offset, curriculum, num_epochs=num_epochs
    )


def task_of(demand: TaskDemand, drawn: Drawn, settings: FeederSettings, *, seed: int, epoch: int) -> Task:
    """Return the task of a prompt, without an id. ``seed``: of the order of prompts."""
    group_seed = sampler_seed(seed, drawn.epoch, drawn.offset, demand.reissues)
    return Task(
        run=settings.places.run,
        epoch=epoch,
        prompt=drawn.row.prompt,
        prompt_tokens=drawn.tokens,
        label=drawn.row.label,
        metadata=drawn.row.metadata,
        group_size=len(drawn.recorded) or settings.learner.group_size,
        sampling=replace(drawn.row.sampling.of(settings.sampling), seed=group_seed),
        prompt_epoch=drawn.epoch,
        offset=drawn.offset,
        reissue_of=demand.reissue_of,
        reissues=demand.reissues,
        min_version=demand.min_version,
        issue_step=demand.issue_step,
        rollout=drawn.row.rollout,
        budget=settings.budgets.get(drawn.row.rollout),
        chat_template_args=dict(drawn.chat_template_args) or None,
        row_digest=drawn.digest,
    )


def next_prompt(
    prompts: PromptFile, epoch: int, offset: int, curriculum: Curriculum, *, num_epochs: int = 0
) -> Drawn | None:
    """Return the first prompt at or after a position that can be used and is not left out; None if its pass is not of
    the run.

    Raises PromptError when no row can be used. It ends, because no prompt is left out for ever.
    """
    while True:
        if offset >= len(prompts):
            epoch, offset = epoch + 1, 0
        if 0 < num_epochs <= epoch:
            return None
        if curriculum.skips(int(prompts.order(epoch)[offset]), epoch):  # before it is tokenized
            offset += 1
            continue
        drawn = prompts.after(epoch, offset)
        if (drawn.epoch, drawn.offset) == (epoch, offset):
            return drawn
        epoch, offset = drawn.epoch, drawn.offset  # those before cannot be used
