"""Checks of the prompts (rows, keys, lengths), of the evaluation sets, and of the files of the debugging modes.

Reads for a second at most, and at least some hundred rows.
"""

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import CheckedModel
from tidemill.launch.checks.rows import recordings_of, row_check
from tidemill.launch.settings.prepare import prompts
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.data import REFUSE, DataConfig, Source
from tidemill.learner.debug.config import read_prompts
from tidemill.learner.debug.rollout_file import read_header
from tidemill.learner.errors import DebugFileRefused, PromptError, TemplateLacks
from tidemill.learner.prompts.formats import count_rows
from tidemill.learner.prompts.prompt_file import Share
from tidemill.learner.prompts.rows import (
    PromptRow,
    RowRules,
    RowTokens,
    RowTooLong,
    refuse_template,
    row_in,
    scan_rows,
    with_responses,
)
from tidemill.learner.prompts.tokenizer import PromptTokenizer
from tidemill.rewards.part_settings import fits

SETTING = "data.path"
CURE = "fix the file, or data.prompt_key, data.label_key, data.metadata_key"
EVALUATION = "eval"  # Topic of the findings on evaluation sets

READ_S = 0.5  # Seconds after which no further row is read, or tokenized, once `SURE_ROWS` rows are
SURE_ROWS = 500  # Rows that are read and tokenized, however long it takes
MOST_CAUSES = 5  # Maximum number of causes of bad rows that are reported for a source
ROOM = "a larger context or data.max_prompt_tokens, or a smaller sampling.max_new_tokens makes room"


