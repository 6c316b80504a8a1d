"""Which run a command is for, and a connection to its bus for the time of the command."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus.errors import BusError
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.bus import find_run as find_only_run
from tidemill.launch.run import process
from tidemill.launch.run.access import AUTH_DIR, BUS_URL_FILE, OPERATOR, VIEWER, user_of_environment, viewer_line
from tidemill.launch.run.bus_process import EndedBus, started
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.run_config import CONFIG_FILE

CONNECT_S = 3.0
_RESUME = f"resume the run: tidemill up {{}}/{CONFIG_FILE} --resume"


def find_run(run_dir: str, bus: str, run: str, *, user: str = VIEWER) -> tuple[str, str]:
    """Return address (not to be shown) and name of a run, for one of its users. Raises ValueError."""
    address_file = Path(run_dir) / BUS_URL_FILE
    root, settings = Path(run_dir), {}
    if run_dir and not (root / CONFIG_FILE).exists() and address_file.exists():
        run_dir, bus = "", bus or address_file.read_text().strip()  # of `tidemill bus`: only `up` stores the settings
        # Not where the environment names a user. os.path: in the directory of another user, Path.exists raises.
        is_named = any(user_of_environment(os.environ))
        settings = {"auth": not is_named and os.path.exists(root / AUTH_DIR / f"{user}.env")}
    if run_dir:
        if not (root / CONFIG_FILE).exists():
            raise ValueError(f"--run-dir: want the directory of a run ({CONFIG_FILE} in it), got {run_dir}")
        config = yaml_file.read(root / CONFIG_FILE)[0]
        address = root / BUS_URL_FILE
        url = bus or config["bus"]["url"] or (address.read_text().strip() if address.exists() else "")
        if not url:
            over = root / "summary.json"
            cure = f"the run is over, see {over}" if over.exists() else _RESUME.format(root)
            raise ValueError(f"{run_dir}: no bus is running here; {cure}")
        return viewer_line(url, os.environ, root, config["bus"], user=user), run or config["run"]
    if not bus:
        raise ValueError("want --run-dir DIRECTORY, or --bus URL (and --run RUN where it carries several)")
    line = viewer_line(bus, os.environ, root, settings, user=user)
    try:
        return line, run or asyncio.run(find_only_run(line, name="look", wait_s=CONNECT_S))
    except BusError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLocation:
    """The bus at which a run can be read."""

    url: str  # Address with the password in it: not to be shown
    run: str
    ended: bool = False  # True if the run is over: no more messages will follow


@contextmanager
def run_of(args: argparse.Namespace, *, user: str = VIEWER) -> Iterator[RunLocation]:
    """Find the run for a command that reads; its bus answers even if it is over. Raises ValueError, RunResumed."""
    root = Path(args.run_dir)
    has_run = bool(args.run_dir) and not args.bus and (root / CONFIG_FILE).exists()
    ended_bus = EndedBus.of(root) if has_run else None
    if ended_bus is None:
        url, run = find_run(args.run_dir, args.bus, args.run, user=user)
        yield RunLocation(url=url, run=run)
        return
    note = "the run is not running; its bus is started for this command"
    print(f"tidemill {args.command}: {root}: {note}", file=sys.stderr)
    with started(ended_bus) as line:
        yield RunLocation(url=line, run=args.run or ended_bus.run, ended=True)


async def on_bus(
    url: str, run: str, args: argparse.Namespace, work: Callable[[Bus, argparse.Namespace], Awaitable[int]]
) -> int:
    """Connect to the bus and return the exit code of ``work``. Raises ValueError for every error of the bus."""
    try:
        async with connect(url, run, name=args.command, wait_s=CONNECT_S) as bus:
            return await work(bus, args)
    except BusError as error:
        raise ValueError(str(error)) from None


def read_until_drained(
    args: argparse.Namespace,
    read: Callable[[str, str, asyncio.Event], Coroutine[object, None, None]],
    *,
    name: str,
    user: str,
) -> int:
    """Run ``read(url, run, draining)`` on a run as a process. Returns its exit code. Raises ValueError."""
    process.set_up_logging(args.command, name)
    with run_of(args, user=user) as place:
        args.ended = place.ended
        try:
            return process.run_refusing(
                lambda draining: read(place.url, place.run, draining), drain_s=60, refusals=(BusError, ValueError)
            )
        except (BusError, ValueError) as error:
            raise ValueError(str(error)) from None


def look(args: argparse.Namespace, read: Callable[[Bus, argparse.Namespace], Awaitable[int]]) -> int:
    """Find the run, which may be over, and return the exit code of ``read``. Raises ValueError."""
    process.set_up_logging(args.command, level=logging.ERROR)
    with run_of(args) as place:
        args.ended = place.ended
        return asyncio.run(on_bus(place.url, place.run, args, read))


def change(args: argparse.Namespace, write: Callable[[Bus, argparse.Namespace], Awaitable[int]]) -> int:
    """Find the run, which must not be over, and return the exit code of ``write``. Raises ValueError."""
    process.set_up_logging(args.command, level=logging.ERROR)
    url, run = find_run(args.run_dir, args.bus, args.run, user=OPERATOR)
    return asyncio.run(on_bus(url, run, args, write))
