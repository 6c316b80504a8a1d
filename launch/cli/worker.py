"""``tidemill engine``, ``tidemill actor`` and ``tidemill scorer``: processes that need nothing but the bus
(``tidemill.launch.run.workers``)."""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from tidemill.bus import exit_codes
from tidemill.launch.cli.arguments import (
    add_allow,
    add_bus,
    add_config,
    add_drained_code,
    add_listening,
    add_probes,
    add_until_end,
    command_of,
)
from tidemill.launch.cli.inputs import bus_address, process_id, read_secrets, unprinted_config, with_probes
from tidemill.launch.run.access import allowed
from tidemill.launch.settings.config_loader import changes
from tidemill.launch.settings.extras import require


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of an engine, an actor or a scorer."""
    role = command_of(parser)
    add_bus(parser)
    parser.add_argument("--run", default="", help="name of the run; needed on a bus with several, without --config")
    parser.add_argument("--id", default="", help="its name on the bus")
    add_until_end(parser)
    add_drained_code(parser)
    parser.add_argument("--wait", type=float, default=300.0, metavar="S", help="seconds to wait for the bus")
    add_allow(parser)
    add_probes(parser)
    if role != "actor":
        add_listening(parser)
    else:
        parser.add_argument(
            "--rollouts",
            action="append",
            dest="set",
            default=[],
            type=lambda names: f"actor.rollouts={json.dumps([name for name in names.split(',') if name])}",
            metavar="NAME,NAME",
            help="load these rollouts alone, and lease their tasks; single_turn = tasks without one (default: all)",
        )
    if role == "scorer":
        parser.add_argument("--port", type=int, default=0, help="port to listen on (default 0 = any free port)")
    add_config(parser, required=False)


def run(args: argparse.Namespace) -> int:
    """Run a process until drained. Returns the exit code of ``process.run``; 1 if no bus is reached in --wait."""
    role = args.command
    if args.print_config and not args.config:
        why = "without it the configuration is read from the bus, at the start"
        raise ValueError(f"--print-config: want --config FILE; {why}")
    config, changed = None, changes(args.set, os.environ)
    if not args.config:
        read_secrets(args, [Path()])
    elif (config := unprinted_config(args)) is None:
        return 0
    require("actor" if role == "scorer" else role)
    from tidemill.bus.errors import BusUnavailable
    from tidemill.launch.run import process, run_end, workers

    id = process_id(args)
    process.set_up_logging(role, id)
    address = bus_address(args, config, id)
    run_name = args.run or (config.run if config is not None else "")
    drain_s = config.up.drain_s if config is not None else 60.0
    work = {"engine": workers.run_engine, "actor": workers.run_actor, "scorer": workers.run_scorer}[role]
    listen = {name: value for name, value in vars(args).items() if name in ("host", "advertise", "port")}
    accepted = allowed(args.allow, os.environ, replaced=changed)
    local = workers.LocalSettings(allowed=accepted, changed=changed, **listen)
    unreachable: list[BusUnavailable] = []
    is_drained, has_run_ended = False, asyncio.Event()

    async def body(draining: asyncio.Event) -> None:
        nonlocal is_drained
        try:
            await workers.reach_bus(address, role, draining, wait_s=args.wait)
        except BusUnavailable as error:
            unreachable.append(error)
            return
        waits = {"on": args.until_end, "resume_s": args.resume_wait}
        async with run_end.until_end(address, run_name, draining, name=role, ended=has_run_ended, **waits):
            await work(config, run_name, address, id, draining, local)
        is_drained = draining.is_set() and not has_run_ended.is_set()

    code = process.run(with_probes(args, body), drain_s=drain_s)
    if code == exit_codes.DONE and is_drained:
        code = args.drained_code
    if unreachable:
        print(f"{exit_codes.LINE}{unreachable[0]} (--wait)", file=sys.stderr)
    return exit_codes.CRASHED if unreachable else code
