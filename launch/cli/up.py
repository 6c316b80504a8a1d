"""``tidemill up``: a whole run on this machine (``tidemill.launch.run.up``)."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.launch.cli.arguments import add_config, add_from_checkpoint
from tidemill.launch.cli.inputs import check_loaded, loaded_config, print_checked, with_fetched, with_iteration
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.run_config import CONFIG_FILE

if TYPE_CHECKING:
    pass


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, positional=True)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="resume the run in its directory")
    how.add_argument("--fresh", action="store_true", help="delete the run's directory and start again")
    add_from_checkpoint(parser)


def run(args: argparse.Namespace) -> int:
    """Run everything here; return the exit code of ``run_up``. Raises ValueErrors before any process starts."""
    loaded = loaded_config(args)
    if args.print_config:
        return print_checked(args, loaded)
    require("engine", "learner")
    file: Path = loaded.config.root / CONFIG_FILE
    loaded, _ = with_fetched(args, loaded, yaml_file.read(file)[0] if args.resume and file.is_file() else None)
    check_loaded(args, loaded, uses_bus=True, resumes=args.resume, fresh=args.fresh)
    loaded = with_iteration(args, loaded)
    from tidemill.launch.run.up import run_up

    return run_up(loaded.config, resume=args.resume, fresh=args.fresh)
