"""A task from the demand of the DataSource: prompt, seed and position."""

from dataclasses import replace

from bus.wire.messages import Task
from learner.data.prompts import PromptFile, sampler_seed
from learner.data.rules import DataRules
from learner.data.task_admission import TaskDemand
from learner.feed.feeder_rules import FeederRules


def task_of(wanted: TaskDemand, prompts: PromptFile, rules: FeederRules, data_rules: DataRules, *, epoch: int) -> Task:
    """Return the task, without an id. Raises PromptError."""
    find = prompts.after if wanted.reissue_of is None else prompts.at
    drawn = find(wanted.prompt_epoch, wanted.offset)
    seed = sampler_seed(data_rules.seed, drawn.epoch, drawn.offset, wanted.reissues)
    return Task(
        run=rules.run,
        epoch=epoch,
        prompt=drawn.row.prompt,
        prompt_tokens=drawn.tokens,
        label=drawn.row.label,
        metadata=drawn.row.metadata,
        group_size=rules.group_size,
        sampling=replace(rules.sampling, seed=seed),
        prompt_epoch=drawn.epoch,
        offset=drawn.offset,
        reissue_of=wanted.reissue_of,
        reissues=wanted.reissues,
        min_version=wanted.min_version,
        issue_step=wanted.issue_step,
    )
