"""``tidemill rotate``: new passwords for users of a bus, and its certificates read again, while it runs."""

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    text = "directory of the run, on the machine of its bus"
    parser.add_argument("--run-dir", required=True, type=Path, metavar="DIR", help=text)
    parser.add_argument("--wait", type=float, default=60.0, metavar="S", help="seconds that it may take (default 60)")
    text = "user that gets a new password, in auth/USER.env; none = only the certificates are read again"
    parser.add_argument("users", nargs="*", metavar="USER", help=text)


def run(args: argparse.Namespace) -> int:
    """Have the bus of a run renew passwords and certificates. Returns 0. Raises RequestRefused."""
    if not (args.run_dir / "bus").is_dir():
        raise ValueError(f"--run-dir: want the directory of a run whose bus is on this machine, got {args.run_dir}")
    from tidemill.launch.run.bus_process import users_request

    users_request(args.run_dir).ask(" ".join(args.users), wait_s=args.wait)
    print(f"renewed: {', '.join([*args.users, 'certificates'])}")
    return 0
