"""What each sub-command does with its arguments. Heavy modules are imported inside."""

import argparse
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from launch.config import RunConfig
from launch.settings import Loaded, load, render

if TYPE_CHECKING:
    from bus.connection import Bus


def _loaded(args: argparse.Namespace) -> Loaded:
    return load(args.config, args.set, os.environ)


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

    process.set_up_logging("engine", args.id)
    return process.run(lambda draining: roles.run_engine(wanted, args.bus, args.id, draining), drain_s=wanted.up.drain_s)


def actor(args: argparse.Namespace) -> int:
    wanted = None
    if args.config is not None:
        wanted = _config(args)
        if wanted is None:
            return 0
    from launch import process, roles

    process.set_up_logging("actor", args.id)
    run = args.run or (wanted.run if wanted is not None else "")
    drain_s = wanted.up.drain_s if wanted is not None else 60.0
    return process.run(lambda draining: roles.run_actor(wanted, run, args.bus, args.id, draining), drain_s=drain_s)


def learner(args: argparse.Namespace) -> int:
    wanted = _config(args)
    if wanted is None:
        return 0
    from launch import process, roles

    process.set_up_logging("learner", args.id)
    return process.run(
        lambda draining: roles.run_learner(wanted, args.bus, args.id, _children_arguments(args), draining),
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
    return process.run(lambda draining: roles.run_feeder(wanted, args.bus, args.feeder_url, draining), drain_s=wanted.up.drain_s)


def rank(args: argparse.Namespace) -> int:
    wanted = _config(args)
    if wanted is None:
        return 0
    from launch import process, roles

    process.set_up_logging("rank", os.environ.get("RANK", "0"))
    return roles.run_rank(wanted, args.bus, args.feeder_url)


def status(args: argparse.Namespace) -> int:
    import asyncio

    from launch.looking import find_run, show_status
    from launch.process import set_up_logging

    set_up_logging("status", level=logging.ERROR)
    url, run = find_run(args.run_dir, args.bus, args.run)
    return asyncio.run(show_status(url, run, as_json=args.json))


def tail(args: argparse.Namespace) -> int:
    from launch.samples.tail import show_tail

    return _look(args, show_tail)


def show(args: argparse.Namespace) -> int:
    from launch.samples.show import show_sample

    return _look(args, show_sample)


def stats(args: argparse.Namespace) -> int:
    from launch.samples.stats import show_stats

    return _look(args, show_stats)


def replay(args: argparse.Namespace) -> int:
    from launch.process import set_up_logging
    from launch.samples.replay import replay_file, replay_run

    set_up_logging("replay", level=logging.ERROR)
    if args.source:
        import asyncio

        return asyncio.run(replay_file(args))
    return _look(args, replay_run)


def _look(args: argparse.Namespace, look: "Callable[[Bus, argparse.Namespace], Awaitable[int]]") -> int:
    """Find the run, connect to its bus, and look."""
    import asyncio

    from launch.looking import find_run, looking
    from launch.process import set_up_logging

    set_up_logging(args.command, level=logging.ERROR)
    url, run = find_run(args.run_dir, args.bus, args.run)
    return asyncio.run(looking(url, run, args, look))
