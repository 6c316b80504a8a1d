"""Checks of the prompt file: its rows, the keys that settings name, the lengths of its prompts. Reads for a second at most."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import CheckedModel
from tidemill.launch.checks.reading import Reading, all_rows
from tidemill.launch.checks.rows import row_check
from tidemill.launch.settings.datasets import prompts
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.data.config import DataConfig
from tidemill.learner.data.mixing import Share
from tidemill.learner.data.prompts import PromptTokenizer, Row, RowRules, RowTokens, refuse_template, row_in, with_responses
from tidemill.learner.data.responses import Recordings
from tidemill.learner.errors import PromptError, TemplateLacks
from tidemill.rewards.end_tokens import EndTokens
from tidemill.rewards.part_settings import fits

SETTING = "data.path"
CURE = "fix the file, or data.prompt_key, data.label_key, data.metadata_key"
EVALUATION = "eval"
"""Topic of the findings on evaluation sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Facts about the prompts that the other checks use."""

    rows: Sequence[Row]
    """The rows read, at least one."""
    longest: int = 0
    """Tokens of the longest prompt that is used; 0 = not all of them were counted."""
    warm: Row | None = None
    """The first row read with a temperature of its own other than 1."""

    @property
    def first(self) -> Row:
        """The first row."""
        return self.rows[0]


def check_data(
    report: Report, config: RunConfig, model: CheckedModel | None, tokenize: PromptTokenizer | None, *, made: bool
) -> Prompts | None:
    """Report bad rows and errors in ``data``; return the facts about its prompts, None after an error.

    ``made``: ``prepare`` makes the file.
    """
    try:
        refuse_template(config.data.template)
        if made:
            return _check_prepared(report, config)
        if not config.data.used:
            cure = "set one, or have a small one made: prepare: {kind: digits}"
            report.error("data", report.at(SETTING), want="a .jsonl or .parquet file of prompts", got="none", cure=cure)
            return None
        readings = read_sources(config, config.data, model, tokenize, max_new_tokens=config.sampling.max_new_tokens)
    except PromptError as error:
        where = report.at(error.where) if error.where.startswith("data.") else error.where
        report.error("data", where, want=error.want, got=error.got, cure=f"{CURE} ({report.at(SETTING)})")
        return None
    except TemplateLacks as error:
        _report_lack(report, "data", config.data, error)
        return None
    before = len(report.errors)
    for reading in readings:
        reading.report(report, "data", config.data.bad_rows, cure=f"{CURE} ({report.at(SETTING)})")
    if len(report.errors) > before:
        return None
    rows, complete = list(all_rows(readings)), all(reading.complete for reading in readings)
    _check_grouped(report, config, rows, complete=complete)
    longest = max(reading.longest for reading in readings)
    for reading in readings:
        report.good("data", f"{reading.source}: {reading}" + (f", of up to {reading.longest} tokens" if reading.longest else ""))
    if complete and config.learner.num_epochs:
        _check_passes(report, config, _in_pass(readings))
    warm = next((row for row in rows if row.sampling.temperature not in (None, 1)), None)
    counted = complete and all(reading.tokenized == reading.readable for reading in readings)
    return Prompts(rows=rows, longest=longest if counted else 0, warm=warm)


def check_evaluation(report: Report, config: RunConfig, model: CheckedModel | None, tokenize: PromptTokenizer | None) -> Prompts | None:
    """Report bad rows and errors in the evaluation sets, if there are evaluations; return facts about those that are read."""
    seen: list[Row] = []
    for name, one in config.eval.parsed.items() if config.eval.every else ():
        setting, data, before = f"eval.sets.{name}", one.data(config.data), len(report.errors)
        new = one.max_new_tokens or config.sampling.max_new_tokens
        cure = f"fix the file, or the keys of {setting} ({data.path})"
        if model is not None and tokenize is not None and model.context <= new:
            want = f"< {model.context}, the model's context"
            report.error(EVALUATION, report.at(f"{setting}.max_new_tokens"), want=want, got=one.max_new_tokens, cure="lower it")
            continue
        try:
            (reading,) = read_sources(config, data, model, tokenize, max_new_tokens=new)
        except PromptError as error:
            where = report.at(setting) if error.where == data.path else error.where
            report.error(EVALUATION, where, want=error.want, got=error.got, cure=cure)
            continue
        except TemplateLacks as error:
            _report_lack(report, EVALUATION, data, error)
            continue
        reading.report(report, EVALUATION, data.bad_rows, cure=cure)
        if len(report.errors) == before:
            seen += reading.rows
            used = f", the first {one.limit} are used" if 0 < one.limit < reading.read else ""
            report.good(EVALUATION, f"{name}: {data.path}: {reading}{used}; {one.samples} responses each")
    return Prompts(rows=seen) if seen else None


def read_sources(
    config: RunConfig, data: DataConfig, model: CheckedModel | None, tokenize: PromptTokenizer | None, *, max_new_tokens: int
) -> list[Reading]:
    """Read and tokenize rows of each source. Raises PromptError for a source that cannot be read, TemplateLacks."""
    rules = RowRules(unfit=row_check(config, max_new_tokens=max_new_tokens, vocab_size=None if model is None else model.vocab_size))
    readings = [Reading.of(source, rules, config.recorded_rollouts) for source in data.used]
    tokens = None if model is None or tokenize is None else tokens_of(config, data, model, tokenize, max_new_tokens=max_new_tokens)
    if tokens is not None:
        for reading in readings:
            reading.tokenize(tokens)
    return readings


def tokens_of(
    config: RunConfig, data: DataConfig, model: CheckedModel, tokenize: PromptTokenizer, *, max_new_tokens: int
) -> RowTokens | None:
    """Return the tokens of rows; None where there is no room for a prompt, which is reported with the model."""
    limit = data.max_prompt_tokens or model.context - max_new_tokens
    recordings = None
    if config.recorded_rollouts and model.directory is not None:
        recordings = Recordings(
            tokenize,
            rollouts=config.recorded_rollouts,
            end_ids=EndTokens.read(model.directory).ids,
            max_tokens=model.context,
            chat=config.data.apply_chat_template,
            texts=tokenize,
        )
    return RowTokens(tokenize, max_tokens=limit, recordings=recordings) if limit > 0 else None


def _report_lack(report: Report, topic: str, data: DataConfig, error: TemplateLacks) -> None:
    cure = "fix the rows, data.template or the model's chat template"
    report.error(topic, _place(data), want="a prompt that tokenizer and chat template accept", got=str(error), cure=cure)


def _check_grouped(report: Report, config: RunConfig, rows: Sequence[Row], *, complete: bool) -> None:
    """Warn where no row has the metadata of ``group_reward_when``; if not all rows are read, nothing is known."""
    when = config.actor.group_reward_when
    if when and complete and not any(fits(when, row.metadata) for row in rows):
        want, cure = f"rows with metadata {when!r:.200}", "fix it, or data.metadata_key: their samples are scored one by one"
        report.warning("data", report.at("actor.group_reward_when"), want=want, got=f"none of {len(rows)}", cure=cure)


def _check_passes(report: Report, config: RunConfig, in_pass: int) -> None:
    """Report where a number of passes ends the run, and a learning rate that ends elsewhere. ``in_pass``: prompts of a pass."""
    learner = config.learner
    steps = -(-learner.num_epochs * in_pass // learner.groups_per_step)
    if steps >= learner.steps:
        report.good("data", f"learner.steps ends the run before learner.num_epochs, whose passes have prompts for {steps} steps")
        return
    report.good(
        "data", f"{learner.num_epochs} pass{'es' * (learner.num_epochs > 1)} of {in_pass} prompts: the run ends after at most {steps} steps"
    )
    if learner.optimizer.lr_decay != "constant":
        report.warning(
            "data",
            report.at("learner.num_epochs"),
            want=f"learner.steps: {steps} with learner.optimizer.lr_decay: {learner.optimizer.lr_decay}, which ends at learner.steps",
            got=learner.steps,
            cure="lower learner.steps, or the rate is still high when the run ends",
        )


def _in_pass(readings: Sequence[Reading]) -> int:
    """Return the prompts of a pass."""
    return sum(Share(first=0, size=reading.read, weight=reading.source.weight, name="").in_pass for reading in readings)


def _place(data: DataConfig) -> str:
    return " + ".join(map(str, data.used))


def _check_prepared(report: Report, config: RunConfig) -> Prompts:
    """Check the prompts that ``prepare`` will write; they are known before the file exists. Raises PromptError."""
    assert config.prepare is not None
    (source,) = config.data.used
    row = with_responses(row_in(source, 0, next(prompts(config.prepare))), config.recorded_rollouts)
    row_check(config, max_new_tokens=config.sampling.max_new_tokens, vocab_size=None)(row)
    tokens = 0
    if config.prepare.kind == "digits":  # a token a character
        longest = "0" * config.prepare.max_digits + "="
        tokens = len(config.data.template.replace("{prompt}", longest) or longest)
        room = config.prepare.max_position - config.sampling.max_new_tokens
        if tokens > room > 0:
            want = f"<= {room} for the longest prompt: prepare.max_position less sampling.max_new_tokens"
            report.error("data", report.at("prepare.max_digits"), want=want, got=f"{tokens} tokens", cure="raise prepare.max_position")
    _check_grouped(report, config, [row], complete=True)
    report.good("data", f"made at the start: {config.prepare.kind}")
    return Prompts(rows=[row], longest=tokens)
