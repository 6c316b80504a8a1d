"""``tidemill check``: the findings of all checks of a run before it starts."""

import argparse

from tidemill.bus import exit_codes
from tidemill.launch.checks import run as checks
from tidemill.launch.checks.findings import OK, Finding
from tidemill.launch.cli.arguments import add_config
from tidemill.launch.cli.inputs import loaded_config, print_checked, with_fetched


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_config(parser, positional=True)
    parser.add_argument("--check-reward", action="store_true", help="also call a reward by import path, once")


def run(args: argparse.Namespace) -> int:
    """Print the findings of all checks. Returns 0, or 78 when there are errors. Raises SettingsError."""
    loaded = loaded_config(args)
    if args.print_config:
        return print_checked(args, loaded)
    loaded, repositories = with_fetched(args, loaded)
    for repository in repositories:
        print(Finding(level=OK, topic="hub", text=str(repository)))
    report = checks.check(loaded, checks.Purpose(uses_bus=True, call_reward=args.check_reward))
    for finding in report.findings:
        print(finding)
    return exit_codes.CONFIG if report.errors else 0
