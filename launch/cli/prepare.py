"""``tidemill prepare``: makes the small model and the prompts of the section ``prepare``."""

import argparse

from tidemill.launch.cli.arguments import add_config
from tidemill.launch.cli.inputs import unprinted_config
from tidemill.launch.run.process import set_up_logging
from tidemill.launch.run.workers import run_prepare
from tidemill.launch.settings.extras import require


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_config(parser, positional=True)


def run(args: argparse.Namespace) -> int:
    """Make the files of ``prepare``. Returns 0. Raises SettingsError, PackagesMissing, PreparedOtherwise."""
    config = unprinted_config(args)
    if config is None:
        return 0
    require("learner")
    set_up_logging("prepare")
    return run_prepare(config)
