"""``tidemill replay``: copies samples of a run or a recording into a recording, a file of JSON lines, or a run that
only keeps samples.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

from tidemill.bus.client.layout import create_archive
from tidemill.bus.errors import BusError, WireError
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.readers import StoredSample
from tidemill.bus.streams.samples import PARTS_HEADER
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Sample
from tidemill.launch.cli.arguments import add_filter, add_run, add_since
from tidemill.launch.cli.find_run import look
from tidemill.launch.cli.tail import tail
from tidemill.launch.run.process import set_up_logging
from tidemill.launch.samples.filters import Filter, filter_of, headline_of, positive
from tidemill.launch.samples.recording import Origin, Recording, RecordingWriter
from tidemill.launch.samples.search import SampleSearch, as_map, opened
from tidemill.launch.samples.text import to_json
from tidemill.launch.settings.extras import require

CONNECT_S = 3.0
REPLAYED_HEADER = "Tm-Replayed"
"""Header with the ``<run>.<sequence>`` that a sample had where it was replayed from."""
_OF_THE_STORE = (PARTS_HEADER, REPLAYED_HEADER, "Nats-Msg-Size", "Nats-Expected-Stream")
"""Headers that belong to a message as it was stored, not to its sample."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_run(parser)
    parser.add_argument("--from", dest="source", default="", metavar="FILE", help="samples of a recording")
    parser.add_argument("-o", "--out", default="", metavar="FILE", help="into a recording, or JSON lines (.jsonl)")
    parser.add_argument("--to-bus", default="", metavar="URL", help="into the stream of a run on this bus")
    parser.add_argument("--train", default="", metavar="DIRECTORY", help="train the steps of --run-dir again, there")
    parser.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="for --train")
    parser.add_argument("--to-run", default="", metavar="RUN", help="into the stream of this run (default: theirs)")
    parser.add_argument("--last", type=int, metavar="N", help="the N newest that match (default: all)")
    add_since(parser)
    add_filter(parser)


def run(args: argparse.Namespace) -> int:
    """Copy samples to a file or another run, or repeat the recorded steps (--train). Returns the exit code."""
    if args.train:
        require("learner")
        from tidemill.launch.cli.retrain import retrain

        return retrain(args.run_dir, args.train, args.set)
    set_up_logging("replay", level=logging.ERROR)
    return asyncio.run(replay_file(args)) if args.source else look(args, replay_run)


class Sink(Protocol):
    """Destination of replayed samples."""

    async def add(self, stored: StoredSample) -> None:
        """Store one sample. Raises WireError for a sample that cannot be read."""
        ...


async def replay_run(bus: Bus, args: argparse.Namespace) -> int:
    """Replay samples of a run; return the exit code. Raises ValueError."""
    if args.ended and args.to_run and not args.to_bus:
        raise ValueError("--to-run: want --to-bus URL as well: the bus of a run that is not running is read-only")
    search, state = SampleSearch(bus, filter_of(args)), await bus.samples.info()

    async def samples() -> AsyncIterator[StoredSample]:
        """Yield the samples that the arguments select, of those in the stream now."""
        async for match in tail(
            search, argparse.Namespace(**{**vars(args), "follow": False, "since": args.since or _all(args)})
        ):
            yield match.stored

    return await _replay(samples(), Origin(run=bus.run, created=state.created), args, url=args.bus or bus.connected_url)


def _all(args: argparse.Namespace) -> str:
    """Return the first sequence as ``--since`` if neither a start nor a number is given; else empty."""
    return "#1" if args.last is None and args.since_version is None else ""


async def replay_file(args: argparse.Namespace) -> int:
    """Replay a recording, or its samples that fit the filter; return the exit code. Raises ValueError."""
    positive("--last", args.last)
    if args.since or args.since_version is not None or args.last is not None or args.lag:
        raise ValueError("--from: want no --since, --since-version, --last or --lag: these do not apply to a recording")
    selection = filter_of(args)
    recording = Recording.open(Path(args.source))

    async def samples() -> AsyncIterator[StoredSample]:
        """Yield the samples of the recording that fit the filter."""
        for stored in recording:
            if fits(selection, stored):
                yield stored

    try:
        code = await _replay(samples(), recording.origin, args, url=args.bus)
    except BusError as error:
        raise ValueError(str(error)) from None
    finally:
        recording.close()
    if recording.cut:
        print(f"tidemill: {args.source} was cut off; what it has was replayed", file=sys.stderr)
    return code


