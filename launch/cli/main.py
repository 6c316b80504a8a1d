"""The command line. ``--help`` and errors take a fraction of a second: heavy modules are imported by the command that needs them."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.bus.exit_codes import CRASHED
from tidemill.bus.system import output
from tidemill.launch.cli import debug_arguments as debug
from tidemill.launch.cli.parser import CommandParser, PrintVersion
from tidemill.launch.samples import arguments as samples
from tidemill.launch.settings.extras import explain

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = "Asynchronous off-policy reinforcement learning for language models."
INNER = ("feeder", "rank")
"""Commands with which the learner starts its processes; no help lists them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. 2 = wrong use, 78 = a wrong configuration (``bus/exit_codes.py``)."""
    if arguments is None:
        output.guard_standard_files()
    words = list(sys.argv[1:] if arguments is None else arguments)
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
    args = (_inner_parser() if words[:1] and words[0] in INNER else _parser()).parse_args(words)
    _find_modules_here()
    try:
        return _explained(_function(args.command), args)
    except ValueError as bad:  # configuration and input errors state location, expected and actual value
        print(f"tidemill {args.command}: {bad}", file=sys.stderr)
        return int(getattr(bad, "exit_code", 2))
    except KeyboardInterrupt:
        return 130


def _function(command: str) -> Callable[[argparse.Namespace], int]:
    """Return the function of a command, which has its name."""
    from tidemill.launch.cli import commands, run_commands

    name = command.replace("-", "_")
    found: Callable[[argparse.Namespace], int] = getattr(commands if hasattr(commands, name) else run_commands, name)
    return found


def _explained(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run ``command`` and return its exit code. Raises PackagesMissing instead of ModuleNotFoundError where an extra has the module."""
    try:
        return int(command(args))
    except ModuleNotFoundError as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from error


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = CommandParser(prog="tidemill", description=DESCRIPTION)
    parser.add_argument("--version", action=PrintVersion, nargs=0, help="print the version, and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_runs, _add_data, _add_eval, _add_models, _add_processes, _add_router, _add_reward_server, _add_teacher):
        add(commands)
    for add in (_add_hosts, _add_dead, _add_onlookers, debug.add):
        add(commands)
    return parser


def _add_taskset(words: "Commands") -> None:
    taskset = words.add_parser("verifiers", help="write the tasks of a taskset of verifiers as prompts (docs/rollouts.md)")
    taskset.add_argument("taskset", metavar="TASKSET", help="id of the taskset, as in use: verifiers:TASKSET")
    taskset.add_argument("out", metavar="FILE", help="the prompt file, JSONL")
    taskset.add_argument("--python", default="", metavar="PATH", help="interpreter that has verifiers (default: this one)")
    taskset.add_argument("--count", type=int, default=0, metavar="N", help="the first N tasks (default 0 = all)")
    taskset.add_argument("--options", default="{}", metavar="JSON", help="the rollout's options")


def _add_runs(commands: "Commands") -> None:
    up = commands.add_parser("up", help="run everything on this machine, with a live view")
    _configured(up, positional=True)
    how = up.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="resume the run in its directory")
    how.add_argument("--fresh", action="store_true", help="delete the run's directory and start again")
    _from_checkpoint(up)

    config = commands.add_parser("config", help="check a configuration; with --print-config show every value and where it comes from")
    _configured(config, positional=True, required=False)
    config.add_argument("--memory", action="store_true", help="print the memory that each process needs, and end")
    config.add_argument("--schema", action="store_true", help="print a JSON Schema of configuration files, for editors, and end")
    config.add_argument("--reference", action="store_true", help="print docs/configuration.md, every setting with its meaning, and end")

    check = commands.add_parser("check", help="check model, data, reward, bus, disk and memory before a run starts")
    _configured(check, positional=True)
    check.add_argument("--check-reward", action="store_true", help="also call a reward given by import path, on the first row")


