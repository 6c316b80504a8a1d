"""``tidemill tail``: prints samples of the stream, and new ones as they arrive."""

import argparse
import sys
from collections.abc import AsyncIterator, Callable

from rich.console import Console

from tidemill.bus.streams.bus import Bus
from tidemill.launch.samples.block import block
from tidemill.launch.samples.filter_arguments import filter_of, positive
from tidemill.launch.samples.search import Found, Search, as_map
from tidemill.launch.samples.text import to_json

DEFAULT_LAST = 10


async def show_tail(bus: Bus, args: argparse.Namespace) -> int:
    """Print the samples that the arguments select, as text, JSON or raw payloads; return 0. Raises ValueError."""
    search, write = Search(bus, filter_of(args)), _writer(args)
    async for found in tail(search, args):
        write(found)
    return 0


async def tail(search: Search, args: argparse.Namespace) -> AsyncIterator[Found]:
    """Yield the samples that the arguments select: the newest that fit, or all from a start on; then, with ``follow``, new ones."""
    positive("--last", args.last)
    placed = bool(args.since) or args.since_version is not None
    first = await search.begin(args.since, args.since_version) if placed else 1
    if placed and args.last is None:
        last = None if _follows(args) else (await search.history.state()).last_seq
        async for found in search.forward(first, last):
            yield found
        return
    count = DEFAULT_LAST if args.last is None else args.last
    newest, last_seq, looked = await search.newest(count, first=first, limit=args.search)
    for found in newest:
        yield found
    if len(newest) < count and looked >= args.search:
        print(f"tidemill: {len(newest)} of {count} found among the newest {looked} messages; --search N looks further", file=sys.stderr)
    if _follows(args):
        async for found in search.forward(last_seq + 1):
            yield found


def _follows(args: argparse.Namespace) -> bool:
    """Return whether to wait for new samples; a run that is over has none."""
    return args.follow and not args.ended


def _writer(args: argparse.Namespace) -> Callable[[Found], None]:
    if args.raw:
        return _write_raw
    if args.json:
        return _write_json
    console = Console(highlight=False, soft_wrap=True)
    return lambda found: console.print(block(found, full=args.full))


def _write_json(found: Found) -> None:
    assert found.sample is not None
    line = found.line
    print(to_json({**as_map(line.seq, found.sample), "lag": line.lag, "stored_s": line.stored_s}), flush=True)


def _write_raw(found: Found) -> None:
    assert found.stored is not None
    if isinstance(found.stored.data, bytes):
        sys.stdout.buffer.write(len(found.stored.data).to_bytes(4, "little") + found.stored.data)
        sys.stdout.buffer.flush()
