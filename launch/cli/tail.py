"""``tidemill tail``: prints samples of the stream, and new ones as they arrive."""

import argparse
import sys
from collections.abc import AsyncIterator, Callable

from rich.console import Console

from tidemill.bus.streams.bus import Bus
from tidemill.launch.cli.arguments import add_filter, add_run, add_since
from tidemill.launch.cli.find_run import look
from tidemill.launch.samples.filters import filter_of, positive
from tidemill.launch.samples.search import FoundSample, SampleSearch, as_map
from tidemill.launch.samples.text import block, to_json

DEFAULT_LAST = 10


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="follow new samples")
    parser.add_argument("--last", type=int, metavar="N", help="start with the N newest (default 10; all, with --since)")
    parser.add_argument("--full", action="store_true", help="do not shorten long texts")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per line")
    how.add_argument("--raw", action="store_true", help="stored payloads, each behind its length (4 bytes)")
    add_since(parser)
    add_filter(parser)


def run(args: argparse.Namespace) -> int:
    """Print samples of the stream; with --follow until interrupted. Returns 0. Raises ValueError."""
    return look(args, show_tail)


async def show_tail(bus: Bus, args: argparse.Namespace) -> int:
    """Print the samples that the arguments select, as text, JSON or raw payloads; return 0. Raises ValueError."""
    search, write = SampleSearch(bus, filter_of(args)), _writer(args)
    async for match in tail(search, args):
        write(match)
    return 0


async def tail(search: SampleSearch, args: argparse.Namespace) -> AsyncIterator[FoundSample]:
    """Yield the newest samples that fit, or all from a start on; with ``follow``, then new ones."""
    positive("--last", args.last)
    placed = bool(args.since) or args.since_version is not None
    first = await search.begin(args.since, args.since_version) if placed else 1
    if placed and args.last is None:
        last = None if _follows(args) else (await search.history.state()).last_seq
        async for match in search.forward(first, last):
            yield match
        return
    count = DEFAULT_LAST if args.last is None else args.last
    newest, last_seq, looked = await search.newest(count, first=first, limit=args.search)
    for match in newest:
        yield match
    if len(newest) < count and looked >= args.search:
        matches = f"{len(newest)} of {count} found among the newest {looked} messages"
        print(f"tidemill: {matches}; --search N looks further", file=sys.stderr)
    if _follows(args):
        async for match in search.forward(last_seq + 1):
            yield match


def _follows(args: argparse.Namespace) -> bool:
    return args.follow and not args.ended


def _writer(args: argparse.Namespace) -> Callable[[FoundSample], None]:
    if args.raw:
        return _write_raw
    if args.json:
        return _write_json
    console = Console(highlight=False, soft_wrap=True)
    return lambda match: console.print(block(match, full=args.full))


def _write_json(match: FoundSample) -> None:
    line = match.line
    print(to_json({**as_map(line.seq, match.sample), "lag": line.lag, "stored_s": line.stored_s}), flush=True)


def _write_raw(match: FoundSample) -> None:
    if isinstance(match.stored.data, bytes):
        sys.stdout.buffer.write(len(match.stored.data).to_bytes(4, "little") + match.stored.data)
        sys.stdout.buffer.flush()
