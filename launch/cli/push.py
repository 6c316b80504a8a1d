"""``tidemill push``: the model of a finished run into a repository of the Hugging Face Hub."""

import argparse
from pathlib import Path

from tidemill.launch.cli.inputs import read_secrets
from tidemill.launch.settings.extras import require


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a finished run: runs/digits")
    parser.add_argument("--to-hub", required=True, metavar="NAME", help="org/name; made if there is none")
    parser.add_argument("--public", action="store_true", help="make it public; default: private")


def run(args: argparse.Namespace) -> int:
    """Upload the model in ``final/`` with its card. Returns 0. Raises HubRefused."""
    require("hub")
    read_secrets(args, [Path()])
    from tidemill.launch.hub.publication import push

    print(push(args.run, args.to_hub, public=args.public))
    return 0
