"""The command line: the table of commands, and the run of one. Each command is in a module beside this one, with
``add`` and ``run`` (or ``add_<command>`` and ``run_<command>``).

Only the module of the given command is imported, so ``--help`` and errors take a fraction of a second.
"""

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module

from tidemill.bus.exit_codes import CRASHED
from tidemill.bus.system import output
from tidemill.launch.cli.arguments import CommandParser, PrintVersion
from tidemill.launch.settings.extras import explain

DESCRIPTION = "Asynchronous off-policy reinforcement learning for language models."
# Help of each command.
COMMANDS: Mapping[str, str] = {
    "init": "write the files of a new run here: its configuration, with comments, and examples of its data",
    "up": "run everything on this machine, with a live view",
    "config": "check a configuration; with --print-config show every value and where it comes from",
    "check": "check model, data, reward, bus, disk and memory before a run starts",
    "data": "check files of prompts (docs/data.md), write one of a taskset, import responses (docs/sft.md)",
    "eval": "score a model on held-out prompts, without a learner (docs/evaluation.md)",
    "prepare": "make the small model and the prompts that a configuration asks for",
    "convert": "a checkpoint as a Hugging Face directory, or the reverse (docs/lora.md)",
    "push": "the model of a finished run into a repository of the Hugging Face Hub",
    "bus": "an embedded nats-server, or a cluster of three (bus.cluster)",
    "learner": "the learner: a feeder and its ranks",
    "engine": "an inference engine; needs nothing but the bus",
    "actor": "a rollout worker; needs nothing but the bus",
    "scorer": "computes the rewards of a run's actors; needs nothing but the bus",
    "router": "one address for many engines: balance, sessions, token-exact turns, OpenAI's API",
    "reward-server": "host a reward over HTTP, for `actor.reward: remote` and other clients",
    "teacher": "serve a model that scores samples, for on-policy distillation; needs no bus",
    "host": "run the engines, scorers and actors of this machine, in the numbers set by `tidemill scale`",
    "ray": "run everything inside an existing Ray cluster, each process in a Ray actor (docs/ray.md)",
    "slurm": "sbatch files of a run on a Slurm cluster, written and submitted (docs/slurm.md)",
    "scale": "set the numbers of engines, scorers and actors; without numbers: show the desired and the running ones",
    "dead": "tasks that could not be processed: list them, issue their prompts again, or drop them",
    "status": "processes, what each waits for, and where the samples are",
    "audit": "the accounting of every sample of a run, however its processes were started; waits for its end (--wait)",
    "runs": "the runs on one bus: state, step, stored and reserved bytes, processes",
    "top": "a run of many hosts on a terminal: a line for each, and the processes that need a look",
    "weights": "version of each engine, and whether all engines of a version have the same bits",
    "tail": "print new samples as they arrive",
    "show": "one sample: its tokens, their probabilities, and its outcome",
    "texts": "responses of the first and the last evaluated version to held-out prompts, side by side",
    "replay": "samples into a file, and from a file or a run into another bus or run",
    "archive": "write every sample to files as it arrives; trimming waits for it",
    "backup": "the bus and the checkpoints of a run at one instant, in a directory; the run goes on",
    "rotate": "new passwords for users of a bus, and its certificates read again, while it runs",
    "restore": "a backup as the directory of a run, on any machine",
    "metrics": "give the metrics of each step to TensorBoard, W&B, Prometheus, a file or your own sink",
    "dashboard": "the page of a run in a browser, live or ended; or in one HTML file (docs/dashboard.md)",
    "cursors": "registered readers of the samples and their positions; remove one",
    "debug": "find where numbers go wrong: compare dumps and weights, score prompts (docs/debugging.md)",
}
# Processes whose output is a log: it is lost, and no error, when its reader has ended or its disk is full
_WITH_LOGS = frozenset(
    {"learner", "feeder", "rank", "engine", "actor", "scorer", "host", "router", "bus", "teacher", "reward-server"}
)
# Options with which they print a result, and end
_RESULTS = frozenset({"--print-config", "--make-users", "--help", "-h"})
INNER = ("feeder", "rank")  # Commands with which the learner starts its processes; no help lists them
# Modules of commands that share ``add`` and ``run``; each other command has a module of its name, or is in ``_WITH``.
_MODULES = {**dict.fromkeys(("engine", "actor", "scorer"), "worker"), **dict.fromkeys(INNER, "learner")}
# Modules of commands that are in one with others, and have functions of their own there: ``add_check``, ``run_check``.
_WITH = {
    **dict.fromkeys(("bus", "router", "reward-server", "teacher"), "servers"),
    **dict.fromkeys(("check", "prepare"), "config"),
    "cursors": "archive",
    "restore": "backup",
    "scale": "host",
    "texts": "eval",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. 2 = wrong use, 78 = a wrong configuration (``bus/exit_codes.py``)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        prints_log = bool(_WITH_LOGS.intersection(words[:1])) and not _RESULTS.intersection(words)
        output.guard_standard_files(is_log=prints_log)
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()
    except output.Unwritable as error:
        if error.at_end:
            return 0
        print(f"tidemill {words[0] if words else ''}: {error}", file=sys.stderr)
        return CRASHED


def _run(words: Sequence[str]) -> int:
    args = (inner_parser() if words[:1] and words[0] in INNER else command_parser(words[:1])).parse_args(words)
    _find_modules_here()
    try:
        return _explained(args)
    except ValueError as bad:  # configuration and input errors state location, expected and actual value
        print(f"tidemill {args.command}: {bad}", file=sys.stderr)
        return int(getattr(bad, "exit_code", 2))
    except KeyboardInterrupt:
        return 130


def _explained(args: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises PackagesMissing where an extra has a missing module."""
    try:
        return int(args.run_command(args))
    except ModuleNotFoundError as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from error


def command_parser(declared: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of all commands; modules of ``declared`` ones are imported, and add their arguments."""
    parser: argparse.ArgumentParser = CommandParser(prog="tidemill", description=DESCRIPTION)
    parser.add_argument("--version", action=PrintVersion, nargs=0, help="print the version, and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in declared:
            _declare(command, name)
    return parser


def inner_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tidemill", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in INNER:
        _declare(commands.add_parser(name), name)
    return parser


def _declare(parser: argparse.ArgumentParser, command: str) -> None:
    name = command.replace("-", "_")
    module = import_module(f".{_WITH.get(command) or _MODULES.get(command, name)}", __package__)
    suffix = f"_{name}" if command in _WITH else ""
    getattr(module, f"add{suffix}")(parser)
    parser.set_defaults(run_command=getattr(module, f"run{suffix}"))


def _find_modules_here() -> None:
    """Add the working directory to the end of ``sys.path``, for rewards and losses by import path.

    At its end, because a file there may have the name of a module of Python or of a package. PYTHONSAFEPATH keeps the
    directory out.
    """
    if not os.environ.get("PYTHONSAFEPATH") and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
