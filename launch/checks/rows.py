"""Checks of rows against settings of the run: their rollouts, their limits of sampling, and the rewards that their metadata asks for."""

from collections.abc import Iterable, Mapping

from actors.rollout_settings import OF_VERIFIERS, parse_rollouts
from bus.config import SINGLE_TURN
from launch.settings.run_config import RunConfig
from learner.data.prompts import Row
from learner.errors import PromptError
from rewards.part_settings import read_parts


def refuse_unfit(rows: Iterable[Row], config: RunConfig, *, max_new_tokens: int, vocab_size: int | None) -> None:
    """Raise PromptError for the first row that the run cannot sample or score.

    ``max_new_tokens``: the longest response of the run or evaluation set. ``vocab_size``: None = not known.
    """
    parts = read_parts(config.actor.reward_parts)
    tasksets = {name: one.taskset for name, one in parse_rollouts(config.rollouts).items() if one.taskset}
    for row in rows:
        if row.rollout and row.rollout not in config.rollouts:
            wanted = ", ".join(sorted(config.rollouts)) or "rollouts, which has none"
            raise PromptError(row.where, f"a rollout of {wanted}, or {SINGLE_TURN}", repr(row.rollout))
        if row.rollout in tasksets:
            _refuse_other_task(row, tasksets[row.rollout])
        own = row.sampling
        if (own.max_new_tokens or 0) > max_new_tokens:
            raise PromptError(row.where, f"max_new_tokens <= {max_new_tokens}, which is set for all rows", own.max_new_tokens)
        if vocab_size is not None and (outside := [token for token in own.stop_token_ids or () if token >= vocab_size]):
            raise PromptError(row.where, f"stop_token_ids below {vocab_size}, the size of the model's vocabulary", outside[0])
        if parts and not any(part.applies(row.metadata) for part in parts):
            wanted = "; ".join(f"{part.name}: {dict(part.when)}" for part in parts)
            raise PromptError(row.where, f"metadata for one of actor.reward_parts ({wanted})"[:500], f"{row.metadata!r:.200}")


def _refuse_other_task(row: Row, taskset: str) -> None:
    """Raise PromptError for a row that has no task of its rollout's taskset."""
    task = row.metadata.get("verifiers")
    if isinstance(task, Mapping) and task.get("taskset") == taskset:
        return
    cure = f"written by tidemill data verifiers {taskset} FILE, with data.metadata_key: metadata"
    got = f"one of {task.get('taskset')}" if isinstance(task, Mapping) else "no task in metadata.verifiers"
    raise PromptError(row.where, f"a task of {taskset} for its rollout {OF_VERIFIERS}{taskset} ({cure})", got)
