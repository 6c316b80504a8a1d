"""Checks of the prompt file: its rows, the keys that settings name, the lengths of its prompts. Reads for a second at most."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

from launch.checks.findings import Report
from launch.checks.model import CheckedModel
from launch.checks.rows import refuse_unfit
from launch.checks.tokens import CannotRender
from launch.settings.datasets import prompts
from launch.settings.run_config import RunConfig
from learner.data.config import DataConfig
from learner.data.mixing import Share
from learner.data.prompts import Row, Tokenize, read_rows, recorded_row, refuse_template, row_in, row_tokens, with_responses
from learner.data.responses import Recordings
from learner.data.source import Source
from learner.errors import PromptError
from rewards.end_tokens import EndTokens
from rewards.part_settings import fits

SETTING = "data.path"
READ_S = 0.5
"""Seconds after which no further row is read, or tokenized, once ``SURE_ROWS`` rows are."""
SURE_ROWS = 500
"""Rows that are read and tokenized, however long it takes."""
EVALUATION = "eval"
"""Topic of the findings on evaluation sets."""
CURE = "fix the file, or data.prompt_key, data.label_key, data.metadata_key"


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


def check_data(report: Report, config: RunConfig, model: CheckedModel | None, tokenize: Tokenize | None, *, made: bool) -> Prompts | None:
    """Report errors in ``data``; return the facts about its prompts, None after an error. ``made``: ``prepare`` makes the file."""
    try:
        refuse_template(config.data.template)
        if made:
            return _check_prepared(report, config)
        if not config.data.used:
            cure = "set one, or have a small one made: prepare: {kind: digits}"
            report.error("data", report.at(SETTING), want="a .jsonl or .parquet file of prompts", got="none", cure=cure)
            return None
        rows, complete = _read(config.data)
        rows = [with_responses(row, config.recorded_rollouts) for row in rows]
        vocab_size = None if model is None else model.vocab_size
        refuse_unfit(rows, config, max_new_tokens=config.sampling.max_new_tokens, vocab_size=vocab_size)
        _check_grouped(report, config, rows, complete=complete)
    except PromptError as error:
        where = report.at(error.where) if error.where.startswith("data.") else error.where
        report.error("data", where, want=error.want, got=error.got, cure=f"{CURE} ({report.at(SETTING)})")
        return None
    size = f"{len(rows)} prompts" if complete else f"the first {len(rows)} prompts"
    longest, before = 0, len(report.errors)
    if model is not None and tokenize is not None:
        limit = config.data.max_prompt_tokens or model.context - config.sampling.max_new_tokens
        recordings = recordings_of(config, model, tokenize)
        longest = _check_lengths(report, limit, rows, tokenize, recordings=recordings)
    if len(report.errors) == before:
        report.good("data", f"{_place(config.data)}: {size} read" + (f", of up to {longest} tokens" if longest else ""))
        if complete and config.learner.num_epochs:
            _check_passes(report, config, _in_pass(config.data))
    warm = next((row for row in rows if row.sampling.temperature not in (None, 1)), None)
    return Prompts(rows=rows, longest=longest if complete else 0, warm=warm)


def check_evaluation(report: Report, config: RunConfig, model: CheckedModel | None, tokenize: Tokenize | None) -> Prompts | None:
    """Report errors in the files of the evaluation sets, if there are evaluations; return facts about those that are read."""
    seen: list[Row] = []
    for name, one in config.eval.parsed.items() if config.eval.every else ():
        setting, data, before = f"eval.sets.{name}", one.data(config.data), len(report.errors)
        try:
            refuse_template(data.template)
            rows, complete = _read(data)
            new, vocab_size = one.max_new_tokens or config.sampling.max_new_tokens, None if model is None else model.vocab_size
            refuse_unfit(rows, config, max_new_tokens=new, vocab_size=vocab_size)
        except PromptError as error:
            cure = f"fix the file, or the keys of {setting} ({data.path})"
            report.error(
                EVALUATION, report.at(setting) if error.where == data.path else error.where, want=error.want, got=error.got, cure=cure
            )
            continue
        seen += rows
        if model is not None and tokenize is not None:
            limit = model.context - new
            if limit <= 0:
                want = f"< {model.context}, the model's context"
                cure = "lower it"
                report.error(EVALUATION, report.at(f"{setting}.max_new_tokens"), want=want, got=one.max_new_tokens, cure=cure)
                continue
            _check_lengths(report, limit, rows, tokenize, topic=EVALUATION)
        if len(report.errors) == before:
            size = f"{len(rows)} prompts" if complete else f"the first {len(rows)} prompts"
            used = f", the first {one.limit} are used" if 0 < one.limit < len(rows) else ""
            report.good(EVALUATION, f"{name}: {data.path}: {size} read{used}; {one.samples} responses each")
    return Prompts(rows=seen) if seen else None


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


def _in_pass(data: DataConfig) -> int:
    """Return the prompts of a pass. Raises PromptError."""
    sizes = [sum(1 for _ in read_rows(source)) for source in data.used]
    shares = [Share(first=0, size=size, weight=source.weight, name="") for source, size in zip(data.used, sizes, strict=True)]
    return sum(share.in_pass for share in shares)


def _place(data: DataConfig) -> str:
    return " + ".join(map(str, data.used))


def _check_prepared(report: Report, config: RunConfig) -> Prompts:
    """Check the prompts that ``prepare`` will write; they are known before the file exists. Raises PromptError."""
    assert config.prepare is not None
    (source,) = config.data.used
    row = with_responses(row_in(source, 0, next(prompts(config.prepare))), config.recorded_rollouts)
    refuse_unfit([row], config, max_new_tokens=config.sampling.max_new_tokens, vocab_size=None)
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


def _read(data: DataConfig) -> tuple[list[Row], bool]:
    """Return the rows read, at least one, and whether they are all rows of the file. Raises PromptError."""
    rows: list[Row] = []
    complete = True
    for source in data.used:
        found, all_read = _read_source(source)
        rows, complete = rows + found, complete and all_read
    return rows, complete


def _read_source(source: Source) -> tuple[list[Row], bool]:
    refuse_template(source.template)
    rows: list[Row] = []
    until = time.monotonic() + READ_S
    for row in read_rows(source):
        rows.append(row)
        if len(rows) >= SURE_ROWS and time.monotonic() > until:
            return rows, False
    if not rows:
        raise PromptError(str(source), "at least one prompt", "none")
    return rows, True


def recordings_of(config: RunConfig, model: CheckedModel, tokenize: Tokenize) -> Recordings | None:
    """Return the maker of recorded sequences; None if the run has none."""
    if not config.recorded_rollouts or model.directory is None:
        return None
    return Recordings(
        tokenize,
        rollouts=config.recorded_rollouts,
        end_ids=EndTokens.read(model.directory).ids,
        max_tokens=model.context,
        chat=config.data.apply_chat_template,
    )


def row_length(row: Row, tokenize: Tokenize, recordings: Recordings | None) -> int:
    """Return the tokens of a row's prompt, or of its longest recorded sequence. Raises CannotRender, PromptError."""
    if row.responses and recordings is not None:
        return max(len(one.tokens) for one in recordings.sequences(recorded_row(row)))
    return len(row_tokens(row, tokenize))


