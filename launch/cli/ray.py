"""``tidemill ray``: a run inside an existing Ray cluster (``tidemill.launch.deploy.ray_run``)."""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.bus import exit_codes
from tidemill.launch.cli.arguments import add_config
from tidemill.launch.cli.inputs import loaded_config, print_checked
from tidemill.launch.settings.config_loader import Loaded
from tidemill.launch.settings.extras import require

if TYPE_CHECKING:
    from tidemill.launch.deploy.ray_run import RayRun


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, positional=True)
    parser.add_argument("--address", default="auto", help="of the Ray cluster (default: auto = the one around it)")
    parser.add_argument(
        "--program", default="", metavar="FILE", help="the tidemill of every node (default: that of Ray's Python)"
    )


def run(args: argparse.Namespace) -> int:
    """Run everything on the cluster. Returns the exit code: as of ``tidemill up``. Raises ValueError."""
    loaded = loaded_config(args)
    if args.print_config:
        return print_checked(args, loaded)
    require("ray")
    import ray

    from tidemill.launch.deploy import ray_run
    from tidemill.launch.run import process

    try:
        ray.init(address=args.address, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ValueError(f"--address: want a running Ray cluster, got none at {args.address!r} ({error})") from None
    process.set_up_logging("ray")
    try:
        demand = ray_run.Demand.of(loaded.config, ray.cluster_resources().get("GPU", 0.0))
        refuse_relative(loaded, nodes=len(ray.nodes()))
        group = ray_run.reserve(demand)
        config = loaded.config if loaded.config.bus.url else at_address(args, *ray_run.address_in(group)).config
        return _drive(ray_run.RayRun(config=config, demand=demand, group=group, program=args.program))
    finally:
        ray.shutdown()


def _drive(run: "RayRun") -> int:
    """Run it to its end. Returns the exit code; a process that was given up is reported to stderr."""
    from tidemill.launch.run import process
    from tidemill.launch.run.supervisor import GaveUp

    given_up: list[GaveUp] = []

    async def body(draining: asyncio.Event) -> None:
        try:
            await run.drive(draining)
        except GaveUp as error:
            given_up.append(error)

    code = process.run(body, drain_s=3 * run.config.up.drain_s + 60, uvloop=False)
    for error in given_up:
        print(f"{exit_codes.LINE}{error}", file=sys.stderr)
    return given_up[0].exit_code if given_up else code


def refuse_relative(loaded: Loaded, *, nodes: int) -> None:
    """Raise ValueError for a directory that would be another one on each node: a job of Ray has its own."""
    directory = loaded.config.directory
    if nodes > 1 and not Path(directory).is_absolute():
        cure = "--set directory=/shared/runs/NAME"
        raise ValueError(f"directory: want an absolute path, as the cluster has {nodes} nodes, got {directory}; {cure}")


def at_address(args: argparse.Namespace, address: str, port: int) -> Loaded:
    """Return the configuration with the address of the bus, unless it names a port."""
    args.set += [f"bus.host={address}"]
    loaded = loaded_config(args)
    args.set += [f"bus.port={port}"] if loaded.config.bus.port < 0 else []
    args.set += [f"directory={os.path.abspath(loaded.config.directory)}"]
    return loaded_config(args)
