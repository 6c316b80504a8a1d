"""``tidemill archive``: writes every sample of a run to recordings, as a registered reader, for which trimming waits;
``tidemill cursors``: lists the registered readers, and removes one that will not return.

    stream SAMPLES --read--> recording in DIR --fsync--> the reader's position moves --> the learner may trim

Killed at any moment, it resumes: samples behind the reader's position are read again, samples in a recording are not
written twice, and a partial frame is cut off. A recording is closed when it is large enough, and when the archive ends.
"""

import argparse
import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from rich.console import Console

from tidemill.bus.errors import StreamTrimmed, WireError
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.readers import LEAVE, WAIT, Cursors, History, Reader, ShardExtent, StoredSample, shard_extents
from tidemill.bus.system.coroutines import ended, first_error
from tidemill.bus.wire.rows import ReaderRow
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import change, look, read_until_drained
from tidemill.launch.run.access import OPERATOR
from tidemill.launch.samples.filters import positive
from tidemill.launch.samples.recording import Origin, RecordingWriter, repair

log = logging.getLogger(__name__)

SUFFIX = ".tide"
CONNECT_S = 60.0
# Longest time in seconds between reading a sample and its fsync, after which the reader's position advances.
SYNC_EVERY_S = 1.0


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("-o", "--out", required=True, metavar="DIRECTORY", help="directory of the recordings")
    parser.add_argument("--name", default="archive", help="name under which it is registered (default: archive)")
    policy = "wait: trimming waits for it, until the stream is 85 %% full; leave: it does not"
    parser.add_argument("--policy", choices=("wait", "leave"), default="wait", help=policy)
    parser.add_argument("--rotate", type=float, default=256.0, metavar="MB", help="size at which a recording is closed")
    parser.add_argument("--until-end", action="store_true", help="end at the present end of the stream")


def run(args: argparse.Namespace) -> int:
    """Write samples to recordings until drained. Returns the exit code of ``process.run``. Raises ValueError."""
    return read_until_drained(
        args, lambda url, run, draining: archive(url, run, args, draining), name=args.name, user=OPERATOR
    )


async def archive(url: str, run: str, args: argparse.Namespace, draining: asyncio.Event) -> None:
    """Archive until drained; with ``args.until_end``, the samples present at the start. Raises BusError, ValueError."""
    positive("--rotate", args.rotate)
    async with connect(url, run, name=f"archive {args.name}", wait_s=CONNECT_S) as bus:
        shards = await bus.jet.shards()
        try:
            async with asyncio.TaskGroup() as group:
                for created, extent in (await shard_extents(bus.jet)).items():
                    origin, suffix = Origin(run=run, created=created), shards.suffix(extent.shard)
                    group.create_task(_archive_shard(bus, args, draining, origin, extent, suffix))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None


async def _archive_shard(
    bus: Bus, args: argparse.Namespace, draining: asyncio.Event, origin: Origin, extent: ShardExtent, suffix: str
) -> None:
    """Archive one shard. Of several, each has a reader and a directory of its own, whose names end with its own."""
    name, directory = f"{args.name}{suffix}", Path(args.out) / f"shard{suffix}" if suffix else Path(args.out)
    recordings = ArchiveDirectory(directory, origin, rotate_bytes=int(args.rotate * 1e6))
    reader: Reader | UnregisteredReader
    if args.ended:
        floor = extent.first_seq - extent.step
        reader = UnregisteredReader(
            name=name, row=ReaderRow(created=origin.created, floor=max(0, floor), policy=args.policy)
        )
    else:
        reader = await Reader.open(bus, name, policy=args.policy, shard=extent.shard)
    first, last = recordings.last_seq + extent.step, reader.row.floor
    if last >= first > extent.step:
        log.warning("samples %d to %d were archived elsewhere: %s has none", first, last, directory)
    try:
        end = extent.last_seq if args.until_end or args.ended else None
        await _fill(_unarchived(bus, reader, recordings.last_seq, end, extent), recordings, reader, draining)
    finally:
        recordings.close()
    log.info("archived up to seq=%d samples=%d directory=%s", reader.row.floor, recordings.written, directory)


@dataclass(slots=True, kw_only=True)
class UnregisteredReader:
    """Reader of a run that is over: no sample is trimmed meanwhile, and its bus is read-only."""

    name: str
    row: ReaderRow

    async def advance(self, floor: int) -> None:
        """Move the position, in memory only; it never moves back."""
        self.row = replace(self.row, floor=max(floor, self.row.floor))