def _check_lengths(
    report: Report, limit: int, rows: list[Row], tokenize: Tokenize, *, topic: str = "data", recordings: Recordings | None = None
) -> int:
    """Tokenize the first row and others in random order; return the tokens of the longest one used, 0 if not all were counted."""
    if limit <= 0:  # reported with the model
        return 0
    # In random order: of a file that is sorted by length, the rows read in time would all be short, or all long.
    others = random.Random(0).sample(range(1, len(rows)), len(rows) - 1)
    until, long, longest, looked_at = time.monotonic() + READ_S, list[tuple[int, Row, int]](), 0, 0
    for number in chain([0], others):
        row = rows[number]
        place = row.where
        try:
            length = row_length(row, tokenize, recordings)
            if not length:
                raise CannotRender(f"no tokens from {row.prompt!r}")
        except CannotRender as error:
            want = "a prompt that tokenizer and chat template accept"
            report.error(topic, place, want=want, got=str(error), cure="fix the row, data.template or the model's chat template")
            return 0
        except PromptError as error:
            report.error(topic, error.where, want=error.want, got=error.got, cure="fix the row, or the model's chat template")
            return 0
        looked_at += 1
        if length > (recordings.max_tokens if row.responses and recordings is not None else limit):
            long.append((number, row, length))
        else:
            longest = max(longest, length)
        if looked_at >= SURE_ROWS and time.monotonic() > until:
            break
    limit = recordings.max_tokens if long and long[0][1].responses and recordings is not None else limit
    _report_long(report, limit, sorted(long, key=itemgetter(0)), looked_at, topic)
    return longest if looked_at == len(rows) else 0


def _report_long(report: Report, limit: int, long: list[tuple[int, Row, int]], looked_at: int, topic: str) -> None:
    if not long:
        return
    _, row, length = long[0]
    where, want = row.where, f"prompts of <= {limit} tokens"
    got = f"{length} tokens there; {len(long)} of {looked_at} checked prompts are too long"
    cure = "a larger context or data.max_prompt_tokens, or a smaller sampling.max_new_tokens makes room"
    if len(long) == looked_at:
        report.error(topic, where, want=want, got=got, cure=cure)
    else:
        report.warning(topic, where, want=want, got=got, cure=f"these are skipped; {cure}")
