"""``tidemill data``: checks prompts row by row, writes a taskset's tasks as prompts, and imports responses."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.actors.rollout_settings import OF_VERIFIERS, VERIFIERS, RolloutConfig
from tidemill.actors.text.text import Text
from tidemill.bus.section import read
from tidemill.bus.system.limits import environment
from tidemill.launch.checks.data import tokens_of
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import check_model
from tidemill.launch.checks.rows import row_check
from tidemill.launch.checks.tokens import check_tokenizer
from tidemill.launch.cli.inputs import loaded_config, path_here, with_fetched
from tidemill.launch.samples.recording import import_files
from tidemill.launch.settings.config_loader import Loaded
from tidemill.launch.settings.run_paths import config_file
from tidemill.learner.data import DataConfig, Source
from tidemill.learner.errors import PromptError, TemplateLacks
from tidemill.learner.prompts.rows import PromptRow, RowRules, RowTokens, refuse_template, scan_rows

if TYPE_CHECKING:
    Words = argparse._SubParsersAction[argparse.ArgumentParser]

Rendering = Callable[[PromptRow], str]
# Program that prints the tasks, run by the interpreter that has verifiers.
VERIFIERS_PROGRAM = VERIFIERS.rpartition(":")[0]
SHOWN = 400  # Characters of a prompt that are shown


def add(parser: argparse.ArgumentParser) -> None:
    """Add its words and their arguments."""
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    _add_taskset(words)
    imported = words.add_parser("import", help="make rows of recordings, archives and files of responses")
    imported.add_argument("files", nargs="+", metavar="FILE", help="*.tide, archives, .jsonl")
    imported.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the .jsonl file of rows")
    check = words.add_parser("check", help="name every bad row, count and show the others")
    check.add_argument("files", nargs="+", metavar="FILE|CONFIG", help="prompts, or org/name; or a run's YAML files")
    check.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="change a setting")
    check.add_argument("--most", type=int, default=20, metavar="N", help="bad rows named of a file")
    check.add_argument("--preview", type=int, default=1, metavar="N", help="good rows of a file that are shown")


def _add_taskset(words: "Words") -> None:
    about = "write the tasks of a taskset of verifiers as prompts (docs/rollouts.md)"
    taskset = words.add_parser("verifiers", help=about)
    taskset.add_argument("taskset", metavar="TASKSET", help="id of the taskset, as in use: verifiers:TASKSET")
    taskset.add_argument("out", metavar="FILE", help="the prompt file, JSONL")
    taskset.add_argument("--python", default="", metavar="PATH", help="interpreter with verifiers (default: this one)")
    taskset.add_argument("--count", type=int, default=0, metavar="N", help="the first N tasks (default 0 = all)")
    taskset.add_argument("--options", default="{}", metavar="JSON", help="the rollout's options")


def run(args: argparse.Namespace) -> int:
    """Check prompt files (78 for bad rows), write a taskset's, or import responses. Raises PromptError, ValueError."""
    if args.word == "verifiers":
        return write_tasks(args)
    if args.word == "import":
        print(*import_files(args.files, args.out), sep="\n")
        return 0
    return run_check(args)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """How rows are read, beyond their columns."""

    rules: RowRules = field(default_factory=RowRules)
    recorded: Collection[str] = ()  # Rollouts with recorded responses
    tokens: RowTokens | None = None  # None without a model
    render: Rendering | None = None  # Shows the tokens of a row; None without a model

    def row(self, row: PromptRow | PromptError) -> PromptRow | PromptError:
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
    args.config = [file for file in map(config_file, args.files) if file.suffix in (".yaml", ".yml")]
    loaded, _ = with_fetched(args, loaded_config(args))
    reader = _reader(args, loaded)
    bad = sum(_check(source, reader, max_named=args.most, preview=args.preview) for source in _sources(args, loaded))
    return PromptError.exit_code if bad else 0


def _sources(args: argparse.Namespace, loaded: Loaded) -> list[Source]:
    if args.config and len(args.config) < len(args.files):
        raise ValueError(f"want either the YAML files of a run or files of prompts, got both: {', '.join(args.files)}")
    data: DataConfig = loaded.config.data
    if args.config and not data.used:
        raise ValueError(f"{args.config[-1]}: want data.path or data.sources, got neither")
    if args.config:
        return data.used
    paths = map(path_here, args.files)
    return [source for path in paths for source in DataConfig(**{**vars(data), "path": path, "sources": {}}).used]