def fits(filter: Filter, stored: StoredSample) -> bool:
    """Return whether a sample fits. A broken one fits the empty filter only."""
    sample = opened(stored)
    if isinstance(sample, WireError):
        return filter == Filter()
    return bool(filter.of(headline_of(stored.seq, stored.stored_s, stored.subject, sample))) and filter.matches_text(
        sample
    )


async def _replay(samples: AsyncIterator[StoredSample], origin: Origin, args: argparse.Namespace, *, url: str) -> int:
    to_bus = bool(args.to_bus or args.to_run)
    if to_bus == bool(args.out):
        raise ValueError("want --out FILE, or --to-bus URL and --to-run RUN")
    count = size = broken = 0
    async with AsyncExitStack() as stack:
        sink: Sink
        if to_bus:
            sink = await stack.enter_async_context(_archive(args.to_bus or url, args.to_run or origin.run, origin))
        else:
            sink = stack.enter_context(_file(Path(args.out), origin))
        async for stored in samples:
            try:
                await sink.add(stored)
            except WireError as error:
                broken += 1
                print(f"tidemill: #{stored.seq} left out: {error}", file=sys.stderr)
                continue
            count, size = count + 1, size + len(stored.data) if isinstance(stored.data, bytes) else size
    where = args.out or f"run {args.to_run or origin.run}"
    print(
        f"{count} samples of run {origin.run}, {size} bytes, into {where}" + (f"; {broken} left out" if broken else ""),
        file=sys.stderr,
    )
    return 0


@contextmanager
def _file(path: Path, origin: Origin) -> Iterator[Sink]:
    if path.suffix not in (".tide", ".jsonl"):
        raise ValueError(f"--out: want a file NAME.tide (all that a sample has) or NAME.jsonl, got {path}")
    try:
        file = path.open("xb")
    except OSError as error:
        raise ValueError(f"--out: want a new file, got {path}: {error.strerror}") from None
    with file:
        try:
            if path.suffix == ".jsonl":
                yield _JsonLines(file)
                return
            recorder = RecordingWriter(file, origin)
            yield _Recorded(recorder)
            recorder.close()
        except ValueError:  # an argument was wrong
            path.unlink()
            raise


class _Recorded:
    def __init__(self, recorder: RecordingWriter) -> None:
        self._recorder = recorder

    async def add(self, stored: StoredSample) -> None:
        """Write the stored bytes. Raises WireError when parts of them are gone."""
        self._recorder.add(stored)


class _JsonLines:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    async def add(self, stored: StoredSample) -> None:
        """Write one line of JSON."""
        self._file.write(
            to_json({**as_map(stored.seq, _readable(stored)), "stored_s": stored.stored_s}).encode() + b"\n"
        )


@asynccontextmanager
async def _archive(url: str, run: str, origin: Origin) -> AsyncIterator[Sink]:
    """Yield a sink into the stream of a run that only keeps samples. Raises ConfigMismatch for one that trains."""
    if not url:
        raise ValueError("--to-bus: want the NATS URL of the bus to replay to, got nothing")
    async with connect(url, run, name="replay", wait_s=CONNECT_S) as bus:
        await create_archive(bus.jet)
        yield _Published(bus, origin)


class _Published:
    def __init__(self, bus: Bus, origin: Origin) -> None:
        self._bus, self._origin = bus, origin

    async def add(self, stored: StoredSample) -> None:
        """Publish the same bytes under the same message id; for another run, with its name in them."""
        sample, data = _readable(stored), stored.data
        assert isinstance(data, bytes)
        if self._bus.run != sample.run:
            data = encode_sample(replace(sample, run=self._bus.run))
        headers = {name: value for name, value in stored.headers.items() if name not in _OF_THE_STORE}
        headers[REPLAYED_HEADER] = f"{self._origin.run}.{stored.seq}"
        await self._bus.samples.publish_bytes(data, subjects.sample_in(self._bus.run, stored.subject), headers)


def _readable(stored: StoredSample) -> Sample:
    sample = opened(stored)
    if isinstance(sample, WireError):
        raise sample
    return sample
