"""``tidemill replay``: copies samples of a run or a recording into a recording, a file of JSON lines, or a run that
only keeps samples; with ``--train`` a learner alone repeats the recorded steps of a run, in a directory of its own.
"""

import argparse
import asyncio
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from tidemill.bus.client.layout import create_archive
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, WireError
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect, current_epoch
from tidemill.bus.streams.readers import StoredSample
from tidemill.bus.streams.shard_reading import PARTS_HEADER
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Plan, Sample
from tidemill.bus.wire.subjects import SETTINGS_KEY
from tidemill.launch.cli.arguments import add_filter, add_run, add_since
from tidemill.launch.cli.find_run import look
from tidemill.launch.cli.tail import tail
from tidemill.launch.run.directory import directory_of_one
from tidemill.launch.run.process import set_up_logging
from tidemill.launch.samples.filters import Filter, filter_of, headline_of, positive
from tidemill.launch.samples.recording import Origin, Recording, RecordingWriter
from tidemill.launch.samples.search import SampleSearch, as_map, opened
from tidemill.launch.samples.text import to_json
from tidemill.launch.settings.config_loader import changes, from_map, load, to_map
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.learner.buffer.ledger import read_state
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY

CONNECT_S = 3.0
REPLAYED_HEADER = "Tm-Replayed"  # Header with the `<run>.<sequence>` that a sample had where it was replayed from
# Headers that belong to a message as it was stored, not to its sample.
_OF_THE_STORE = (PARTS_HEADER, REPLAYED_HEADER, "Nats-Msg-Size", "Nats-Expected-Stream")


def add(parser: argparse.ArgumentParser) -> None:
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
        return retrain(args.run_dir, args.train, args.set)
    set_up_logging("replay", level=logging.ERROR)
    return asyncio.run(replay_file(args)) if args.source else look(args, replay_run)


# Stores one replayed sample. Raises WireError for a sample that cannot be read, or that lacks parts.
Store = Callable[[StoredSample], Awaitable[None]]


async def replay_run(bus: Bus, args: argparse.Namespace) -> int:
    """Replay samples of a run; return the exit code. Raises ValueError."""
    if args.ended and args.to_run and not args.to_bus:
        raise ValueError("--to-run: want --to-bus URL as well: the bus of a run that is not running is read-only")
    search, state = SampleSearch(bus, filter_of(args)), await bus.samples.info()
    url, origin = args.bus or bus.connected_url, Origin(run=bus.run, created=state.created)
    args.follow = False
    args.since = args.since or ("#1" if args.last is None and args.since_version is None else "")
    return await _replay((match.stored async for match in tail(search, args)), origin, args, url=url)


async def replay_file(args: argparse.Namespace) -> int:
    """Replay a recording, or its samples that fit the filter; return the exit code. Raises ValueError."""
    positive("--last", args.last)
    if args.since or args.since_version is not None or args.last is not None or args.lag:
        raise ValueError("--from: want no --since, --since-version, --last or --lag: these do not apply to a recording")
    selection = filter_of(args)
    recording = Recording.open(Path(args.source))

    async def samples() -> AsyncIterator[StoredSample]:
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
    line = headline_of(stored.seq, stored.stored_s, stored.subject, sample)
    return bool(filter.of(line)) and filter.matches_text(sample)


async def _replay(samples: AsyncIterator[StoredSample], origin: Origin, args: argparse.Namespace, *, url: str) -> int:
    to_bus = bool(args.to_bus or args.to_run)
    if to_bus == bool(args.out):
        raise ValueError("want --out FILE, or --to-bus URL and --to-run RUN")
    count = size = broken = 0
    async with AsyncExitStack() as stack:
        store: Store
        if to_bus:
            store = await stack.enter_async_context(_archive(args.to_bus or url, args.to_run or origin.run, origin))
        else:
            store = stack.enter_context(_file(Path(args.out), origin))
        async for stored in samples:
            try:
                await store(stored)
            except WireError as error:
                broken += 1
                print(f"tidemill: #{stored.seq} left out: {error}", file=sys.stderr)
                continue
            count, size = count + 1, size + len(stored.data) if isinstance(stored.data, bytes) else size
    where = args.out or f"run {args.to_run or origin.run}"
    left_out = f"; {broken} left out" if broken else ""
    print(f"{count} samples of run {origin.run}, {size} bytes, into {where}{left_out}", file=sys.stderr)
    return 0


@contextmanager
def _file(path: Path, origin: Origin) -> Iterator[Store]:
    """Yield the writer of a new recording or of JSON lines. Raises ValueError for another name, or where it exists."""
    if path.suffix not in (".tide", ".jsonl"):
        raise ValueError(f"--out: want a file NAME.tide (all that a sample has) or NAME.jsonl, got {path}")
    try:
        file = path.open("xb")
    except OSError as error:
        raise ValueError(f"--out: want a new file, got {path}: {error.strerror}") from None
    with file:

        async def write_line(stored: StoredSample) -> None:
            line = to_json({**as_map(stored.seq, _readable(stored)), "stored_s": stored.stored_s})
            file.write(line.encode() + b"\n")

        try:
            if path.suffix == ".jsonl":
                yield write_line
                return
            recorder = RecordingWriter(file, origin)

            async def record(stored: StoredSample) -> None:
                recorder.add(stored)

            yield record
            recorder.close()
        except ValueError:  # an argument was wrong
            path.unlink()
            raise


