"""A learner or an engine that is killed -9, or frozen, at a named instant. Only the entry of one function is changed.

python -m tests.chaos.dying learner <instant> <signal> <arguments of `tidemill learner`>
python -m tests.chaos.dying engine <phase> <signal> <arguments of `tidemill engine`>

The learner has one rank; feeder and rank are started as by `tidemill learner`, one of them with the instant's function wrapped, and so
is the engine: at its n-th call the process sends the signal (KILL or STOP) to its whole process group and to those of all its children
(KILL-SERVER, STOP-SERVER: to the children's alone). The file <instant>.died (of an engine: <its name>.died) beside the run's directory
records that the instant was reached.
"""

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from bus.server.ports import KeptPort
from launch.cli.main import main
from learner.feed.feed_keys import FeedKeys
from learner.ranks.process import Part, _rank_environment
from tests.forked import Forked

INSTANTS = {
    "planned": ("feeder", "learner.feed.feeder_loops:Feeder._take", 4),
    "fetched": ("rank", "learner.megatron.trainer:Trainer.train", 5),
    "stepping": ("rank", "learner.megatron.optimizer:PolicyOptimizer.step", 4),
    "stepped": ("rank", "learner.feed.feed_client:FeedClient.done", 5),
    "reported": ("feeder", "learner.feed.outcomes:Outcomes._step_done", 4),
    "pushed": ("rank", "weightstore.store.registry:VersionRegistry.publish", 3),
    "due": ("rank", "learner.ranks.checkpoints:Checkpoints.begin", 2),
    "writing": ("rank", "torch.distributed.checkpoint.filesystem:_write_item", 12),
    "written": ("rank", "learner.ranks.checkpoints:Checkpoints._concluded", 1),
    "indexed": ("rank", "learner.checkpoints.disk:write_manifest", 1),
    "listed": ("rank", "learner.checkpoints.disk:publish", 1),
    "named": ("rank", "learner.feed.feed_client:FeedClient.checkpointed", 1),
    "committed": ("feeder", "learner.feed.outcomes:Outcomes._trim", 1),
    "pruned": ("feeder", "bus.streams.tasks:TaskQueue.raise_floor", 1),
}
"""Instants: the process, the function, and the number of the call on which it dies, before any of its work:

planned      the plan is in the log, no rank has it
fetched      a rank has its batch
stepping     the gradients are there, the weights are the old ones
stepped      the weights are the new ones, which is not reported yet
reported     the feeder has the report, the log does not
pushed       engines have the version, the registry's head is the one before
due          the step of a checkpoint is done
writing      a rank's file has some of its tensors
written      the ranks' files are there, no index, no state and no manifest
indexed      index and state are there, too, no manifest
listed       the manifest is there, the directory has no name
named        the directory has its name, which no row has
committed    the row names it, nothing is pruned or trimmed
pruned       older checkpoints are gone, task floor and streams are untouched
"""


PHASES = {
    "joining": ("actors.serving.builtin.weight_updates:WeightUpdates.join", 1),
    "beginning": ("actors.serving.builtin.weight_updates:WeightUpdates.begin", 2),
    "receiving": ("actors.serving.builtin.weight_updates:WeightUpdates._receive", 2),
    "writing": ("actors.serving.builtin.weight_updates:WeightUpdates._write", 2),
    "verifying": ("actors.serving.builtin.weight_updates:WeightUpdates.checksum_report", 1),
    "ending": ("actors.serving.builtin.weight_updates:WeightUpdates.end", 2),
    "flipping": ("actors.serving.builtin.weight_updates:WeightUpdates._flip", 2),
    "between": ("actors.serving.host:EngineHost._updated", 3),
}
"""Phases of a push: the engine's function, and the number of the call on which it dies."""

SGLANG_PHASES = {
    "sglang joining": ("actors.serving.sglang.weight_updates:WeightUpdates.join", 1),
    "sglang beginning": ("actors.serving.sglang.weight_updates:WeightUpdates.begin", 2),
    "sglang receiving": ("actors.serving.sglang.weight_updates:WeightUpdates.receive_bucket", 2),
    "sglang verifying": ("actors.serving.sglang.weight_updates:WeightUpdates.checksum_report", 1),
    "sglang ending": ("actors.serving.sglang.weight_updates:WeightUpdates.end", 2),
    "sglang between": ("actors.serving.host:EngineHost._updated", 3),
}
"""Phases in the proxy of a real SGLang server."""


def engine(phase: str, how: str, arguments: list[str]) -> int:
    where, nth = (PHASES | SGLANG_PHASES)[phase]
    name = arguments[arguments.index("--id") + 1]
    die_at(where, nth, how, _mark(arguments, name))
    return main(["engine", *arguments])


def learner(instant: str, how: str, arguments: list[str]) -> int:
    """Run both children; return 0 when both have ended well. They are in this process' group, so a signal to the group kills all."""
    with KeptPort() as port, KeptPort() as feeder:
        url, keys = f"tcp://127.0.0.1:{feeder.number}", FeedKeys.new()
        part = Part(num_ranks=1, world=1, master=("127.0.0.1", port.number), feeder_url=url, listen=url, keys=keys)
        return _children(instant, how, [*arguments, "--feeder-url", url], part)


def _children(instant: str, how: str, tail: list[str], part: Part) -> int:
    environments = {"feeder": {}, "rank": _rank_environment(part, 0, 1)}
    keys = part.keys
    descriptors = {role: keys.pipe() for role in environments}
    children = [
        Forked.module(
            "tests.chaos.dying",
            [role, instant, how, *tail, "--feeder-keys", str(descriptors[role])],
            Path("/dev/stdout"),
            extra,
            descriptors=[descriptors[role]],
            session=False,
        )
        for role, extra in environments.items()
    ]
    return max(child.wait() for child in children)


def child(role: str, instant: str, how: str, arguments: list[str]) -> int:
    whose, where, nth = INSTANTS[instant]
    if whose == role:
        die_at(where, nth, how, _mark(arguments, instant))
    return main([role, *arguments])


def _mark(arguments: list[str], instant: str) -> Path:
    directory = next(word.split("=", 1)[1] for word in arguments if word.startswith("directory="))
    return Path(directory).with_name(f"{instant}.died")


def die_at(where: str, nth: int, how: str, mark: Path) -> None:
    """Wrap a function (``module:name`` or ``module:Class.name``): at its n-th call this process gets the signal, and ``mark`` is made."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            mark.touch()
            _strike(how)
        return original(*args, **kwargs)

    setattr(owner, name, dying)


def _strike(how: str) -> None:
    name, _, children_only = how.partition("-")
    struck = signal.Signals[f"SIG{name}"]
    groups = {os.getpgid(child.pid) for child in psutil.Process().children(recursive=True)} - {os.getpgrp()}
    for group in groups:
        os.killpg(group, struck)
    if not children_only:
        os.killpg(0, struck)


if __name__ == "__main__":
    what, when, how, *rest = sys.argv[1:]
    if what in ("learner", "engine"):
        sys.exit({"learner": learner, "engine": engine}[what](when, how, rest))
    sys.exit(child(what, when, how, rest))
