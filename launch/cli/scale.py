"""``tidemill scale``: sets the desired numbers of engines, scorers and actors, and shows the share of each host."""

import argparse
from collections.abc import Mapping

from rich.console import Console

from tidemill.actors.engines.membership import CONFIG_KEY
from tidemill.bus.liveness.heartbeats import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import change
from tidemill.launch.run import desired
from tidemill.launch.run.desired import ROLES, LiveHost
from tidemill.launch.run.host import ROLE


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_run(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--host", default="", help="on this host, independent of the others")
    where.add_argument("--pool", default="", help="on all hosts of this pool together")
    parser.add_argument("wanted", nargs="*", metavar="actors=N|engines=N|scorers=N", help="default: of all hosts")


def run(args: argparse.Namespace) -> int:
    """Set the desired numbers of engines and actors, if any are given, and print them. Returns 0. Raises ValueError."""
    args.counts = desired.parse(args.wanted)
    return change(args, show_scale)


async def _asks_scorers(bus: Bus) -> bool:
    row, _ = await bus.rows("run").read(CONFIG_KEY)
    value: object = row or {}
    for name in ("actor", "scorers", "enabled"):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value is True


async def show_scale(bus: Bus, args: argparse.Namespace) -> int:
    """Set the numbers ``args.counts`` in the row of a host, a pool or all; print every live host's share; return 0."""
    counts, host, pool = args.counts, args.host, args.pool
    key = desired.host_key(host) if host else desired.pool_key(pool) if pool else desired.ALL
    console = Console(highlight=False, soft_wrap=True)
    if counts:
        before, after = await desired.change(bus, key, counts)
        for role in counts:
            console.print(f"{key}: {role}s {before.get(role, '-')} -> {after[role]}")
    if counts.get("scorer") and not await _asks_scorers(bus):
        console.print("no actor asks a scorer of this run: it was started without actor.scorers.enabled")
    rows, live = await desired.read(bus), await LiveView(bus).alive(ROLE)
    hosts = [LiveHost(row.id, row.pool) for row in live]
    for place, row in zip(hosts, live, strict=True):
        shares = rows.of(place, hosts)
        numbers = ", ".join(f"{role}s {row.load.get(f'{role}s', 0):g} of {shares[role]}" for role in ROLES)
        belongs = f" (pool {place.pool})" if place.pool else ""
        console.print(f"host {place.name}{belongs}: {numbers}{row.waits_for and f'; {row.waits_for}'}", markup=False)
    live_names = (
        [live_host.name for live_host in hosts] if host else [live_host.pool for live_host in hosts if live_host.pool]
    )
    if not hosts:
        console.print("no host is running: start `tidemill host` on the machines that should run them")
    elif (host or pool) and (host or pool) not in live_names:
        console.print(f"{key}: no live host of that name; live: {', '.join(live_names) or 'none'}")
    return 0