@dataclass(slots=True, kw_only=True)
class SourceReading:
    """The rows of a source that were read."""

    source: Source
    rows: list[PromptRow] = field(default_factory=list)  # Those that can be used
    bad: list[PromptError] = field(default_factory=list)  # Errors of rows that were read
    rejected: list[PromptError] = field(default_factory=list)  # Errors of rows that were tokenized
    read: int = 0
    total: int | None = None  # Rows of the source; None = not known
    readable: int = 0  # Rows that had no error before they were tokenized
    tokenized: int = 0
    longest: int = 0  # Tokens of the longest prompt that is used

    @classmethod
    def of(cls, source: Source, rules: RowRules, recorded: Collection[str]) -> "SourceReading":
        """Read a source; ``recorded``: rollouts with recorded responses. Raises PromptError for an unreadable one."""
        refuse_template(source.template)
        reading, until = cls(source=source), time.monotonic() + READ_S
        for scanned in scan_rows(source):
            row = rules.applied(scanned, recorded)
            reading.read += 1
            if isinstance(row, PromptError):
                reading.bad.append(row)
            else:
                reading.rows.append(row)
            if reading.read >= SURE_ROWS and time.monotonic() > until:
                reading.total = _size(source)
                return reading
        if not reading.read:
            raise PromptError(str(source), "at least one prompt", "none")
        reading.total = reading.read
        return reading

    @property
    def complete(self) -> bool:
        """True if every row was read."""
        return self.read == self.total

    def tokenize(self, tokens: RowTokens) -> None:
        """Tokenize the first row and others in random order; bad ones leave ``rows``. Raises TemplateLacks.

        In random order, because of a file that is sorted by length the rows tokenized in time would all be short, or
        all long.
        """
        self.readable = len(self.rows)
        order = random.Random(0).sample(range(1, len(self.rows)), max(0, len(self.rows) - 1))
        until, bad = time.monotonic() + READ_S, dict[int, PromptError]()
        for number in chain([0] if self.rows else [], order):
            try:
                prompt, recorded = tokens.of(self.rows[number])
            except PromptError as error:
                bad[number] = error
            else:
                sizes = [len(response.tokens) for response in recorded] or [len(prompt)]
                self.longest = max(self.longest, *sizes)
            self.tokenized += 1
            if self.tokenized >= SURE_ROWS and time.monotonic() > until:
                break
        self.rejected = [error for _, error in sorted(bad.items())]
        self.rows = [row for number, row in enumerate(self.rows) if number not in bad]

    def __str__(self) -> str:
        size = f"{self.read} prompts read"
        if not self.complete:
            share = "" if self.total is None else f" of {self.total} ({100 * self.read / self.total:.2g} %)"
            size = f"the first {self.read} prompts read{share}"
        part = f", {self.tokenized} of them tokenized" if self.tokenized < self.readable else ""
        return size + part + ("" if self.complete and not part else " (tidemill data check reads all)")

    def report(self, report: Report, topic: str, policy: str, *, cure: str) -> None:
        """Report the bad rows by cause: as errors where they are refused, or none can be used.

        ``policy``: ``data.bad_rows``. ``cure``: for causes other than the length.
        """
        causes: dict[tuple[str, str], list[PromptError]] = {}
        tokenized = f"{self.read} rows read" if self.tokenized == self.readable else f"{self.tokenized} rows tokenized"
        for errors, total in ((self.bad, f"{self.read} rows read"), (self.rejected, tokenized)):
            for error in errors:
                causes.setdefault((error.want, total), []).append(error)
        refused = policy == REFUSE or not self.rows or 0 < self.tokenized == len(self.rejected)
        for (_, total), errors in list(causes.items())[:MOST_CAUSES]:
            first, remedy = errors[0], ROOM if isinstance(errors[0], RowTooLong) else cure
            got = f"{first.got}; {len(errors)} of {total} are such"
            if refused:
                report.error(topic, first.where, want=first.want, got=got, cure=remedy)
            else:
                cure = f"they are skipped (data.bad_rows: skip); {remedy}"
                report.warning(topic, first.where, want=first.want, got=got, cure=cure)
        if len(causes) > MOST_CAUSES:
            want, got = "rows that can be used", f"bad rows of {len(causes) - MOST_CAUSES} further causes"
            report.warning(topic, str(self.source), want=want, got=got, cure="tidemill data check names all of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Facts about the prompts that the other checks use."""

    rows: Sequence[PromptRow]  # The rows read, at least one
    longest: int = 0  # Tokens of the longest prompt that is used; 0 = not all of them were counted
    warm: PromptRow | None = None  # The first row read with a temperature of its own other than 1

    @property
    def first(self) -> PromptRow:
        """The first row."""
        return self.rows[0]


def check_data(
    report: Report, config: RunConfig, model: CheckedModel | None, tokenize: PromptTokenizer | None, *, prepared: bool
) -> Prompts | None:
    """Report errors in ``data``; return facts about its prompts, None after an error."""
    try:
        refuse_template(config.data.template)
        if prepared:
            return _check_prepared(report, config)
        if not config.data.used:
            cure = "set one, or have a small one made: prepare: {kind: digits}"
            report.error("data", SETTING, want="a .jsonl or .parquet file of prompts", got="none", cure=cure)
            return None
        readings = read_sources(config, config.data, model, tokenize, max_new_tokens=config.sampling.max_new_tokens)
    except PromptError as error:
        report.error("data", error.where, want=error.want, got=error.got, cure=f"{CURE} ({report.at(SETTING)})")
        return None
    except TemplateLacks as error:
        _report_lack(report, "data", config.data, error)
        return None
    before = len(report.errors)
    for reading in readings:
        reading.report(report, "data", config.data.bad_rows, cure=f"{CURE} ({report.at(SETTING)})")
    if len(report.errors) > before:
        return None
    rows, complete = (
        [row for reading in readings for row in reading.rows],
        all(reading.complete for reading in readings),
    )
    _check_grouped(report, config, rows, complete=complete)
    longest = max(reading.longest for reading in readings)
    for reading in readings:
        tokens = f", of up to {reading.longest} tokens" if reading.longest else ""
        report.good("data", f"{reading.source}: {reading}{tokens}")
    if complete and config.learner.num_epochs:
        _check_passes(report, config, _in_pass(readings))
    warm = next((row for row in rows if row.sampling.temperature not in (None, 1)), None)
    counted = complete and all(reading.tokenized == reading.readable for reading in readings)
    return Prompts(rows=rows, longest=longest if counted else 0, warm=warm)


def check_evaluation(
    report: Report, config: RunConfig, model: CheckedModel | None, tokenize: PromptTokenizer | None
) -> Prompts | None:
    """Report bad rows and errors in the evaluation sets of a run with evaluations; return facts about them."""
    rows: list[PromptRow] = []
    for name, eval_set in config.eval.sets.items() if config.eval.every else ():
        setting, data, before = f"eval.sets.{name}", eval_set.data(config.data), len(report.errors)
        new = eval_set.max_new_tokens or config.sampling.max_new_tokens
        cure = f"fix the file, or the keys of {setting} ({data.path})"
        if model is not None and tokenize is not None and model.context <= new:
            want = f"< {model.context}, the model's context"
            cure = "lower it"
            report.error(EVALUATION, f"{setting}.max_new_tokens", want=want, got=eval_set.max_new_tokens, cure=cure)
            continue
        try:
            (reading,) = read_sources(config, data, model, tokenize, max_new_tokens=new)
        except PromptError as error:
            where = setting if error.where == data.path else error.where
            report.error(EVALUATION, where, want=error.want, got=error.got, cure=cure)
            continue
        except TemplateLacks as error:
            _report_lack(report, EVALUATION, data, error)
            continue
        reading.report(report, EVALUATION, data.bad_rows, cure=cure)
        if len(report.errors) == before:
            rows += reading.rows
            used = f", the first {eval_set.limit} are used" if 0 < eval_set.limit < reading.read else ""
            report.good(EVALUATION, f"{name}: {data.path}: {reading}{used}; {eval_set.samples} responses each")
    return Prompts(rows=rows) if rows else None


def read_sources(
    config: RunConfig,
    data: DataConfig,
    model: CheckedModel | None,
    tokenize: PromptTokenizer | None,
    *,
    max_new_tokens: int,
) -> list[SourceReading]:
    """Read and tokenize rows of each source. Raises PromptError for a source that cannot be read, TemplateLacks."""
    vocab_size = None if model is None else model.vocab_size
    rules = RowRules(unfit=row_check(config, max_new_tokens=max_new_tokens, vocab_size=vocab_size))
    readings = [SourceReading.of(source, rules, config.recorded_rollouts) for source in data.used]
    if model is not None and tokenize is not None:
        tokens = tokens_of(config, data, model, tokenize, max_new_tokens=max_new_tokens)
        for reading in readings:
            if tokens is not None:
                reading.tokenize(tokens)
    return readings


def tokens_of(
    config: RunConfig, data: DataConfig, model: CheckedModel, tokenize: PromptTokenizer, *, max_new_tokens: int
) -> RowTokens | None:
    """Return the tokens of rows; None where there is no room for a prompt, which is reported with the model."""
    limit = data.max_prompt_tokens or model.context - max_new_tokens
    recordings = None
    if config.recorded_rollouts and model.directory is not None:
        recordings = recordings_of(config, model.directory, tokenize, model.context)
    return RowTokens(tokenize.bounded(limit), max_tokens=limit, recordings=recordings) if limit > 0 else None


def _report_lack(report: Report, topic: str, data: DataConfig, error: TemplateLacks) -> None:
    cure = "fix the rows, data.template or the model's chat template"
    want = "a prompt that tokenizer and chat template accept"
    report.error(topic, " + ".join(map(str, data.used)), want=want, got=str(error), cure=cure)


def _check_grouped(report: Report, config: RunConfig, rows: Sequence[PromptRow], *, complete: bool) -> None:
    """Warn where no row has the metadata of ``group_reward_when``; if not all rows are read, nothing is known."""
    when = config.actor.group_reward_when
    if when and complete and not any(fits(when, row.metadata) for row in rows):
        want = f"rows with metadata {when!r:.200}"
        cure = "fix it, or data.metadata_key: their samples are scored one by one"
        report.warning("data", "actor.group_reward_when", want=want, got=f"none of {len(rows)}", cure=cure)


def _check_passes(report: Report, config: RunConfig, in_pass: int) -> None:
    """Report where the passes (of ``in_pass`` prompts) end the run, and a learning rate that ends elsewhere."""
    learner = config.learner
    steps = -(-learner.num_epochs * in_pass // learner.groups_per_step)
    if steps >= learner.steps:
        text = f"learner.steps ends the run before learner.num_epochs, whose passes have prompts for {steps} steps"
        report.good("data", text)
        return
    passes = f"{learner.num_epochs} pass{'es' * (learner.num_epochs > 1)} of {in_pass} prompts"
    report.good("data", f"{passes}: the run ends after at most {steps} steps")
    if (decay := learner.optimizer.lr_decay) != "constant":
        want = f"learner.steps: {steps} with learner.optimizer.lr_decay: {decay}, which ends at learner.steps"
        cure = "lower learner.steps, or the rate is still high when the run ends"
        report.warning("data", "learner.num_epochs", want=want, got=learner.steps, cure=cure)


def _in_pass(readings: Sequence[SourceReading]) -> int:
    return sum(Share(first=0, size=reading.read, weight=reading.source.weight, name="").in_pass for reading in readings)


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
        room = config.prepare.values["max_position_embeddings"] - config.sampling.max_new_tokens
        if tokens > room > 0:
            context, cure = "prepare.model.max_position_embeddings", "raise prepare.model.max_position_embeddings"
            want = f"<= {room} for the longest prompt: {context} less sampling.max_new_tokens"
            report.error("data", "prepare.max_digits", want=want, got=f"{tokens} tokens", cure=cure)
    _check_grouped(report, config, [row], complete=True)
    report.good("data", f"made at the start: {config.prepare.kind}")
    return Prompts(rows=[row], longest=tokens)


def check_debug(report: Report, config: RunConfig) -> None:
    """Check that every step of ``debug.load_rollout`` has a file, and that the prompts of a dump can be read."""
    debug = config.debug
    if debug.dump_modules.step:
        try:
            read_prompts(Path(debug.dump_modules.prompts))
        except DebugFileRefused as error:
            where = "debug.dump_modules.prompts"
            report.error("debug", where, want=error.want, got=f"{error.where}: {error.got}", cure="fix the file")
        if debug.dump_modules.step > config.learner.steps:
            want, got = f"<= learner.steps = {config.learner.steps}", debug.dump_modules.step
            report.error("debug", "debug.dump_modules.step", want=want, got=got, cure="lower it")
    if debug.load_rollout:
        _check_files(report, config)


def _check_files(report: Report, config: RunConfig) -> None:
    steps, template = config.learner.steps, config.debug.load_rollout
    files = [Path(template.format(step=step)) for step in range(1, steps + 1)]
    missing = next((step for step, file in enumerate(files, 1) if not file.is_file()), None)
    where = "debug.load_rollout"
    if missing is not None:
        cure = f"set learner.steps: {missing - 1}, or save more steps"
        if missing == 1:
            cure = "fix the path, or save them with debug.save_rollout"
        want = f"a file for each of learner.steps = {steps}"
        report.error("debug", where, want=want, got=f"none for step {missing}: {files[missing - 1]}", cure=cure)
        return
    try:
        headers = [read_header(file) for file in dict.fromkeys(files)]
    except DebugFileRefused as error:
        cure = "save it again with debug.save_rollout"
        report.error("debug", where, want=error.want, got=f"{error.where}: {error.got}", cure=cure)
        return
    num_samples = sum(header["samples"] for header in headers)
    report.good("debug", f"{len(headers)} files of recorded batches, {num_samples} samples")


def _size(source: Source) -> int | None:
    """Return the rows of a source, where counting takes no time; None = not known."""
    count = count_rows(source.path)
    return None if count is None else len(range(count)[source.start : source.stop])