def _reader(args: argparse.Namespace, loaded: Loaded) -> RowReader:
    """Return how rows are read, with the tokens of the model that the settings name, if there. Raises CheckFailed."""
    config, directory = loaded.config, Path(loaded.config.model.path)
    reader = RowReader(recorded=config.recorded_rollouts)
    if not config.model.path or not (directory / "config.json").is_file():
        return reader
    report = Report(loaded.origins)
    model = check_model(report, config, prepared=False)
    tokenize = None if model is None else check_tokenizer(report, config, model)
    report.refuse()
    text = Text.read(directory)
    if model is None or tokenize is None or text is None:
        return reader
    # Files alone are of no run, which has a longest response
    longest = config.sampling.max_new_tokens if args.config else 0
    tokens = tokens_of(config, config.data, model, tokenize, max_new_tokens=longest)
    if args.config:
        rules = RowRules(unfit=row_check(config, max_new_tokens=longest, vocab_size=model.vocab_size))
        reader = replace(reader, rules=rules)
    return reader if tokens is None else replace(reader, tokens=tokens, render=partial(_rendered, tokens, text))


def _rendered(tokens: RowTokens, text: Text, row: PromptRow) -> str:
    prompt, recorded = tokens.of(row)
    if not recorded:
        return f"{len(prompt)} tokens {text.decode(prompt.tolist(), skip_special=False)!a:.{SHOWN}}"
    texts = []
    for response in recorded:
        all_ids, trained_ids = response.tokens, response.tokens[-len(response.loss_mask) :][response.loss_mask == 1]
        whole, trained = (text.decode(ids.tolist(), skip_special=False) for ids in (all_ids, trained_ids))
        trained = f"{len(trained_ids)} of them trained: {trained!a:.{SHOWN}}"
        texts.append(f"{len(all_ids)} tokens {whole!a:.{SHOWN}}, {trained}")
    return "; ".join(texts)


def _check(source: Source, reader: RowReader, *, max_named: int, preview: int) -> int:
    """Print the bad rows of a source, the first good ones and the counts. Returns the number of errors."""
    refuse_template(source.template)
    good, bad = 0, 0
    try:
        for scanned in scan_rows(source):
            row = reader.row(scanned)
            if isinstance(row, PromptError):
                bad += 1
                if bad <= max_named:
                    print(row)
                continue
            good += 1
            if good <= preview:
                print(_shown(row, reader.render))
    except PromptError as error:  # the rest of the file cannot be read
        bad += 1
        print(error)
    if bad > max_named:
        print(f"{source}: {bad - max_named} more bad rows")
    if not good and not bad:
        bad = 1
        print(PromptError(str(source), "at least one prompt", "none"))
    print(f"{source}: {good} prompts, {bad} errors")
    return bad


def _shown(row: PromptRow, render: Rendering | None) -> str:
    line = f"{row.where}: prompt {row.prompt!a:.{SHOWN}} label {row.label!a:.{SHOWN}}"
    if row.metadata:
        line += f" metadata {row.metadata!a:.{SHOWN}}"
    return line if render is None else f"{line} {render(row)}"


def write_tasks(args: argparse.Namespace) -> int:
    """Write the file whole, or not at all. Returns 0. Raises ValueError for bad arguments, PromptError."""
    python, out = args.python or sys.executable, Path(args.out)
    if args.count < 0:
        raise ValueError(f"--count: want a whole number >= 0 (0 = all), got {args.count}")
    try:
        options = json.loads(args.options)
    except ValueError as error:
        raise ValueError(f"--options: want JSON, as in rollouts.NAME.options: {error}") from None
    read(RolloutConfig, {"use": f"{OF_VERIFIERS}{args.taskset}", "options": options}, "the arguments' rollouts.taskset")
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            command = [python, VERIFIERS_PROGRAM, args.taskset, json.dumps(options), str(args.count)]
            done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, env=environment(os.environ))
        if done.returncode:
            why = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise PromptError(args.taskset, f"a taskset that {python} can read", f"{why}{_cure_of_import(why)}")
        with part.open(encoding="utf-8") as file:
            count = sum(1 for _ in file)
        if not count:
            raise PromptError(args.taskset, "a taskset with tasks", "none")
        part.replace(out)
    except OSError as error:
        want = "a file or program that can be opened"
        raise PromptError(str(error.filename or out), want, error.strerror or error) from None
    finally:
        part.unlink(missing_ok=True)
    settings = f"data.path={out}, data.metadata_key=metadata"
    rollout = f"a rollout with use: {OF_VERIFIERS}{args.taskset}"
    print(f"{out}: {count} prompts of {args.taskset}; train on them with {settings} and {rollout}")
    return 0


def _cure_of_import(why: str) -> str:
    return "; name the interpreter that has verifiers with --python" if "No module named 'verifiers'" in why else ""
