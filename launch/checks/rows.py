"""Checks of rows against settings: their rollouts, limits of sampling, and rewards that their metadata names."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path

from tidemill.actors.rollout_settings import OF_VERIFIERS
from tidemill.bus.config import SINGLE_TURN
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.responses import Recordings
from tidemill.learner.prompts.rows import PromptRow
from tidemill.learner.prompts.tokenizer import PromptTokenizer
from tidemill.rewards.model_text import EndTokens


def row_check(config: RunConfig, *, max_new_tokens: int, vocab_size: int | None) -> Callable[[PromptRow], None]:
    """Return a function that raises PromptError for a row that the run cannot sample or score.

    ``max_new_tokens``: the longest response of the run or evaluation set. ``vocab_size``: None = not known.
    """
    tasksets = {name: rollout.taskset for name, rollout in config.rollouts.items() if rollout.taskset}
    parts, recorded = [*config.actor.reward_parts.values()], config.recorded_rollouts

    def check(row: PromptRow) -> None:
        if row.rollout in recorded:
            _refuse_responses(row, config, vocab_size)
            return
        if row.rollout and row.rollout not in config.rollouts:
            want = ", ".join(sorted(config.rollouts)) or "rollouts, which has none"
            raise PromptError(row.where, f"a rollout of {want}, or {SINGLE_TURN}", repr(row.rollout))
        if row.rollout in tasksets:
            _refuse_other_task(row, tasksets[row.rollout])
        sampling = row.sampling
        if (sampling.max_new_tokens or 0) > max_new_tokens:
            want = f"max_new_tokens <= {max_new_tokens}, which is set for all rows"
            raise PromptError(row.where, want, sampling.max_new_tokens)
        stops = sampling.stop_token_ids or ()
        if vocab_size is not None and (outside := [token for token in stops if token >= vocab_size]):
            want = f"stop_token_ids below {vocab_size}, the size of the model's vocabulary"
            raise PromptError(row.where, want, outside[0])
        if parts and not any(part.applies(row.metadata) for part in parts):
            want = "; ".join(f"{part.name}: {dict(part.when)}" for part in parts)
            got = f"{row.metadata!r:.200}"
            raise PromptError(row.where, f"metadata for one of actor.reward_parts ({want})"[:500], got)

    return check


def _refuse_other_task(row: PromptRow, taskset: str) -> None:
    task = row.metadata.get("verifiers")
    if isinstance(task, Mapping) and task.get("taskset") == taskset:
        return
    cure = f"written by tidemill data verifiers {taskset} FILE, with data.metadata_key: metadata"
    got = f"one of {task.get('taskset')}" if isinstance(task, Mapping) else "no task in metadata.verifiers"
    raise PromptError(row.where, f"a task of {taskset} for its rollout {OF_VERIFIERS}{taskset} ({cure})", got)


def _refuse_responses(row: PromptRow, config: RunConfig, vocab_size: int | None) -> None:
    algorithm, own_temperature = config.learner.algorithm, row.sampling.temperature
    temperature, place_of = own_temperature, "its own temperature"
    if temperature is None:
        temperature, place_of = config.sampling.temperature, "sampling.temperature"
    for number, response in enumerate(row.responses):
        place = f"response {number + 1}"
        if vocab_size is not None and max((*response.tokens, *response.prompt_tokens), default=0) >= vocab_size:
            want = f"token ids below {vocab_size}, the size of the model's vocabulary, in {place}"
            raise PromptError(row.where, want, max(response.tokens))
        if response.log_probs:
            if response.temperature not in (None, temperature):
                want = f"log-probs at {place_of}, {temperature:g}, in {place}"
                raise PromptError(row.where, want, response.temperature)
            continue
        if not algorithm.demonstration_coef:
            why = f"learner.algorithm.loss: {algorithm.loss}, which needs the policy that wrote it"
            want = f"tokens and log_probs in {place} with {why}; or loss: sft, or sft_coef > 0"
            raise PromptError(row.where, want, "none")
        if temperature != 1:
            want = f"{place_of}: 1 with {place}, which has no log_probs: cross-entropy is that of the model itself"
            raise PromptError(row.where, want, temperature)
        terms = ("kl.coef", "entropy.coef", "entropy.target")
        term = next((path for path in terms if attrgetter(path)(algorithm)), "")
        if algorithm.loss == "sft" and term:
            why = f"{place}, which has no log_probs: it is trained by its cross-entropy alone"
            want = f"learner.algorithm.{term}: 0 with {why}"
            raise PromptError(row.where, want, attrgetter(term)(algorithm))


def recordings_of(config: RunConfig, model: Path, tokenize: PromptTokenizer, max_context: int) -> Recordings:
    """Return the reader of the rows' recorded responses, as the feeder has it."""
    return Recordings(
        tokenize.bounded(max_context),
        rollouts=config.recorded_rollouts,
        end_ids=EndTokens.read(model).ids,
        max_tokens=max_context,
        chat=config.data.apply_chat_template,
        texts=tokenize,
    )
