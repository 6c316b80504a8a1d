"""What each sub-command does with its arguments. Heavy modules are imported inside."""

import argparse
import logging
import os

from launch.access import LEARNER
from launch.config import RunConfig
from launch.settings import Loaded, load, render


def _loaded(args: argparse.Namespace) -> Loaded:
    return load(args.config, args.set, os.environ)


def _address(args: argparse.Namespace, config: RunConfig | None, user: str) -> str:
    """The address of the bus with the password in it: for this process, not to be shown."""
    from launch.access import address_line

    return address_line(args.bus, config, user, os.environ)


def _id(args: argparse.Namespace) -> str:
    """Its name on the bus: the one asked for, else the one its user has; a user may write under no other."""
    from launch.access import user_of_environment

    return args.id or user_of_environment(os.environ)[0]


def _config(args: argparse.Namespace) -> RunConfig | None:
    """The run's configuration; None when it was printed instead."""
    loaded = _loaded(args)
    if args.print_config:
        print(render(loaded), end="")
        return None
    return loaded.config


def config(args: argparse.Namespace) -> int:
    loaded = _loaded(args)
    print(render(loaded) if args.print_config else f"{args.config}: good (--print-config shows it)", end="" if args.print_config else "\n")
    return 0


def up(args: argparse.Namespace) -> int:
    wanted = _config(args)
    if wanted is None:
        return 0
    from launch.up import run_up

    return run_up(wanted, resume=args.resume, fresh=args.fresh)


def prepare(args: argparse.Namespace) -> int:
    wanted = _config(args)
    if wanted is None:
        return 0
    from launch.process import set_up_logging
    from launch.roles import run_prepare

    set_up_logging("prepare")
    return run_prepare(wanted)


def bus(args: argparse.Namespace) -> int:
    args.set += ["bus.auth=true"] if args.auth or args.auth_dir else []
    args.set += [f"bus.auth_dir={args.auth_dir}"] if args.auth_dir else []
    wanted = _config(args)
    if wanted is None:
        return 0
    from launch import process, roles

    process.set_up_logging("bus")
    return process.run(lambda draining: roles.run_bus(wanted, draining), drain_s=wanted.up.drain_s, uvloop=False)


def engine(args: argparse.Namespace) -> int:
    wanted = _config(args)
    if wanted is None:
        return 0
    from launch import process, roles

    id = _id(args)
    process.set_up_logging("engine", id)
    address = _address(args, wanted, id)
    return process.run(lambda draining: roles.run_engine(wanted, address, id, draining), drain_s=wanted.up.drain_s)


def actor(args: argparse.Namespace) -> int:
    wanted = None
    if args.config is not None:
        wanted = _config(args)
        if wanted is None:
            return 0
    from launch import process, roles

    id = _id(args)
    process.set_up_logging("actor", id)
    address = _address(args, wanted, id)
    run = args.run or (wanted.run if wanted is not None else "")
    drain_s = wanted.up.drain_s if wanted is not None else 60.0
    return process.run(lambda draining: roles.run_actor(wanted, run, address, id, draining), drain_s=drain_s)


def learner(args: argparse.Namespace) -> int:
    wanted = _config(args)
    if wanted is None:
        return 0
    from launch import process, roles

    process.set_up_logging("learner", args.id)
    address = _address(args, wanted, LEARNER)
    return process.run(
        lambda draining: roles.run_learner(wanted, address, args.id, _children_arguments(args), draining),
        drain_s=wanted.up.drain_s + 5,
        uvloop=False,
    )


def _children_arguments(args: argparse.Namespace) -> list[str]:
    settings = [word for setting in args.set for word in ("--set", setting)]
    return ["--config", str(args.config), *settings, "--bus", args.bus]


def feeder(args: argparse.Namespace) -> int:
    wanted = _config(args)
    if wanted is None:
        return 0
    from launch import process, roles

    process.set_up_logging("feeder")
    address = _address(args, wanted, LEARNER)
    return process.run(lambda draining: roles.run_feeder(wanted, address, args.feeder_url, draining), drain_s=wanted.up.drain_s)


def rank(args: argparse.Namespace) -> int:
    wanted = _config(args)
    if wanted is None:
        return 0
    from launch import process, roles

    process.set_up_logging("rank", os.environ.get("RANK", "0"))
    return roles.run_rank(wanted, _address(args, wanted, LEARNER), args.feeder_url)


def status(args: argparse.Namespace) -> int:
    import asyncio

    from launch.looking import find_run, show_status
    from launch.process import set_up_logging

    set_up_logging("status", level=logging.ERROR)
    url, run = find_run(args.run_dir, args.bus, args.run)
    return asyncio.run(show_status(url, run, as_json=args.json))


def tail(args: argparse.Namespace) -> int:
    import asyncio

    from launch.looking import find_run, show_tail
    from launch.process import set_up_logging

    set_up_logging("tail", level=logging.ERROR)
    url, run = find_run(args.run_dir, args.bus, args.run)
    return asyncio.run(show_tail(url, run, last=args.last, follow=args.follow, as_json=args.json))
