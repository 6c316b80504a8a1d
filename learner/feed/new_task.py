"""A task from the demand of the DataSource: prompt, seed and position."""

from dataclasses import replace

from tidemill.bus.wire.messages import Task
from tidemill.learner.data.curriculum import Curriculum
from tidemill.learner.data.prompts import Drawn, PromptFile, sampler_seed
from tidemill.learner.data.rules import DataRules
from tidemill.learner.data.staleness_admission import TaskDemand
from tidemill.learner.feed.feeder_rules import FeederRules


def task_of(
    wanted: TaskDemand, prompts: PromptFile, rules: FeederRules, data_rules: DataRules, curriculum: Curriculum, *, epoch: int
) -> Task | None:
    """Return the task, without an id; None for a new prompt when all passes of the run are issued. Raises PromptError."""
    if wanted.reissue_of is None:
        drawn = next_prompt(prompts, wanted.prompt_epoch, wanted.offset, curriculum, num_epochs=data_rules.num_epochs)
    else:
        drawn = prompts.at(wanted.prompt_epoch, wanted.offset)
    if drawn is None:
        return None
    seed = sampler_seed(data_rules.seed, drawn.epoch, drawn.offset, wanted.reissues)
    return Task(
        run=rules.run,
        epoch=epoch,
        prompt=drawn.row.prompt,
        prompt_tokens=drawn.tokens,
        label=drawn.row.label,
        metadata=drawn.row.metadata,
        group_size=len(drawn.recorded) or rules.group_size,
        sampling=replace(drawn.row.sampling.of(rules.sampling), seed=seed),
        prompt_epoch=drawn.epoch,
        offset=drawn.offset,
        reissue_of=wanted.reissue_of,
        reissues=wanted.reissues,
        min_version=wanted.min_version,
        issue_step=wanted.issue_step,
        rollout=drawn.row.rollout,
        budget=rules.budgets.get(drawn.row.rollout),
        chat_template_args=dict(drawn.chat_template_args) or None,
        row_digest=drawn.digest,
    )


def next_prompt(prompts: PromptFile, epoch: int, offset: int, curriculum: Curriculum, *, num_epochs: int = 0) -> Drawn | None:
    """Return the first prompt at or after a position that can be used and is not left out; None if its pass is not of the run.

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