def _add_data(commands: "Commands") -> None:
    data = commands.add_parser("data", help="check files of prompts (docs/data.md), write one of a taskset, import responses (docs/sft.md)")
    words = data.add_subparsers(dest="word", required=True, metavar="WORD")
    _add_taskset(words)
    imported = words.add_parser("import", help="make rows of recordings, archives and files of responses")
    imported.add_argument("files", nargs="+", metavar="FILE", help="*.tide, archives, .jsonl")
    imported.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the .jsonl file of rows to write")
    data = words.add_parser("check", help="name every bad row, count and show the others")
    data.add_argument("files", nargs="+", metavar="FILE|CONFIG", help="files or directories of prompts, path@[a:b]; or a run's YAML files")
    data.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="change a setting, such as data.label_key")
    data.add_argument(
        "--most", type=int, default=20, metavar="N", help="bad rows of a file that are named (default 20); others are counted"
    )
    data.add_argument("--preview", type=int, default=1, metavar="N", help="good rows of a file that are shown (default 1)")


def _add_eval(commands: "Commands") -> None:
    eval_ = commands.add_parser("eval", help="score a model on held-out prompts, without a learner (docs/evaluation.md)")
    eval_.add_argument("model", type=Path, metavar="MODEL", help="directory of a Hugging Face model, such as runs/<run>/final")
    eval_.add_argument("data", type=Path, nargs="?", metavar="DATA", help="a .jsonl or .parquet file; without it, eval.sets of --config")
    eval_.add_argument("--config", type=Path, nargs="+", default=[], help="a run's YAML file: its reward, sampling, engine and eval.sets")
    eval_.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="change a setting; may be repeated")
    eval_.add_argument("--reward", default="", metavar="NAME", help="actor.reward: a name, or package.module:function")
    eval_.add_argument("--samples", type=int, default=None, metavar="K", help="with DATA: responses to each prompt (default 1)")
    eval_.add_argument("--temperature", type=float, default=None, metavar="T", help="with DATA: 0 = greedy (default: sampling.temperature)")
    eval_.add_argument("--limit", type=int, default=None, metavar="N", help="with DATA: only the first N prompts")
    eval_.add_argument("--dir", type=Path, default=None, metavar="DIR", help="where logs and samples are kept (default: nowhere)")
    eval_.add_argument("--json", action="store_true", help="print one JSON object for each set")
    eval_.add_argument("--print-config", action="store_true", help="print every setting and where its value comes from, and end")


def _add_models(commands: "Commands") -> None:
    prepare = commands.add_parser("prepare", help="make the small model and the prompts that a configuration asks for")
    _configured(prepare, positional=True)

    convert = commands.add_parser("convert", help="a checkpoint as a Hugging Face directory, or the reverse (docs/lora.md)")
    convert.add_argument(
        "source", type=Path, metavar="FROM", help="a checkpoint (of Tidemill, or Megatron's torch_dist), or a model directory"
    )
    convert.add_argument("out", type=Path, metavar="TO", help="a directory that does not exist yet")
    convert.add_argument(
        "--model", type=Path, default=None, metavar="DIR", help="model of the checkpoint: configuration, tokenizer (default: the run's)"
    )
    convert.add_argument("--bridge", default="", metavar="MODULE:CLASS", help="bridge of the model's family, as learner.bridge")


