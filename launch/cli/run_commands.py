"""The sub-commands that read or change a run, from any machine that reaches its bus: one function for each, as in ``commands.py``."""

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING

from tidemill.launch.cli.inputs import given_options
from tidemill.launch.run.access import OPERATOR, VIEWER
from tidemill.launch.settings.extras import require

if TYPE_CHECKING:
    from tidemill.bus.streams.bus import Bus


def scale(args: argparse.Namespace) -> int:
    """Set the desired numbers of engines and actors, if any are given, and print them. Returns 0. Raises ValueError."""
    from tidemill.launch.run.desired import parse
    from tidemill.launch.run.scaling import show_scale

    args.counts = parse(args.wanted)
    return _change(args, show_scale)


def dead(args: argparse.Namespace) -> int:
    """List dead tasks, or store a decision on some. Returns 0, or 1 when the learner has not recorded it yet. Raises ValueError."""
    from tidemill.launch.cli.dead_letters import decide_dead_letters, show_dead

    if args.word == "list":
        return _look(args, show_dead)
    if not (args.tasks or args.all or args.reason):
        raise ValueError(f"{args.word}: want ids of tasks, --all or --reason TEXT")
    return _change(args, decide_dead_letters)


def status(args: argparse.Namespace) -> int:
    """Print the state of a run. Returns 0. Raises ValueError when it cannot be read."""
    from tidemill.launch.cli.status import show_status

    return _look(args, show_status)


def weights(args: argparse.Namespace) -> int:
    """Print the version of each engine. Returns 0, or 1 when engines of one version differ. Raises ValueError."""
    from tidemill.launch.cli.weights import show_weights

    return _look(args, show_weights)


def tail(args: argparse.Namespace) -> int:
    """Print samples of the stream; with --follow until interrupted. Returns 0. Raises ValueError."""
    from tidemill.launch.samples.tail import show_tail

    return _look(args, show_tail)


def show(args: argparse.Namespace) -> int:
    """Print one sample with its tokens. Returns 0. Raises ValueError when there is no such sample, or it cannot be read."""
    from tidemill.launch.samples.show import show_sample

    return _look(args, show_sample)


def stats(args: argparse.Namespace) -> int:
    """Print statistics of the newest samples; with --follow until interrupted. Returns 0. Raises ValueError."""
    from tidemill.launch.samples.stats import show_stats

    return _look(args, show_stats)


def replay(args: argparse.Namespace) -> int:
    """Copy samples to a file or another run, or with --train repeat the recorded steps. Returns the exit code. Raises ValueError."""
    if args.train:
        require("learner")
        from tidemill.launch.cli.retrain import retrain

        return retrain(args.run_dir, args.train, args.set)
    from tidemill.launch.run.process import set_up_logging
    from tidemill.launch.samples.replay import replay_file, replay_run

    set_up_logging("replay", level=logging.ERROR)
    if args.source:
        return asyncio.run(replay_file(args))
    return _look(args, replay_run)


def archive(args: argparse.Namespace) -> int:
    """Write samples to recordings until drained. Returns the exit code of ``process.run``. Raises ValueError for errors of the bus, too."""
    from tidemill.launch.samples.archive import archive as archived

    return _read_until_drained(args, lambda url, run, draining: archived(url, run, args, draining), name=args.name, user=OPERATOR)


def metrics(args: argparse.Namespace) -> int:
    """Give the metrics of a run to a sink until drained. Returns and raises as ``archive``; ValueError also for a sink that is refused."""
    from tidemill.launch.metrics.export import export, open_sink

    sink = open_sink(args.to, given_options(args.option))

    async def exported(url: str, run: str, draining: asyncio.Event) -> None:
        """Export, and print the counts of steps and evaluations given to the sink."""
        done = await export(url, run, sink, args, draining)
        had = f", which had {done.had} from before" if done.had else ""
        print(f"{done.steps} steps and {done.evaluations} evaluations given to {args.to}{had}, {done.failures} calls failed")

    return _read_until_drained(args, exported, name=args.to, user=VIEWER)


def cursors(args: argparse.Namespace) -> int:
    """List the registered readers of a run, after --forget removed one. Returns 0. Raises ValueError."""
    from tidemill.launch.cli.readers import show_cursors

    return _change(args, show_cursors) if args.forget else _look(args, show_cursors)


def _read_until_drained(
    args: argparse.Namespace, read: "Callable[[str, str, asyncio.Event], Coroutine[object, None, None]]", *, name: str, user: str
) -> int:
    """Run ``read(url, run, draining)`` on a run, which may be over, as a process of its own. Returns the exit code of ``process.run``.

    Raises ValueError for errors of the bus and of the arguments.
    """
    from tidemill.bus.errors import BusError
    from tidemill.launch.cli.find_run import run_of
    from tidemill.launch.run import process

    process.set_up_logging(args.command, name)
    refused: list[str] = []

    async def body(draining: asyncio.Event) -> None:
        """Read. Errors of the bus and of the arguments are recorded, for the caller to raise as wrong use of the command."""
        try:
            await read(place.url, place.run, draining)
        except (BusError, ValueError) as error:
            refused.append(str(error))

    with run_of(args, user=user) as place:
        args.ended = place.ended
        code = process.run(body, drain_s=60)
    if refused:
        raise ValueError(refused[0])
    return code


def _look(args: argparse.Namespace, look: "Callable[[Bus, argparse.Namespace], Awaitable[int]]") -> int:
    """Find the run, which may be over, and return the exit code of ``look``, which only reads. Raises ValueError."""
    from tidemill.launch.cli.find_run import on_bus, run_of
    from tidemill.launch.run.process import set_up_logging

    set_up_logging(args.command, level=logging.ERROR)
    with run_of(args) as place:
        args.ended = place.ended
        return asyncio.run(on_bus(place.url, place.run, args, look))


def _change(args: argparse.Namespace, change: "Callable[[Bus, argparse.Namespace], Awaitable[int]]") -> int:
    """Find the run, which must not be over, and return the exit code of ``change``. Raises ValueError."""
    from tidemill.launch.cli.find_run import find_run, on_bus
    from tidemill.launch.run.process import set_up_logging

    set_up_logging(args.command, level=logging.ERROR)
    url, run = find_run(args.run_dir, args.bus, args.run, user=OPERATOR)
    return asyncio.run(on_bus(url, run, args, change))
