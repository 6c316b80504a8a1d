"""A learner, an engine or an actor that is killed -9, or frozen, at a named instant. Only one function is wrapped.

python -m tests.chaos.dying learner <instant> <signal> <arguments of `tidemill learner`>
python -m tests.chaos.dying engine <phase> <signal> <arguments of `tidemill engine`>
python -m tests.chaos.dying actor <instant> <signal> <arguments of `tidemill actor`>

The learner has one rank; feeder and rank are started as by `tidemill learner`, one of them with the instant's function
wrapped, and so are engine and actor: at its n-th call the process sends the signal (KILL or STOP) to its whole process
group and to those of all its children (KILL-SERVER, STOP-SERVER: to the children's alone; TERM: to itself alone). The
file <instant>.died (of an engine or actor: <its name>.died) beside the run's directory records that the instant was
reached; an actor's names the sample, <task>.<index>.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.forked import Forked
from tidemill.bus.client.addresses import KeptPort
from tidemill.launch.cli.main import main
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.ranks.process import NodePart, _rank_environment

INSTANTS = {
    "planned": ("feeder", "tidemill.learner.feed.feeder_loops:Feeder._apply", 4),
    "fetched": ("rank", "tidemill.learner.trainer.trainer:Trainer.train", 5),
    "stepping": ("rank", "tidemill.learner.trainer.optimizer:Optimizer.step", 4),
    "stepped": ("rank", "tidemill.learner.feed.feed_client:FeedClient.done", 5),
    "reported": ("feeder", "tidemill.learner.feed.outcomes:Outcomes._step_done", 4),
    "pushed": ("rank", "tidemill.weightstore.store.registry:VersionRegistry.publish", 3),
    "due": ("rank", "tidemill.learner.ranks.checkpoints:Checkpoints.begin", 2),
    "writing": ("rank", "torch.distributed.checkpoint.filesystem:_write_item", 12),
    "written": ("rank", "tidemill.learner.ranks.checkpoints:Checkpoints._concluded", 1),
    "indexed": ("rank", "tidemill.learner.checkpoints.disk:write_manifest", 1),
    "listed": ("rank", "tidemill.learner.checkpoints.disk:publish", 1),
    "named": ("rank", "tidemill.learner.feed.feed_client:FeedClient.checkpointed", 1),
    "committed": ("feeder", "tidemill.learner.feed.outcomes:Outcomes._trim", 1),
    "pruned": ("feeder", "tidemill.bus.streams.tasks:TaskQueue.raise_floor", 1),
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
    "joining": ("tidemill.actors.serving.builtin.weight_updates:BuiltinUpdates.join", 1),
    "beginning": ("tidemill.actors.serving.builtin.weight_updates:BuiltinUpdates.begin", 2),
    "receiving": ("tidemill.actors.serving.builtin.weight_updates:BuiltinUpdates._receive", 2),
    "writing": ("tidemill.actors.serving.builtin.weight_updates:BuiltinUpdates._write", 2),
    "verifying": ("tidemill.actors.serving.builtin.weight_updates:BuiltinUpdates.checksum_report", 1),
    "ending": ("tidemill.actors.serving.builtin.weight_updates:BuiltinUpdates.end", 2),
    "flipping": ("tidemill.actors.serving.builtin.weight_updates:BuiltinUpdates._flip", 2),
    "between": ("tidemill.actors.serving.host:EngineHost._updated", 3),
}
"""Phases of a push: the engine's function, and the number of the call on which it dies."""

SGLANG_PHASES = {
    "sglang joining": ("tidemill.actors.serving.sglang.weight_updates:SglangUpdates.join", 1),
    "sglang beginning": ("tidemill.actors.serving.sglang.weight_updates:SglangUpdates.begin", 2),
    "sglang receiving": ("tidemill.actors.serving.sglang.weight_updates:SglangUpdates.receive_bucket", 2),
    "sglang verifying": ("tidemill.actors.serving.sglang.weight_updates:SglangUpdates.checksum_report", 1),
    "sglang ending": ("tidemill.actors.serving.sglang.weight_updates:SglangUpdates.end", 2),
    "sglang between": ("tidemill.actors.serving.host:EngineHost._updated", 3),
}
"""Phases in the proxy of a real SGLang server."""


@dataclass(frozen=True)
class Point:
    """An instant of an episode: the first call of an asynchronous function of the actor for whose arguments ``at`` is
    true.
    """

    where: str
    sample: Callable[..., str]
    """Returns <task>.<index> of the sample, from the call's arguments."""
    at: Callable[..., bool] = lambda *_: True
    behind: bool = False
    """True = when the call has returned; False = before it."""