async def _fill(
    samples: AsyncIterator[StoredSample],
    recordings: "ArchiveDirectory",
    reader: Reader | UnregisteredReader,
    draining: asyncio.Event,
) -> None:
    drained = asyncio.create_task(draining.wait(), name="draining")
    upcoming: asyncio.Task[StoredSample | None] | None = None
    synced_s = time.monotonic()
    newest_seq = max(reader.row.floor, recordings.last_seq)
    try:
        while not draining.is_set():
            upcoming = upcoming or asyncio.ensure_future(anext(samples, None))
            await asyncio.wait({upcoming, drained}, timeout=SYNC_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if upcoming.done():
                stored, upcoming = upcoming.result(), None
                if stored is None:
                    break
                newest_seq = stored.seq
                recordings.add(stored)
            if time.monotonic() - synced_s >= SYNC_EVERY_S or draining.is_set():
                synced_s = time.monotonic()
                # In this order: a sample behind the position may be trimmed, so it must be on the disk.
                await asyncio.to_thread(recordings.sync)
                await reader.advance(newest_seq)
        await asyncio.to_thread(recordings.sync)
        await reader.advance(newest_seq)
    finally:
        await ended(*(task for task in (upcoming, drained) if task is not None))
        await samples.aclose()  # type: ignore[attr-defined]


async def _unarchived(
    bus: Bus, reader: Reader | UnregisteredReader, last_seq: int, last: int | None, extent: ShardExtent
) -> AsyncIterator[StoredSample]:
    """Yield the samples after the reader's position that no recording has, up to ``last``; None = for ever."""
    floor, created = max(reader.row.floor, last_seq), reader.row.created
    expected, begun = floor + extent.step, floor > 0
    if begun:  # a new reader begins at the first sample in the stream
        await _check_gap(bus, reader, expected, created)
    async for stored in History(bus.jet).payloads(floor + 1, last, only_shard=extent.shard):
        if begun and stored.seq > expected:  # parts were between them, or messages that are gone
            await _check_gap(bus, reader, expected, created)
        expected, begun = stored.seq + extent.step, True
        yield stored


async def _check_gap(bus: Bus, reader: Reader | UnregisteredReader, expected: int, created: str) -> None:
    first = (await shard_extents(bus.jet))[created].first_seq
    if first <= expected:
        return
    if reader.row.policy != LEAVE:
        what = f"{reader.name}: samples {expected} to {first - 1} are missing (--policy leave continues without them)"
        raise StreamTrimmed(what, expected, first)
    log.warning(
        "samples are missing, they were trimmed before they were archived first=%d last=%d", expected, first - 1
    )


class ArchiveDirectory:
    """The recordings of one stream in a directory; the last one may be open."""

    def __init__(self, directory: Path, origin: Origin, *, rotate_bytes: int) -> None:
        """Repair a recording that a kill left open. Raises ValueError for samples of another stream."""
        self._directory, self._origin, self._rotate_bytes = directory, origin, rotate_bytes
        self._file: IO[bytes] | None = None
        self._recorder: RecordingWriter | None = None
        self.written = 0
        self.dirty = False  # True if samples are written that `sync` has not fsynced
        directory.mkdir(parents=True, exist_ok=True)
        self.last_seq = 0  # Sequence of the last sample in a recording
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            recorded_origin, last = repair(path)
            if recorded_origin is not None and recorded_origin != origin:
                ours, theirs = (
                    f"run {stream.run} (stream of {stream.created})" for stream in (origin, recorded_origin)
                )
                raise ValueError(f"--out: want a directory for {ours}, {path} is of {theirs}")
            self.last_seq = max(self.last_seq, last)

    def add(self, stored: StoredSample) -> None:
        """Write a sample to the open recording, or to a new one. A sample with missing parts is logged and left out.

        The sample is on the disk after the next ``sync`` or ``close``.
        """
        if self._recorder is None:
            self._file = (self._directory / f"{self._origin.run}-{stored.seq:012d}{SUFFIX}").open("xb")
            self._recorder = RecordingWriter(self._file, self._origin)
        try:
            self._recorder.add(stored)
        except WireError as error:
            log.warning("sample left out seq=%d error=%s", stored.seq, error)
            return
        self.last_seq, self.dirty = stored.seq, True
        self.written += 1
        if self._recorder.size_bytes >= self._rotate_bytes:
            self.close()

    def sync(self) -> None:
        """Bring all added samples to the disk (fsync)."""
        if self._file is not None and self.dirty:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.dirty = False

    def close(self) -> None:
        """Close the open recording with its index."""
        if self._recorder is None or self._file is None:
            return
        self._recorder.close()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = self._recorder = None
        self.dirty = False


def add_cursors(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--forget", default="", metavar="NAME", help="remove this reader: trimming waits no longer")


def run_cursors(args: argparse.Namespace) -> int:
    """List the registered readers of a run, after --forget removed one. Returns 0. Raises ValueError."""
    return change(args, show_cursors) if args.forget else look(args, show_cursors)


async def show_cursors(bus: Bus, args: argparse.Namespace) -> int:
    """List the registered readers, after removing the reader of --forget; return 0."""
    console = Console(highlight=False, soft_wrap=True)
    if args.forget:
        await Cursors(bus).drop(args.forget)
        console.print(f"{args.forget}: forgotten")
    extents, places = await shard_extents(bus.jet), await Cursors(bus).all()
    for name, place in places.items():
        extent = extents.get(place.created)
        if extent is None:
            kept = "of an earlier stream, which is gone"
        elif place.given_up:
            kept = "given up: the stream was too full to wait for it"
        else:
            kept = "trimming waits for it" if place.policy == WAIT else "trimming does not wait for it"
        behind = 0 if extent is None else extent.behind(place.floor)
        text = f"{name}: at {place.floor}, {behind} messages behind; {kept}; read by {place.owner}"
        console.print(text, markup=False)
    if not places:
        console.print("no reader is registered; the learner's own position is in its checkpoint")
    return 0
