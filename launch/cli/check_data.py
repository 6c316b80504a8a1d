"""``tidemill data check``: every bad row of prompt files by file and line, the number of good ones, and the first prompts."""

import argparse
import os
from pathlib import Path

from launch.settings.config_loader import load
from learner.config import DataConfig
from learner.data.prompts import Row, refuse_template, scan_rows
from learner.data.source import Source
from learner.errors import PromptError

SHOWN = 400
"""Characters of a prompt that are shown."""


def run_check(args: argparse.Namespace) -> int:
    """Print what the files hold. Returns 0, or 78 when a row is bad. Raises SettingsError, PromptError."""
    bad = sum(_check(source, most=args.most, preview=args.preview) for source in _sources(args))
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


def _check(source: Source, *, most: int, preview: int) -> int:
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
                print(_shown(row))
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


def _shown(row: Row) -> str:
    return f"{row.where}: prompt {row.prompt!a:.{SHOWN}} label {row.label!a:.{SHOWN}}"
