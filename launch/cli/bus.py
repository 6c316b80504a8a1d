"""``tidemill bus``: the embedded nats-server, or a cluster (``tidemill.launch.run.bus_process``)."""

import argparse

from tidemill.launch.cli.arguments import add_config
from tidemill.launch.cli.inputs import unprinted_config


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_config(parser)
    parser.add_argument("--auth", action="store_true", help="with users, passwords and permissions: bus.auth=true")
    parser.add_argument("--auth-dir", default="", metavar="DIR", help="directory of their passwords: bus.auth_dir")


def run(args: argparse.Namespace) -> int:
    """Run the embedded nats-server, or a cluster, until it is drained. Returns the exit code of ``process.run``."""
    args.set += ["bus.auth=true"] if args.auth or args.auth_dir else []
    args.set += [f"bus.auth_dir={args.auth_dir}"] if args.auth_dir else []
    config = unprinted_config(args)
    if config is None:
        return 0
    from tidemill.launch.run import bus_process, process

    process.set_up_logging("bus")
    return process.run(lambda draining: bus_process.run_bus(config, draining), drain_s=config.up.drain_s, uvloop=False)
