"""``tidemill host``: the engines, scorers and actors of one machine, and a node of the learner
(``tidemill.launch.run.host``).
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.launch.cli.arguments import add_allow, add_bus, add_listening
from tidemill.launch.cli.inputs import (
    check_loaded,
    children_arguments,
    loaded_config,
    reached_at,
    user_name,
    with_commits_of_run,
)
from tidemill.launch.run.access import allowed
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.shipped import config_file

if TYPE_CHECKING:
    from tidemill.launch.run.host import HostLearner


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_bus(parser)
    parser.add_argument("--run", default="", help="name of the run; not needed when the bus carries one run")
    parser.add_argument("--name", default="", help="its name on the bus (default: this machine's)")
    parser.add_argument("--learner-node", type=int, metavar="R", help="also run node R of a learner; wants --config")
    parser.add_argument(
        "--config", type=config_file, action="append", default=[], metavar="FILE", help="for --learner-node"
    )
    parser.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="for --config")
    parser.add_argument("--pool", default="", help="group of hosts that it belongs to")
    parser.add_argument("--users", type=Path, metavar="DIR", help="credentials on a bus with users")
    add_listening(parser)
    parser.add_argument("--dir", type=Path, default=None, help="where its logs go (default: runs/hosts/<name>)")
    parser.add_argument("--drain", type=float, default=60.0, metavar="S", help="seconds for a process to end its work")
    parser.add_argument("--restarts", type=int, default=5, metavar="N", help="failures of one in five minutes")
    add_allow(parser)
    parser.add_argument("wanted", nargs="*", metavar="actors=N|engines=N|scorers=N", help="default: a share")


def run(args: argparse.Namespace) -> int:
    """Run this machine's engines and actors until drained. Returns the exit code. Raises HostExists."""
    from tidemill.actors.engines.membership import host_name
    from tidemill.launch.run import process
    from tidemill.launch.run.desired import parse
    from tidemill.launch.run.directory import HostExists, only_one
    from tidemill.launch.run.host import Machine, run_host, users_in

    name = args.name or user_name() or host_name()
    counts = parse(args.wanted)
    if counts.get("engine"):
        require("engine")
    machine = Machine(
        name=name,
        pool=args.pool,
        own=counts,
        directory=args.dir or Path("runs/hosts") / name,
        drain_s=args.drain,
        restarts=args.restarts,
        users=None if args.users is None else users_in(args.users),
        allowed=allowed(args.allow, os.environ),
        server_words=reached_at(args),
        learner=_learner_node(args),
    )
    process.set_up_logging("host", name)

    with only_one(machine.directory, name):
        return process.run_refusing(
            lambda draining: run_host(args.run, args.bus, draining, machine),
            drain_s=2 * args.drain + 30,
            refusals=(HostExists,),
        )


def _learner_node(args: argparse.Namespace) -> "HostLearner | None":
    """Return the learner's node of a host, checked. Raises ValueError, SettingsError, CheckFailed."""
    if args.learner_node is None:
        if args.config or args.set:
            raise ValueError(
                "--config, --set: want --learner-node R with them, got none: engines and actors read theirs "
                "from the bus"
            )
        return None
    if not args.config:
        raise ValueError("--learner-node: want --config FILE, the configuration of the run, got none")
    require("learner")
    from tidemill.launch.run.host import HostLearner
    from tidemill.launch.run.learner_process import node_place

    loaded = loaded_config(args)
    place = node_place(loaded.config.learner.nodes, args.learner_node, os.environ)
    if place.nodes == 1:
        raise ValueError("--learner-node: want learner.nodes > 1, got 1; cure: tidemill up, or --set learner.nodes=N")
    if args.run not in ("", loaded.config.run):
        raise ValueError(f"--run: want {loaded.config.run}, the run of --config, got {args.run}")
    args.set.append(f"learner.nodes={place.nodes}")
    loaded = with_commits_of_run(args, loaded_config(args), leads=place.rank == 0)
    check_loaded(args, loaded, starts_workers=False, resumes=True)
    words = ["learner", *children_arguments(args), "--node-rank", str(place.rank), *reached_at(args)]
    return HostLearner(config=loaded_config(args).config, rank=place.rank, arguments=words, users=args.users)
