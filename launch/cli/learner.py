"""``tidemill learner``, and the inner commands with which it starts its feeder and its ranks."""

import argparse
import asyncio
import os
from typing import TYPE_CHECKING

from tidemill.bus.exit_codes import DONE, WRONG_USE
from tidemill.launch.cli.arguments import (
    add_bus,
    add_config,
    add_drained_code,
    add_from_checkpoint,
    add_listening,
    add_probes,
    command_of,
)
from tidemill.launch.cli.inputs import (
    bus_address,
    check_loaded,
    children_arguments,
    loaded_config,
    unprinted_config,
    with_commits_of_run,
    with_iteration,
    with_probes,
)
from tidemill.launch.run.access import auth_dir, learner_user
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.run_config import RunConfig

if TYPE_CHECKING:
    from tidemill.launch.deploy.launchers import Launched
    from tidemill.launch.run.learner_process import NodePlace


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the learner, or of one of its children."""
    add_config(parser)
    add_bus(parser)
    if command_of(parser) == "learner":
        _add_learner(parser)
    else:
        _add_child(parser)


def _add_learner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--id", default="", help="its name on the bus")
    parser.add_argument(
        "--nodes",
        action="append",
        dest="set",
        type=lambda count: f"learner.nodes={0 if count == 'auto' else count}",
        metavar="N",
        help=(
            "machines with ranks, each with one such command: learner.nodes; auto = from the variables of "
            "torchrun or Slurm"
        ),
    )
    parser.add_argument("--node-rank", type=int, metavar="R", help="number of this machine, from 0, the leader")
    add_listening(parser)
    add_drained_code(parser)
    add_probes(parser)
    parser.add_argument(
        "--shadow",
        default="",
        metavar="NAME",
        help="train on the steps of the run with the settings of this command, as run RUN-NAME; push to no engine",
    )
    parser.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)
    add_from_checkpoint(parser)


def _add_child(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--feeder-url", required=True)
    parser.add_argument("--epoch", type=int, default=0, help="of this start, if it was raised already")
    parser.add_argument("--progress", type=int, default=-1, metavar="FD", help="inherited: gets a byte for every step")
    parser.add_argument("--feeder-keys", type=int, required=True, metavar="FD", help="inherited: the keys")


def run(args: argparse.Namespace) -> int:
    """Run the learner, or one of its children. Returns its exit code. Raises CheckFailed."""
    return {"learner": _run_learner, "feeder": _run_feeder, "rank": _run_rank}[args.command](args)


def _run_learner(args: argparse.Namespace) -> int:
    """Run feeder and ranks to the last step, or until drained. Returns the exit code. Raises CheckFailed."""
    if args.shadow:
        of = loaded_config(args).config
        if of.bus.auth and args.shadow not in of.bus.auth_shadows:
            want = f"[{', '.join((*of.bus.auth_shadows, args.shadow))}], with which the bus is started again"
            raise ValueError(f"--shadow: want a user of the bus for it, bus.auth_shadows: {want}; got none")
        name = f"{of.run}-{args.shadow}"
        places = [f"run={name}", f"directory={of.root.parent / name}", f"model.path={of.model.path}"]
        places += [f"bus.auth_dir={auth_dir(of)}"]
        args.set += [*places, f"debug.shadow_of={of.run}", "eval.every=0"]
    config = unprinted_config(args)
    if config is None:
        return 0
    require("learner")
    from tidemill.launch.deploy import launchers, rank_parents
    from tidemill.launch.run.learner_process import NodePlace, node_place

    by_launcher = args.node_rank is None
    place = launchers.rank_process(config, os.environ, os.getppid()) if by_launcher else None
    if place is not None and place.local_rank > 0:
        return _run_parent(args, config, place)
    if place is None:
        return _run_node(args, node_place(config.learner.nodes, args.node_rank, os.environ), None)
    try:
        return _run_node(args, NodePlace(place.nodes, place.node), place)
    except (ValueError, SystemExit) as refused:
        code = refused.code if isinstance(refused, SystemExit) else getattr(refused, "exit_code", WRONG_USE)
        asyncio.run(rank_parents.end_all(place, int(code or 0)))
        raise


def _run_node(args: argparse.Namespace, place: "NodePlace", launched: "Launched | None") -> int:
    """Run this node's part of the learner. ``launched``: the place of this process in a launcher with one a rank."""
    config = loaded_config(args).config
    if place.nodes == 1 and (args.host or args.advertise):
        raise ValueError("--host, --advertise: want --nodes N > 1, got one node: nothing of it listens on the network")
    if place.nodes != config.learner.nodes:
        args.set.append(f"learner.nodes={place.nodes}")  # for the ranks, too
        config = loaded_config(args).config
    from tidemill.launch.deploy import rank_parents
    from tidemill.launch.run import learner_process, process, run_end

    address = bus_address(args, config, learner_user(config)) if args.bus or config.bus.url else ""
    end = run_end.LearnerEnd(config, address, leads=place.rank == 0)
    if address:
        end.begin()
    if not args.checked:
        try:
            loaded = with_commits_of_run(args, loaded_config(args), leads=place.rank == 0)
            check_loaded(args, loaded, starts_workers=False, resumes=True)
        except ValueError as refused:
            if address:  # workers of its run need not wait
                asyncio.run(end.record_failure(refused, wait_s=run_end.REFUSED_S))
            raise
    config = with_iteration(args, loaded_config(args)).config
    process.set_up_logging("learner", args.id or (f"node {place.rank}" if place.nodes > 1 else ""))
    address, words = bus_address(args, config, learner_user(config)), children_arguments(args)

    async def work(draining: asyncio.Event, starts: learner_process.RankStarts) -> None:
        async with end.noted(draining):
            if place.nodes == 1:
                run = learner_process.run_learner
                await run(config, address, args.id, words, draining, starts=starts, on_live=end.lives)
                return
            from tidemill.launch.run import learner_nodes

            node = learner_nodes.Given(place=place, host=args.host, advertise=args.advertise, id=args.id)
            await learner_nodes.run_agent(config, address, node, words, draining, starts=starts, on_live=end.lives)

    def code() -> int:
        return args.drained_code if end.drained else DONE

    async def body(draining: asyncio.Event) -> None:
        async with rank_parents.started(launched, config, draining, code=code) as starts:
            if starts is None:
                end.drained = True
            else:
                await work(draining, starts)

    ended = process.run(with_probes(args, body), drain_s=config.up.drain_s + 5, uvloop=False)
    return code() if ended == DONE else ended