def _add_processes(commands: "Commands") -> None:
    bus = commands.add_parser("bus", help="an embedded nats-server, or a cluster of three (bus.cluster)")
    _configured(bus)
    bus.add_argument("--auth", action="store_true", help="with users, passwords and permissions: bus.auth=true")
    bus.add_argument("--auth-dir", default="", metavar="DIR", help="directory of their passwords: bus.auth_dir")

    learner = commands.add_parser("learner", help="the learner: a feeder and its ranks")
    _configured(learner)
    _on_bus(learner)
    learner.add_argument("--id", default="", help="its name on the bus")
    learner.add_argument(
        "--nodes",
        action="append",
        dest="set",
        type=lambda count: f"learner.nodes={0 if count == 'auto' else count}",
        metavar="N",
        help="machines with ranks, each with one such command: learner.nodes; auto = from the variables of torchrun or Slurm",
    )
    learner.add_argument(
        "--node-rank", type=int, default=None, metavar="R", help="number of this machine, 0 to N - 1; node 0 is the leader"
    )
    _reached_at(learner)
    learner.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)
    _from_checkpoint(learner)

    workers = (("engine", "an inference engine"), ("actor", "a rollout worker"), ("scorer", "computes the rewards of a run's actors"))
    for name, help_ in workers:
        worker = commands.add_parser(name, help=f"{help_}; needs nothing but the bus")
        _on_bus(worker)
        worker.add_argument("--run", default="", help="name of the run; not needed with --config, or when the bus carries one run")
        worker.add_argument("--id", default="", help="its name on the bus")
        worker.add_argument("--wait", type=float, default=300.0, metavar="S", help="seconds to wait for the bus at the start (default 300)")
        _allowing(worker)
        if name != "actor":
            _reached_at(worker)
        else:
            worker.add_argument(
                "--rollouts",
                action="append",
                dest="set",
                default=[],
                type=lambda names: f"actor.rollouts={json.dumps([name for name in names.split(',') if name])}",
                metavar="NAME,NAME",
                help="load these rollouts alone, and lease their tasks; single_turn = tasks without one (default: all)",
            )
        if name == "scorer":
            worker.add_argument("--port", type=int, default=0, help="port to listen on (default 0 = any free port)")
        _configured(worker, required=False)


def _add_router(commands: "Commands") -> None:
    router = commands.add_parser("router", help="one address for many engines: balance, sessions, token-exact turns, OpenAI's API")
    router.add_argument("--bus", default="", type=samples.bus_url, metavar="URL", help="NATS URL: engines of a run are found there")
    router.add_argument("--run", default="", help="name of the run; not needed when the bus carries one run")
    router.add_argument("--id", default="", help="its name on the bus")
    router.add_argument("--host", default="127.0.0.1", help="address to listen on; auto = that of the interface that leads to the bus")
    router.add_argument("--advertise", default="", metavar="HOST", help="address that other machines use, if not --host")
    router.add_argument(
        "--insecure",
        action="store_true",
        help="answer requests of other machines without the run's key; without --bus, also obey /add_worker and /remove_worker without one",
    )
    router.add_argument("--port", type=int, default=8001, help="0 = any free port")
    router.add_argument("--worker", action="append", default=[], metavar="URL", help="an engine, besides those on the bus; may be repeated")
    router.add_argument("--exact", default="", metavar="MODEL_DIR", help="keep text-based clients token-exact, with this tokenizer")
    router.add_argument(
        "--middleware", action="append", default=[], metavar="PACKAGE.MODULE:FACTORY", help="around every request; may be repeated"
    )
    router.add_argument(
        "--path", action="append", default=[], metavar="PATH", help="forward requests to this path, too (a middleware's); may be repeated"
    )
    router.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="seconds for a request, to its last byte")
    router.add_argument("--wait", type=float, default=60.0, metavar="S", help="seconds that a request waits for an engine that serves")
    router.add_argument("--retries", type=int, default=3, metavar="N", help="more attempts, where repeating is safe")


def _add_reward_server(commands: "Commands") -> None:
    server = commands.add_parser("reward-server", help="host a reward over HTTP, for `actor.reward: remote` and other clients")
    server.add_argument("reward", metavar="NAME", help="a name, or package.module:function")
    server.add_argument("--group", action="store_true", help="it is a reward of groups, for `actor.group_reward: remote`")
    server.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the reward (YAML); may be repeated"
    )
    server.add_argument("--host", default="127.0.0.1", help="address to listen on")
    server.add_argument("--port", type=int, default=8002, help="0 = any free port")
    server.add_argument("--token-env", default="", metavar="VARIABLE", help="variable with the bearer token that requests must have")
    server.add_argument("--insecure", action="store_true", help="answer requests of other machines without a token")
    server.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds for one call of the reward")
    server.add_argument("--workers", type=int, default=16, metavar="N", help="child processes of a plain reward")
    server.add_argument("--memory-mb", type=int, default=4096, metavar="MB", help="private memory of each; 0 = no limit")


