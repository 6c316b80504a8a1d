"""``tidemill data check``: every bad row of prompt files by file and line, the number of good ones, and the first prompts."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from actors.text.text import Text
from launch.checks.findings import Report
from launch.checks.model import check_model
from launch.checks.tokens import CannotRender, check_tokenizer
from launch.settings.config_loader import load
from learner.config import DataConfig
from learner.data.prompts import Row, refuse_template, row_tokens, scan_rows
from learner.data.source import Source
from learner.errors import PromptError

Rendering = Callable[[Row], str]
SHOWN = 400
"""Characters of a prompt that are shown."""


def run_check(args: argparse.Namespace) -> int:
    """Print what the files hold. Returns 0, or 78 when a row is bad. Raises SettingsError, PromptError."""
    render = _rendering(args)
    bad = sum(_check(source, render, most=args.most, preview=args.preview) for source in _sources(args))
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


def _rendering(args: argparse.Namespace) -> Rendering | None:
    """Return a function for the tokens of a row, with the model that the settings name; None without one, or while it is not there.

    Raises CheckFailed for a model whose tokenizer cannot be used.
    """
    configs = [Path(one) for one in args.files if one.endswith((".yaml", ".yml"))]
    loaded = load(configs, args.set, os.environ)
    directory = Path(loaded.config.model.path)
    if not loaded.config.model.path or not (directory / "config.json").is_file():
        return None
    report = Report(loaded.origins)
    model = check_model(report, loaded.config, made=False)
    tokenize = None if model is None else check_tokenizer(report, loaded.config, model)
    report.refuse()
    text = Text.read(directory)
    if tokenize is None or text is None:
        return None

    def render(row: Row) -> str:
        """Return the number of tokens of a row, and their text with special tokens."""
        try:
            ids = row_tokens(row, tokenize)
        except CannotRender as error:
            return f"no tokens: {error}"
        return f"{len(ids)} tokens {text.decode(ids, skip_special=False)!a:.{SHOWN}}"

    return render


def _check(source: Source, render: Rendering | None, *, most: int, preview: int) -> int:
    """Print the bad rows of a source, the first good ones and the counts. Returns the number of errors."""
    refuse_template(source.template)
    good, bad = 0, 0
    try:
        for row in scan_rows(source):
            if isinstance(row, PromptError):
                bad += 1
                if bad <= most:
                    print(row)
                continue
            good += 1
            if good <= preview:
                print(_shown(row, render))
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