def _record(kind: str, number: int, *, behind: bool) -> Point:
    """Return the instant before or behind the storing of a record in TURNS."""
    return Point(
        "tidemill.bus.streams.episode_turns:TurnStream.store",
        lambda _, record, *__: f"{record.task}.{record.index}",
        lambda _, record, *__: (record.kind, record.number) == (kind, number),
        behind,
    )


EPISODE = {
    "untaken": _record("take", 0, behind=False),
    "taken": _record("take", 0, behind=True),
    "unstored": _record("turn", 1, behind=False),
    "stored": _record("turn", 1, behind=True),
    "acted": Point(
        "tidemill.actors.episodes.model_calls:ModelCalls._call",
        lambda calls, *_: f"{calls.episode.task.id}.{calls.episode.index}",
        lambda calls, *_: len(calls.episode.recorder) == 2,
    ),
    "unscored": Point(
        "tidemill.actors.actor.sample_scoring:SampleScorer.score",
        lambda _, task, made: f"{task.id}.{made.sample.index}",
    ),
    "scored": Point(
        "tidemill.actors.actor.loop:Actor._publish", lambda _, samples: f"{samples[0].task}.{samples[0].index}"
    ),
    "published": Point(
        "tidemill.actors.episodes.turn_log:TurnLog.end", lambda log, _: f"{log._log._task}.{log._log._index}"
    ),
    "ended": Point("tidemill.bus.streams.tasks:Lease.ack", lambda lease: f"{lease.task.id}.0"),
}
"""Instants of an episode of three turns:

untaken      the task is leased, the episode not begun
taken        the episode is this actor's, no turn is made
unstored     the second turn is generated, not stored
stored       it is stored, not delivered
acted        it is delivered and the environment has acted; the third is asked for
unscored     the program has ended, there is no reward
scored       the reward is there, the sample is not stored
published    the sample is stored, the log does not say so
ended        the log says so, the task is not acknowledged
"""


def engine(phase: str, how: str, arguments: list[str]) -> int:
    where, nth = (PHASES | SGLANG_PHASES)[phase]
    name = arguments[arguments.index("--id") + 1]
    die_at(where, nth, how, _mark(arguments, name))
    return main(["engine", *arguments])


def actor(instant: str, how: str, arguments: list[str]) -> int:
    point = EPISODE[instant]
    mark, done = _mark(arguments, arguments[arguments.index("--id") + 1]), False
    owner, name = _owner(point.where)
    original = getattr(owner, name)

    async def dying(*args: Any) -> Any:
        nonlocal done
        now = not done and point.at(*args)
        done |= now
        if now and not point.behind:
            _mark_and_strike(mark, point.sample(*args), how)
        result = await original(*args)
        if now and point.behind:
            _mark_and_strike(mark, point.sample(*args), how)
        return result

    setattr(owner, name, dying)
    return main(["actor", *arguments])


def _mark_and_strike(mark: Path, sample: str, how: str) -> None:
    mark.with_suffix(".new").write_text(sample)
    mark.with_suffix(".new").rename(mark)
    _strike(how)


def learner(instant: str, how: str, arguments: list[str]) -> int:
    """Run both children; return 0 when both have ended well. They are in this process' group, so a signal to the group
    kills all.
    """
    with KeptPort() as port, KeptPort() as feeder:
        url, keys = f"tcp://127.0.0.1:{feeder.number}", FeedKeys.new()
        part = NodePart(num_ranks=1, world=1, master=("127.0.0.1", port.number), feeder_url=url, listen=url, keys=keys)
        return _children(instant, how, [*arguments, "--feeder-url", url], part)


def _children(instant: str, how: str, tail: list[str], part: NodePart) -> int:
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
    """Wrap a function (``module:name`` or ``module:Class.name``): at its n-th call this process gets the signal, and
    ``mark`` is made.
    """
    owner, name = _owner(where)
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            mark.touch()
            _strike(how)
        return original(*args, **kwargs)

    setattr(owner, name, dying)


def _owner(where: str) -> tuple[Any, str]:
    """Return the module or class of a function, and its name."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name


def _strike(how: str) -> None:
    name, _, children_only = how.partition("-")
    struck = signal.Signals[f"SIG{name}"]
    if struck is signal.SIGTERM:
        os.kill(os.getpid(), struck)
        return
    groups = {os.getpgid(child.pid) for child in psutil.Process().children(recursive=True)} - {os.getpgrp()}
    for group in groups:
        os.killpg(group, struck)
    if not children_only:
        os.killpg(0, struck)


if __name__ == "__main__":
    what, when, how, *rest = sys.argv[1:]
    if what in ("learner", "engine", "actor"):
        sys.exit({"learner": learner, "engine": engine, "actor": actor}[what](when, how, rest))
    sys.exit(child(what, when, how, rest))