def _add_teacher(commands: "Commands") -> None:
    teacher = commands.add_parser("teacher", help="serve a model that scores samples, for on-policy distillation; needs no bus")
    teacher.add_argument("model", type=Path, metavar="MODEL_DIR", help="directory of the model, with the vocabulary of the trained one")
    teacher.add_argument("--host", default="127.0.0.1", help="address to listen on")
    teacher.add_argument("--port", type=int, default=30000, help="0 = any free port")
    teacher.add_argument("--insecure", action="store_true", help="let other machines ask, without a key: nothing can change the model")
    teacher.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where it computes")
    teacher.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto = bfloat16 on CUDA, else float32")
    teacher.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads")
    teacher.add_argument("--max-context", type=int, default=0, metavar="N", help="tokens of a sequence; 0 = what the model allows")


def _add_hosts(commands: "Commands") -> None:
    host = commands.add_parser("host", help="run the engines, scorers and actors of this machine, in the numbers set by `tidemill scale`")
    _on_bus(host)
    host.add_argument("--run", default="", help="name of the run; not needed when the bus carries one run")
    host.add_argument("--name", default="", help="its name on the bus (default: this machine's)")
    host.add_argument(
        "--learner-node", type=int, default=None, metavar="R", help="also run node R of a learner on several machines; wants --config"
    )
    host.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help="the run's YAML file, for --learner-node")
    host.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="change a setting of --config")
    host.add_argument("--pool", default="", help="group of hosts that it belongs to")
    host.add_argument("--users", type=Path, default=None, metavar="DIR", help="credentials of its processes, on a bus with users")
    _reached_at(host)
    host.add_argument("--dir", type=Path, default=None, help="where its logs go (default: runs/hosts/<name>)")
    host.add_argument("--drain", type=float, default=60.0, metavar="S", help="seconds for a process to finish its work")
    host.add_argument(
        "--restarts", type=int, default=5, metavar="N", help="failures of a process in five minutes after which it stays down"
    )
    _allowing(host)
    host.add_argument("wanted", nargs="*", metavar="actors=N|engines=N|scorers=N", help="for this host; default: its share of the total")

    scale = commands.add_parser(
        "scale", help="set the numbers of engines, scorers and actors; without numbers: show the desired and the running ones"
    )
    _looking(scale)
    where = scale.add_mutually_exclusive_group()
    where.add_argument("--host", default="", help="on this host, independent of the others")
    where.add_argument("--pool", default="", help="on all hosts of this pool together")
    scale.add_argument("wanted", nargs="*", metavar="actors=N|engines=N|scorers=N", help="default: on all other hosts together")


def _add_dead(commands: "Commands") -> None:
    dead = commands.add_parser("dead", help="tasks that could not be processed: list them, issue their prompts again, or drop them")
    _looking(dead)
    dead.add_argument("word", nargs="?", choices=("list", "requeue", "drop"), default="list")
    dead.add_argument("tasks", nargs="*", type=int, metavar="TASK", help="these tasks; or --all, or --reason")
    dead.add_argument("--all", action="store_true", help="all tasks; with list: also those that are decided")
    dead.add_argument("--reason", default="", metavar="TEXT", help="tasks with this text in their reason")
    dead.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per line")


