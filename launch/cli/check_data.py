"""``tidemill data check``: every bad row of prompt files by file and line, the number of good ones, and the first prompts."""

import argparse
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tidemill.actors.text.text import Text
from tidemill.launch.checks.data import tokens_of
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import check_model
from tidemill.launch.checks.rows import row_check
from tidemill.launch.checks.tokens import check_tokenizer
from tidemill.launch.settings.config_loader import load
from tidemill.learner.data.config import DataConfig
from tidemill.learner.data.prompts import Row, RowRules, RowTokens, refuse_template, scan_rows
from tidemill.learner.data.source import Source
from tidemill.learner.errors import PromptError, TemplateLacks

Rendering = Callable[[Row], str]
SHOWN = 400
"""Characters of a prompt that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """How rows are read, beyond their columns."""

    rules: RowRules = field(default_factory=RowRules)
    recorded: Collection[str] = ()
    """Rollouts with recorded responses."""
    tokens: RowTokens | None = None
    """None without a model."""
    render: Rendering | None = None
    """Shows the tokens of a row; None without a model."""

    def row(self, row: Row | PromptError) -> Row | PromptError:
        """Return the row as it is used, or its error."""
        row = self.rules.applied(row, self.recorded)
        if isinstance(row, PromptError) or self.tokens is None:
            return row
        try:
            self.tokens.of(row)
        except PromptError as error:
            return error
        except TemplateLacks as error:
            return PromptError(row.where, "a prompt that tokenizer and chat template accept", str(error))
        return row


def run_check(args: argparse.Namespace) -> int:
    """Print the contents of the files. Returns 0, or 78 when a row is bad. Raises SettingsError, PromptError."""
    reader = _reader(args)
    bad = sum(_check(source, reader, most=args.most, preview=args.preview) for source in _sources(args))
    return PromptError.exit_code if bad else 0


def _sources(args: argparse.Namespace) -> list[Source]:
    configs = [one for one in args.files if one.endswith((".yaml", ".yml"))]
    if configs and len(configs) < len(args.files):
        raise ValueError(f"want either the YAML files of a run or files of prompts, got both: {', '.join(args.files)}")
    if configs:
        found = load([Path(one) for one in configs], args.set, os.environ).config.data.used
        if not found:
            raise ValueError(f"{configs[-1]}: want data.path or data.sources, got neither")
        return found
    data: DataConfig = load([], args.set, os.environ).config.data
    return [source for path in args.files for source in DataConfig(**{**vars(data), "path": path, "sources": {}}).used]


def _reader(args: argparse.Namespace) -> RowReader:
    """Return how rows are read, with the tokens of the model that the settings name, if it is there.

    Raises CheckFailed for a model with a tokenizer that cannot be used.
    """
    configs = [Path(one) for one in args.files if one.endswith((".yaml", ".yml"))]
    loaded = load(configs, args.set, os.environ)
    config, directory = loaded.config, Path(loaded.config.model.path)
    reader = RowReader(recorded=config.recorded_rollouts)
    if not config.model.path or not (directory / "config.json").is_file():
        return reader
    report = Report(loaded.origins)
    model = check_model(report, config, made=False)
    tokenize = None if model is None else check_tokenizer(report, config, model)
    report.refuse()
    text = Text.read(directory)
    if model is None or tokenize is None or text is None:
        return reader
    longest = config.sampling.max_new_tokens if configs else 0  # files alone are of no run, which has a longest response
    tokens = tokens_of(config, config.data, model, tokenize, max_new_tokens=longest)
    if configs:
        rules = RowRules(unfit=row_check(config, max_new_tokens=longest, vocab_size=model.vocab_size))
        reader = replace(reader, rules=rules)
    return reader if tokens is None else replace(reader, tokens=tokens, render=partial(_rendered, tokens, text))


def _rendered(tokens: RowTokens, text: Text, row: Row) -> str:
    """Return the number of tokens of a row, and their text with special tokens."""
    prompt, recorded = tokens.of(row)
    if not recorded:
        return f"{len(prompt)} tokens {text.decode(prompt.tolist(), skip_special=False)!a:.{SHOWN}}"
    return "; ".join(
        f"{len(one.tokens)} tokens {text.decode(one.tokens.tolist(), skip_special=False)!a:.{SHOWN}}, of which "
        f"{int(one.loss_mask.sum())} are trained: "
        f"{text.decode(one.tokens[-len(one.loss_mask) :][one.loss_mask == 1].tolist(), skip_special=False)!a:.{SHOWN}}"
        for one in recorded
    )


def _check(source: Source, reader: RowReader, *, most: int, preview: int) -> int:
    """Print the bad rows of a source, the first good ones and the counts. Returns the number of errors."""
    refuse_template(source.template)
    good, bad = 0, 0
    try:
        for found in scan_rows(source):
            row = reader.row(found)
            if isinstance(row, PromptError):
                bad += 1
                if bad <= most:
                    print(row)
                continue
            good += 1
            if good <= preview:
                print(_shown(row, reader.render))
    except PromptError as error:  # the rest of the file cannot be read
        bad += 1
        print(error)
    if bad > most:
        print(f"{source}: {bad - most} more bad rows")
    if not good and not bad:
        bad = 1
        print(PromptError(str(source), "at least one prompt", "none"))
    print(f"{source}: {good} prompts, {bad} errors")
    return bad


def _shown(row: Row, render: Rendering | None) -> str:
    line = f"{row.where}: prompt {row.prompt!a:.{SHOWN}} label {row.label!a:.{SHOWN}}"
    if row.metadata:
        line += f" metadata {row.metadata!a:.{SHOWN}}"
    return line if render is None else f"{line} {render(row)}"
