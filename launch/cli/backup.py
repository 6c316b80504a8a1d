"""``tidemill backup`` and ``tidemill restore``: a run at one instant, in a directory (``launch/run/backup.py``)."""

import argparse
from pathlib import Path

from tidemill.launch.run import backup
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import from_map
from tidemill.launch.settings.run_config import CONFIG_FILE


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir", required=True, type=Path, metavar="DIR", help="directory of the run, on its bus's machine"
    )
    parser.add_argument("-o", "--out", required=True, type=Path, metavar="DIR", help="new directory of the backup")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="seconds that it may take (default 600)")


def run(args: argparse.Namespace) -> int:
    """Take a backup of a run that goes on, or is over. Returns 0. Raises BackupRefused."""
    backup.ask(_source(args.run_dir), args.out, wait_s=args.wait)
    print(f"backup of {args.run_dir} in {args.out}")
    return 0


def _source(root: Path) -> backup.Source:
    file = root / CONFIG_FILE
    if file.exists():
        return backup.Source.of(from_map(yaml_file.read(file)[0], str(file)))
    return backup.Source(run=root.name, root=root, checkpoints=root / backup.CHECKPOINTS_DIR)


def add_restore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backup", type=Path, metavar="DIR", help="directory of a backup")
    parser.add_argument(
        "--run-dir", required=True, type=Path, metavar="DIR", help="directory of the run, without a bus"
    )


def run_restore(args: argparse.Namespace) -> int:
    """Put a backup into the directory of a run. Returns 0. Raises BackupRefused."""
    name = backup.restore(args.backup, args.run_dir)
    print(f"run {name} restored: start its bus and learner with --set directory={args.run_dir}")
    return 0