@asynccontextmanager
async def _archive(url: str, run: str, origin: Origin) -> AsyncIterator[Store]:
    """Yield a publisher into the stream of a run that only keeps samples. Raises ConfigMismatch for one that trains.

    It publishes the same bytes under the same message id; for another run, with its name in them.
    """
    if not url:
        raise ValueError("--to-bus: want the NATS URL of the bus to replay to, got nothing")
    async with connect(url, run, name="replay", wait_s=CONNECT_S) as bus:
        await create_archive(bus.jet)

        async def publish(stored: StoredSample) -> None:
            sample, data = _readable(stored), stored.data
            assert isinstance(data, bytes)
            if bus.run != sample.run:
                data = encode_sample(replace(sample, run=bus.run))
            headers = {name: value for name, value in stored.headers.items() if name not in _OF_THE_STORE}
            headers[REPLAYED_HEADER] = f"{origin.run}.{stored.seq}"
            subject = subjects.sample_in(bus.run, stored.subject)
            await bus.samples.publish_bytes(data, subject, headers, task=sample.task)

        yield publish


def _readable(stored: StoredSample) -> Sample:
    sample = opened(stored)
    if isinstance(sample, WireError):
        raise sample
    return sample


BUS_DIRECTORY, CHECKPOINTS = "bus", "checkpoints"
# Settings of a learner without engines and actors, on a bus of its own; no reward is required of old samples.
ALONE = (
    *("up.engines=0", "up.actors=0", "up.require_reward=-1e30", "prepare=null", "bus.cluster=1", "bus.auth=false"),
    *("eval.every=0", "eval.best=''", "eval.stop_after=0"),
    *("learner.checkpoint.store=local", "learner.checkpoint.copies=2"),
)


def retrain(run_dir: str, out: str, settings: Sequence[str]) -> int:
    """Repeat all steps that have their samples; return the exit code of ``tidemill up``. Raises ValueError.

    The streams of the run are copied, not changed. No engine and no actor runs: every batch is a batch of PLAN, with
    the log-probs recorded in its samples. Each step has the settings of its first execution, and the weights are the
    same bits; with others (``--set learner...``) it is off-policy training on the recorded samples.
    """
    from tidemill.launch.run.up import run_up

    source, target = Path(run_dir), Path(out)
    if not run_dir or not (source / CONFIG_FILE).exists():
        raise ValueError(f"--train: want --run-dir, the directory of a run on this machine, got {run_dir!r}")
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"--train: want a directory that is empty or not there yet, got {out}")
    before = load(source / CONFIG_FILE, settings, os.environ).config
    if before.bus.url or before.bus.auth or not (source / BUS_DIRECTORY / "store").exists():
        want = "a run with an embedded bus without users, whose streams are in its directory"
        raise ValueError(f"--train: want {want}, got {run_dir}")
    with directory_of_one(source, resume=True, fresh=False):
        of_process = shutil.ignore_patterns("*.ports", "*.pid", "port")
        shutil.copytree(source / BUS_DIRECTORY, target / BUS_DIRECTORY, ignore=of_process)
        first, last, epoch = asyncio.run(_rewound(source, target, before, unchanged=not settings))
    print(f"{before.run}: steps {first} to {last} again, in {target}")
    mine = (f"directory={target}", f"learner.steps={last}", *ALONE)
    config = from_map(to_map(before), str(source / CONFIG_FILE), changes(mine, {}))
    shutil.copy(source / CONFIG_FILE, target / CONFIG_FILE)  # makes it a run that can be resumed
    return run_up(config, resume=True, fresh=False, after_epoch=epoch)


async def _rewound(source: Path, target: Path, config: RunConfig, *, unchanged: bool) -> tuple[int, int, int]:
    """Rewind the copied run to the earliest step from which all samples are present.

    Returns (first step, last step) to repeat, at most up to ``learner.steps``, and the epoch of the run's newest
    learner.
    """
    server = EmbeddedServer(target / BUS_DIRECTORY, BusConfig())
    await asyncio.to_thread(server.start)
    try:
        async with connect(server.url, config.run, name="replay") as bus:
            epoch = await current_epoch(bus)
            last = max([record.step async for _, record in bus.plans.scan() if isinstance(record, Plan)], default=0)
            if not last:
                raise ValueError(f"--train: {source} has no recorded step")
            rows = bus.rows("wanted")
            for key in await rows.keys():  # a resumed run would keep these numbers, not take those of ``ALONE``
                await rows.delete(key)
            rows = bus.rows("run")
            for key in await rows.keys() if not unchanged else ():
                if key.startswith(f"{SETTINGS_KEY}."):
                    await rows.delete(key)
            done = await _set_back(bus, source, target)
    finally:
        await asyncio.to_thread(server.stop)
    if done >= min(last, config.learner.steps):
        cure = "bus.history_samples keeps more"
        raise ValueError(f"--train: no step behind step {done} is recorded, and what came before is trimmed ({cure})")
    return done + 1, min(last, config.learner.steps), epoch


async def _set_back(bus: Bus, source: Path, target: Path) -> int:
    """Select the start: no checkpoint if nothing was trimmed, else the oldest valid one. Returns its step or 0."""
    if all(state.first_seq <= 1 for state in await bus.samples.states()):
        await bus.rows("run").delete(CHECKPOINT_KEY)
        return 0
    kept = [checkpoint.path for checkpoint in reversed(disk.listed(source / CHECKPOINTS))]
    oldest, _ = disk.latest_valid(kept)
    if oldest is None:
        raise ValueError(f"--train: samples were trimmed, and no checkpoint in {source / CHECKPOINTS} is whole")
    copied = target / CHECKPOINTS / oldest.name
    shutil.copytree(oldest, copied)
    checkpoint, state = disk.named(oldest), read_state(disk.read_state(oldest))
    row = {"directory": str(copied), "step": checkpoint.step, "epoch": checkpoint.epoch, "chain": state["chain"]}
    await bus.rows("run").put(CHECKPOINT_KEY, row)
    return checkpoint.step