def _add_onlookers(commands: "Commands") -> None:
    status = commands.add_parser("status", help="processes, what each waits for, and where the samples are")
    _looking(status)
    status.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per line")

    weights = commands.add_parser("weights", help="version of each engine, and whether all engines of a version have the same bits")
    _looking(weights)
    weights.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per line")

    samples.add_tail(commands.add_parser("tail", help="print new samples as they arrive"))
    samples.add_show(commands.add_parser("show", help="one sample: its tokens, their probabilities, and its outcome"))
    samples.add_stats(commands.add_parser("stats", help="rates, lengths, rewards, lags and pass@k of the newest samples"))
    samples.add_replay(commands.add_parser("replay", help="samples into a file, and from a file or a run into another bus or run"))
    samples.add_archive(commands.add_parser("archive", help="write every sample to files as it arrives; trimming waits for it"))

    metrics = commands.add_parser("metrics", help="give the metrics of each step to TensorBoard, Weights & Biases, a file or your own sink")
    _looking(metrics)
    metrics.add_argument("to", metavar="SINK", help="tensorboard, wandb, jsonl, or package.module:function (docs/looking.md)")
    metrics.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the sink (YAML); may be repeated")
    metrics.add_argument("--from-step", type=int, default=1, metavar="N", help="first step (default 1)")
    metrics.add_argument("--until-end", action="store_true", help="end at the present end of the log")

    cursors = commands.add_parser("cursors", help="registered readers of the samples and their positions; remove one")
    _looking(cursors)
    cursors.add_argument("--forget", default="", metavar="NAME", help="remove this reader: trimming no longer waits for it")


def _inner_parser() -> argparse.ArgumentParser:
    """Return the parser of the internal commands with which the learner starts its processes."""
    parser = argparse.ArgumentParser(prog="tidemill", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in INNER:
        inner = commands.add_parser(name)
        _configured(inner)
        _on_bus(inner)
        inner.add_argument("--feeder-url", required=True)
        inner.add_argument("--epoch", type=int, default=0, help="of this start, if it was raised already")
        inner.add_argument("--progress", type=int, default=-1, metavar="FD", help="inherited descriptor that gets a byte for every step")
        inner.add_argument("--feeder-keys", type=int, required=True, metavar="FD", help="inherited descriptor with the keys of this start")
    return parser


def _find_modules_here() -> None:
    """Add the working directory to ``sys.path``: rewards and losses by import path are found there, as in the processes started."""
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def _configured(parser: argparse.ArgumentParser, *, positional: bool = False, required: bool = True) -> None:
    if positional:
        nargs = "+" if required else "*"
        parser.add_argument("config", type=Path, nargs=nargs, metavar="CONFIG", help="the run's YAML file; of several, later ones win")
    else:
        parser.add_argument("--config", type=Path, nargs="+", required=required, default=[], help="the run's YAML file, or several")
    parser.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="change a setting; may be repeated")
    parser.add_argument("--print-config", action="store_true", help="print every setting and where its value comes from, and end")


def _from_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-checkpoint",
        action="append",
        dest="set",
        type=lambda directory: f"learner.from_checkpoint={Path(directory).resolve()}",
        metavar="DIR",
        help="begin a new run with the weights of this checkpoint: learner.from_checkpoint",
    )


def _looking(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the run to read."""
    parser.set_defaults(ended=False)  # set when the run is found
    parser.add_argument("--run-dir", default="", help="a run's directory on this machine; or --bus and --run")
    parser.add_argument("--bus", default="", type=samples.bus_url, metavar="URL", help="NATS URL, nats://host:port")
    parser.add_argument("--run", default="", help="name of the run; not needed when the bus carries one run")


def _allowing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="accept this setting from the run although it names code, a program or a file here; * for any value; may be repeated",
    )


def _reached_at(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="", help="address to listen on; default: that of the interface that leads to the bus")
    parser.add_argument("--advertise", default="", metavar="HOST[:PORT]", help="address that other machines use, if not --host")


def _on_bus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bus", required=True, type=samples.bus_url, metavar="URL", help="NATS URL, nats://host:port")