def _run_parent(args: argparse.Namespace, config: RunConfig, place: "Launched") -> int:
    """Be the parent of one rank, for the process of local rank 0. Returns the exit code that the latter has."""
    from tidemill.launch.deploy import rank_parents
    from tidemill.launch.run import process

    process.set_up_logging("learner", f"local rank {place.local_rank}")
    code: int | None = None

    async def body(draining: asyncio.Event) -> None:
        nonlocal code
        code = await rank_parents.run_parent(place, config, draining)

    ended = process.run(body, drain_s=config.up.drain_s + rank_parents.BEHIND_S, uvloop=False)
    if ended != DONE:
        return ended
    return args.drained_code if code is None else code


def _run_feeder(args: argparse.Namespace) -> int:
    config = unprinted_config(args)
    if config is None:
        return 0
    from tidemill.launch.run import feeder_process, process
    from tidemill.learner.feed.feed_keys import FeedKeys

    process.set_up_logging("feeder")
    address, keys = bus_address(args, config, learner_user(config)), FeedKeys.read(args.feeder_keys)
    return process.run(
        lambda draining: feeder_process.run_feeder(config, address, args.feeder_url, keys, draining, epoch=args.epoch),
        drain_s=config.up.drain_s,
    )


def _run_rank(args: argparse.Namespace) -> int:
    """Run one rank of a learner; its number is in the variable RANK. Returns its exit code."""
    config = unprinted_config(args)
    if config is None:
        return 0
    from tidemill.launch.run import feeder_process, process
    from tidemill.learner.feed.feed_keys import FeedKeys

    process.set_up_logging("rank", os.environ.get("RANK", "0"))
    address, keys = bus_address(args, config, learner_user(config)), FeedKeys.read(args.feeder_keys)
    return feeder_process.run_rank(config, address, args.feeder_url, keys, progress=args.progress)
