"""Inputs of a command: the configuration in its arguments, checked or printed, its name, the bus, and arguments for its
children.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import Loaded, SettingsError, load, render
from tidemill.launch.settings.run_config import RunConfig

if TYPE_CHECKING:
    from tidemill.launch.checks.findings import Report


def loaded_config(args: argparse.Namespace) -> Loaded:
    """Return the run's configuration and where its values come from. Raises SettingsError."""
    return load(args.config, args.set, os.environ)


def bus_address(args: argparse.Namespace, config: RunConfig | None, user: str) -> str:
    """Return the address of the bus with the password in it: for this process only, never to be shown."""
    from tidemill.launch.run.access import address_line

    return address_line(args.bus, config, user, os.environ)


def process_id(args: argparse.Namespace) -> str:
    """Return the process's name on the bus: --id, else the name of its user, who may write under no other."""
    return args.id or user_name()


def user_name() -> str:
    """Return the user of the bus in the environment; empty if there is none."""
    from tidemill.launch.run.access import user_of_environment

    return user_of_environment(os.environ)[0]


def unprinted_config(args: argparse.Namespace) -> RunConfig | None:
    """Return the run's configuration; None if it was printed instead."""
    loaded = loaded_config(args)
    if args.print_config:
        print(render(loaded), end="")
        return None
    return loaded.config


def print_checked(args: argparse.Namespace, loaded: Loaded) -> int:
    """Print the configuration, also one that cannot work, then check it. Returns 0. Raises CheckFailed after errors."""
    print(render(loaded), end="", flush=True)
    check_loaded(args, loaded)
    return 0


def check_loaded(args: argparse.Namespace, loaded: Loaded, **purpose: bool) -> "Report":
    """Check the configuration and print warnings to stderr. Returns the report. Raises CheckFailed after errors."""
    from tidemill.launch.checks.run import Purpose, check

    report = check(loaded, Purpose(**purpose))
    report.refuse()
    for finding in report.warnings:
        print(f"tidemill {args.command}: warning: {finding.text}", file=sys.stderr)
    return report


def with_iteration(args: argparse.Namespace, loaded: Loaded) -> Loaded:
    """Return the configuration with one iteration in ``model.megatron_checkpoint``, for all processes of this start.

    The job that writes the checkpoints may finish another one at any time. Raises ConfigRefused.
    """
    from tidemill.learner.checkpoints.torch_dist import SETTING, find

    checkpoint = loaded.config.model.megatron_checkpoint
    if checkpoint and str(iteration := find(Path(checkpoint))) != checkpoint:
        args.set.append(f"{SETTING}={iteration}")
        return loaded_config(args)
    return loaded


def given_options(words: list[str]) -> dict[str, object]:
    """Return the options in ``KEY=VALUE`` words, values as YAML. Raises ValueError."""
    options: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"--option: want KEY=VALUE, got {word!r}")
        try:
            options[key] = yaml_file.value(value, f"--option {key}")[0]
        except SettingsError as error:  # ends as the other wrong arguments do
            raise ValueError(str(error)) from None
    return options


def reached_at(args: argparse.Namespace) -> list[str]:
    """Return the options --host and --advertise of an engine, as they were given here."""
    addresses = (("--host", args.host), ("--advertise", args.advertise))
    return [word for option, value in addresses if value for word in (option, value)]


def children_arguments(args: argparse.Namespace) -> list[str]:
    """Return the options with which a child reads the same configuration and reaches the same bus."""
    settings = [word for setting in args.set for word in ("--set", setting)]
    return ["--config", *map(str, args.config), *settings, "--bus", args.bus]
