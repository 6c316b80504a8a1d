"""``tidemill host``: the engines, scorers and actors of one machine, and a node of the learner
(``tidemill.launch.run.host``); ``tidemill scale``: sets the desired numbers, and shows the share of each host.
"""

import argparse
import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from tidemill.actors.engines.membership import CONFIG_KEY, connected, host_name
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli.arguments import add_allow, add_bus, add_listening, add_probes, add_run, add_until_end
from tidemill.launch.cli.find_run import change, read_until_drained
from tidemill.launch.cli.inputs import (
    check_loaded,
    children_arguments,
    is_user_of_process,
    loaded_config,
    name_on_bus,
    reached_at,
    user_name,
    with_commits_of_run,
    with_probes,
)
from tidemill.launch.run import desired, process
from tidemill.launch.run.access import OPERATOR, address_line, allowed
from tidemill.launch.run.desired import ROLES, DesiredRoles, LiveHost
from tidemill.launch.run.directory import HostExists, only_one
from tidemill.launch.run.host import ROLE, HostLearner, Machine, run_host, users_in
from tidemill.launch.run.learner_process import node_place
from tidemill.launch.run.run_end import until_end
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.run_paths import config_file


def add(parser: argparse.ArgumentParser) -> None:
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
    add_until_end(parser)
    add_allow(parser)
    add_probes(parser)
    parser.add_argument("wanted", nargs="*", metavar="actors=N|engines=N|scorers=N", help="default: a share")


def run(args: argparse.Namespace) -> int:
    """Run this machine's engines and actors until drained. Returns the exit code. Raises HostExists."""
    name = name_on_bus("--name", args.name) or host_name()
    counts = desired.parse(args.wanted)
    if args.users is None and (counts or args.learner_node is None) and is_user_of_process(user_name()):
        want = "a directory with a file of the bus's auth/ for each of its processes (engine-0.env, actor-0.env)"
        raise ValueError(f"--users: want {want}, as the user {user_name()} may do no work of theirs, got none")
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
    run_name = args.run or (machine.learner.config.run if machine.learner else "")

    async def body(draining: asyncio.Event) -> None:
        address = address_line(args.bus, None, name, os.environ)
        waits = {"on": args.until_end, "resume_s": args.resume_wait}
        async with until_end(address, run_name, draining, name=f"host {name}", **waits):
            await run_host(run_name, args.bus, draining, machine)

    with only_one(machine.directory, name):
        return process.run_refusing(
            with_probes(args, body),
            drain_s=2 * args.drain + 30,
            refusals=(HostExists,),
        )


def _learner_node(args: argparse.Namespace) -> HostLearner | None:
    """Return the learner's node of a host, checked. Raises ValueError, SettingsError, CheckFailed."""
    if args.learner_node is None:
        if args.config or args.set:
            why = "engines and actors read theirs from the bus"
            raise ValueError(f"--config, --set: want --learner-node R with them, got none: {why}")
        return None
    if not args.config:
        raise ValueError("--learner-node: want --config FILE, the configuration of the run, got none")
    require("learner")
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


def add_scale(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--host", default="", help="on this host, independent of the others")
    where.add_argument("--pool", default="", help="on all hosts of this pool together")
    parser.add_argument("--autoscale", action="store_true", help="decide until stopped: engines=1..8 actors=2..16")
    parser.add_argument("--settle", type=float, default=60.0, metavar="S", help="seconds between its changes, at least")
    parser.add_argument("wanted", nargs="*", metavar="actors=N|engines=N|scorers=N", help="default: of all hosts")


def run_scale(args: argparse.Namespace) -> int:
    """Set the desired numbers of engines and actors, if any are given, and print them. Returns 0. Raises ValueError."""
    if args.autoscale:
        return _autoscale(args)
    args.counts = desired.parse(args.wanted)
    return change(args, show_scale)


def _autoscale(args: argparse.Namespace) -> int:
    """Decide on the numbers of all hosts together until drained. Returns the exit code. Raises ValueError."""
    from tidemill.launch.deploy.autoscaler import Autoscaler, parse_bounds

    if args.host or args.pool:
        raise ValueError("--autoscale: want no --host or --pool with it: it decides for all hosts together")
    if not 0 < args.settle < 1e6:
        raise ValueError(f"--settle: want seconds > 0, got {args.settle:g}")
    bounds = parse_bounds(args.wanted)

    async def body(url: str, run: str, draining: asyncio.Event) -> None:
        if args.ended:
            raise ValueError(f"--autoscale: want a run that goes on, but {run} is over")
        async with AsyncExitStack() as stack:
            bus = await connected(stack, url, run, BusConfig(), name="autoscaler", draining=draining)
            if bus is not None:
                async with until_end(url, run, draining, name="autoscaler", on=True):
                    await Autoscaler(bus, bounds, settle_s=args.settle).run(draining)

    return read_until_drained(args, body, name="", user=OPERATOR)


async def _asks_scorers(bus: Bus) -> bool:
    value: object = (await bus.rows("run").read(CONFIG_KEY))[0]
    for name in ("actor", "scorers", "enabled"):  # a row of any form: a client without a user may write it
        value = value.get(name) if isinstance(value, Mapping) else None
    return value is True


def _kept_numbers(row: LiveRow, rows: DesiredRoles) -> dict[str, int] | None:
    """Return the numbers that a host keeps itself, as a user that may not write them; None where rows name them."""
    if desired.ALL in rows.rows or desired.pool_key(row.pool) in rows.rows:
        return None
    return {role: int(row.load.get(f"{role}s_wanted", 0)) for role in ROLES}


async def show_scale(bus: Bus, args: argparse.Namespace) -> int:
    """Set the numbers ``args.counts`` in the row of a host, a pool or all; print every live host's share; return 0."""
    counts, host, pool = args.counts, args.host, args.pool
    key = desired.host_key(host) if host else desired.pool_key(pool) if pool else desired.ALL
    console = Console(highlight=False, soft_wrap=True)
    if counts:
        before, after = await desired.change(bus, key, counts)
        for role in counts:
            console.print(f"{key}: {role}s {before.get(role, '-')} -> {after[role]}")
    if counts.get("scorer") and not await _asks_scorers(bus):
        console.print("no actor asks a scorer of this run: it was started without actor.scorers.enabled")
    rows, live = await desired.read(bus), await LiveView(bus).alive(ROLE)
    hosts = [LiveHost(row.id, row.pool) for row in live]
    for place, row in zip(hosts, live, strict=True):
        shares = rows.of(place, hosts, own=_kept_numbers(row, rows))
        numbers = ", ".join(f"{role}s {row.load.get(f'{role}s', 0):g} of {shares[role]}" for role in ROLES)
        belongs = f" (pool {place.pool})" if place.pool else ""
        console.print(f"host {place.name}{belongs}: {numbers}{row.waits_for and f'; {row.waits_for}'}", markup=False)
    live_names = [place.name if host else place.pool for place in hosts if host or place.pool]
    if not hosts:
        console.print("no host is running: start `tidemill host` on the machines that should run them")
    elif (host or pool) and (host or pool) not in live_names:
        console.print(f"{key}: no live host of that name; live: {', '.join(live_names) or 'none'}")
    return 0
