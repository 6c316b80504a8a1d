"""A thousand actors at once: does the learner's side keep up with 1,000 samples/s of 32 KB, and how much does each
process cost?

One process plays the actors: each has a connection of its own, leases tasks, publishes valid samples one after the
other, renews and acks like a real one; only the tokens are made up, at a fixed pace. Behind the real nats-server is the
real feeder (`tidemill.learner.feed.feeder`), in a process of its own, with a rank that takes every batch and trains
nothing.

Printed: samples/s offered and stored, CPU of each process per second, memory, the number of messages by which the
feeder was behind, and the rate that the feeder could reach with a core of its own.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from tests.bench.sample_path import make_sample
from tests.waits import until
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import LiveView
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire.messages import Sampling, Span
from tidemill.learner.checkpoints import disk
from tidemill.learner.feed.feed_client import FeedClient
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feed_messages import FeedEnd
from tidemill.learner.feed.feeder import run_feeder
from tidemill.learner.feed.feeder_settings import FeederPlaces, FeederSettings, ModelFacts
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig
from tidemill.weightstore.store.registry import VersionRegistry

RUN = "thousand"
ROOT = Path(__file__).resolve().parents[2]
GROUP_SIZE, GROUPS_PER_STEP, TOKENS, PROMPT_TOKENS = 8, 64, 3500, 100
CONNECT_AT_ONCE = 50
LOOK_S, SETTLE_S = 1.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement: rates in samples/s, and the share of a core of each kind of process."""

    shards: int
    offered: float
    stored: float
    trained: float
    shares: dict[str, float]
    memory_mb: dict[str, float]
    behind: list[float]
    """Messages that the feeder had not read, once a second."""

    def us(self, name: str) -> float:
        """Return the CPU time of a kind of process for a sample, in microseconds."""
        return 1e6 * self.shares[name] / self.stored


def bus_config(shards: int) -> BusConfig:
    """Return the settings of the bus of a measurement."""
    return BusConfig(lease_s=60.0, samples_max_bytes=8_000_000_000, history_samples=2000, sample_shards=shards)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench actors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1000.0, help="samples/s of all together")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured, after everybody is at work")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a response")
    parser.add_argument("--groups", type=int, default=GROUPS_PER_STEP, help="groups of a step")
    parser.add_argument("--shards", type=int, default=1, help="streams of samples, each with a reader process")
    for hidden in ("--role", "--url", "--directory"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.role:
        asyncio.run({"feeder": feeder, "rank": rank, "actors": actors}[args.role](args))
        return
    for point in measure(args, [args.rate]):
        report(point, args.actors)


def measure(args: argparse.Namespace, rates: Sequence[float]) -> list[Point]:
    """Return the costs at each rate, one after the other on the same bus and processes."""
    config = bus_config(args.shards)
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory) / "bus", config) as server:
        asyncio.run(prepare(server.url, config))
        set_rate(Path(directory), rates[0])
        (Path(directory) / "keys").write_text(json.dumps(asdict(FeedKeys.new())))
        command = [sys.executable, "-m", "tests.bench.actors", "--url", server.url, "--directory", directory]
        command += ["--actors", str(args.actors), "--shards", str(args.shards), "--tokens", str(args.tokens)]
        command += ["--groups", str(args.groups)]
        children = {
            role: subprocess.Popen([*command, "--role", role], cwd=ROOT) for role in ("feeder", "rank", "actors")
        }
        try:
            return asyncio.run(watch(server, children, args, Path(directory), rates))
        finally:
            for child in children.values():
                child.kill()
                child.wait()


async def prepare(url: str, config: BusConfig) -> None:
    async with connect(url, RUN, config, name="prepare") as bus:
        await bus.create_layout()


async def watch(
    server: EmbeddedServer,
    children: dict[str, subprocess.Popen[bytes]],
    args: argparse.Namespace,
    directory: Path,
    rates: Sequence[float],
) -> list[Point]:
    """Measure at each rate, once samples are stored."""
    processes = {name: [psutil.Process(child.pid)] for name, child in children.items()}
    processes["nats-server"] = [psutil.Process(server.pid)]
    points = []
    async with connect(server.url, RUN, bus_config(args.shards), name="watch") as bus:
        while await num_stored(bus) < rates[0]:
            for name, child in children.items():
                if child.poll() is not None:
                    raise SystemExit(f"the {name} process ended with code {child.returncode}")
            await asyncio.sleep(LOOK_S)
        processes["readers"] = processes["feeder"][0].children()
        for rate in rates:
            set_rate(directory, rate)
            await asyncio.sleep(SETTLE_S)
            points.append(await measured(bus, processes, args, rate))
    return points


async def measured(
    bus: Bus, processes: dict[str, list[psutil.Process]], args: argparse.Namespace, rate: float
) -> Point:
    """Return the costs over ``args.seconds``."""
    view, behind = LiveView(bus), list[float]()
    before, stored, began_s = cpu(processes), await num_stored(bus), time.monotonic()
    trained = await counted(view, "trained")
    while time.monotonic() - began_s < args.seconds:
        await asyncio.sleep(LOOK_S)
        behind.append(await counted(view, "behind"))
    elapsed_s = time.monotonic() - began_s
    return Point(
        shards=args.shards,
        offered=rate,
        stored=(await num_stored(bus) - stored) / elapsed_s,
        trained=(await counted(view, "trained") - trained) / elapsed_s,
        shares={name: (after - before[name]) / elapsed_s for name, after in cpu(processes).items()},
        memory_mb={name: sum(one.memory_info().rss for one in each) / 1e6 for name, each in processes.items()},
        behind=behind,
    )


def report(point: Point, actors: int) -> None:
    """Print one measurement."""
    rates = f"offered {point.offered:.0f} samples/s, stored {point.stored:.0f}, trained {point.trained:.0f}"
    print(f"{actors} actors, one connection each, {point.shards} streams of samples; {rates}")
    behind = point.behind
    text = f"{median(behind):.0f} messages in the median, {max(behind):.0f} at most, {behind[-1]:.0f} at the end"
    print(f"feeder behind by {text}")
    for name, share in point.shares.items():
        costs = f"{100 * share:.0f} % of a core, {point.us(name):.0f} us a sample"
        print(f"  {name:<12} {costs}, {point.memory_mb[name]:.0f} MB")
    print(f"RATIO stored / offered: {point.stored / point.offered:.2f}")
    most = point.stored / point.shares["feeder"] / point.offered
    print(f"RATIO what the feeder takes with a core of its own / offered: {most:.1f}")


async def num_stored(bus: Bus) -> int:
    """Return the number of samples that were ever stored."""
    return sum(state.last_seq for state in await bus.samples.states())


def cpu(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Return user and system seconds so far, of each kind of process."""
    return {name: sum(sum(process.cpu_times()[:2]) for process in each) for name, each in processes.items()}


async def counted(view: LiveView, name: str) -> float:
    """Return a number of the feeder's live row."""
    return next(row.load.get(name, 0.0) for row, _ in await view.refresh("feeder"))


# ---- the processes


def set_rate(directory: Path, rate: float) -> None:
    """Set the samples/s of all actors together."""
    (directory / "rate.new").write_text(str(rate))
    (directory / "rate.new").rename(directory / "rate")


class Pace:
    """Seconds between two samples of an actor, as the rate says at present."""

    def __init__(self, directory: Path, actors: int) -> None:
        self._file, self._actors = directory / "rate", actors
        self.pause_s = 0.0
        self.look()

    def look(self) -> None:
        self.pause_s = self._actors / float(self._file.read_text())

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()


def keys_in(directory: Path) -> FeedKeys:
    return FeedKeys(**json.loads((directory / "keys").read_text()))


async def feeder(args: argparse.Namespace) -> None:
    directory = Path(args.directory)
    (directory / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"p{number}", "label": ""}) + "\n" for number in range(10_000))
    )
    (directory / "checkpoints").mkdir()
    tokens = list(range(PROMPT_TOKENS))

    steps_ahead = -(-args.actors // args.groups)
    with KeptPort() as port:
        url = f"tcp://127.0.0.1:{port.number}"
        (directory / "url.new").write_text(url)
        (directory / "url.new").rename(directory / "url")
        checkpoints = directory / "checkpoints"
        settings = FeederSettings(
            places=FeederPlaces(
                run=RUN,
                bus_url=args.url,
                bus=bus_config(args.shards),
                listen=url,
                keys=keys_in(directory),
                checkpoints=checkpoints,
            ),
            model=ModelFacts(vocab_size=150_000),
            learner=LearnerConfig(
                steps=1_000_000,
                groups_per_step=args.groups,
                group_size=GROUP_SIZE,
                checkpoint_every=4,
                max_tokens_per_micro_batch=8 * (args.tokens + PROMPT_TOKENS),
            ),
            staleness=StalenessConfig(max_lag=steps_ahead + 1),
            sampling=Sampling(max_new_tokens=args.tokens),
        )
        prompts = PromptFile(directory / "prompts.jsonl", tokenize=lambda prompt: tokens, max_tokens=PROMPT_TOKENS)
        await run_feeder(settings, prompts, asyncio.Event())


async def rank(args: argparse.Namespace) -> None:
    """Take every batch, report it as done, and publish a version: all the work of a learner except the training."""
    directory = Path(args.directory)
    await until((directory / "url").exists)
    url, loop = (directory / "url").read_text(), asyncio.get_running_loop()
    async with connect(args.url, RUN, bus_config(args.shards), name="rank") as bus:
        await asyncio.to_thread(train, url, keys_in(directory), directory / "checkpoints", VersionRegistry(bus), loop)


def train(url: str, keys: FeedKeys, root: Path, registry: VersionRegistry, loop: asyncio.AbstractEventLoop) -> None:
    async def published(step: int, epoch: int) -> int:
        row = await (registry.reserve(step, epoch) if step else registry.publish_initial("model", epoch))
        return (await registry.publish(row)).version

    with FeedClient(url, keys=keys, rank=0, dp_rank=0, dp_size=1, silence_s=120) as client:
        start = client.hello()
        asyncio.run_coroutine_threadsafe(registry.fence(start.epoch), loop).result(30)
        for step in range(start.step, start.steps + 1):
            if step > start.step:
                batch = client.next(step)
                if isinstance(batch, FeedEnd):
                    return
                client.done(step, {"loss": 0.0}, None)
                if batch.state:
                    path = disk.staging(root, step=step, epoch=start.epoch)
                    (path / "rank-0.bin").write_bytes(b"nothing was learnt")
                    client.checkpointed(step, str(disk.commit(path, batch.state)))
            client.published(asyncio.run_coroutine_threadsafe(published(step, start.epoch), loop).result(30), step)


async def actors(args: argparse.Namespace) -> None:
    limit = asyncio.Semaphore(CONNECT_AT_ONCE)
    async with AsyncExitStack() as stack:

        async def open_one(number: int) -> Bus:
            async with limit:
                return await stack.enter_async_context(
                    connect(args.url, RUN, bus_config(args.shards), name=f"actor-{number}", wait_s=120)
                )

        opened = await asyncio.gather(*[open_one(number) for number in range(args.actors)])
        print(f"{len(opened)} connections", flush=True)
        pace = Pace(Path(args.directory), args.actors)
        acting = [act(bus, f"actor-{number}", pace, args.tokens) for number, bus in enumerate(opened)]
        await asyncio.gather(pace.follow(), *acting)


async def act(bus: Bus, id: str, pace: Pace, num_tokens: int) -> None:
    """Publish a sample at the pace, or as soon as possible when it is late."""
    pattern = make_sample(RUN, 1, num_tokens)
    prompt = np.zeros(PROMPT_TOKENS, np.int32)
    pattern = replace(pattern, tokens=np.concatenate([prompt, pattern.tokens[PROMPT_TOKENS:]]), actor=id)
    next_s = time.monotonic() + random.uniform(0, pace.pause_s)
    while True:
        lease = await bus.tasks.lease(30)
        if lease is None:
            continue
        async with lease.kept():
            task = lease.task
            ready = replace(
                pattern,
                task=task.id,
                attempt=lease.attempt,
                prompt=task.prompt,
                tokens=np.concatenate([task.prompt_tokens, pattern.tokens[len(task.prompt_tokens) :]]),
                spans=(Span(version=task.min_version, num_tokens=num_tokens),),
                sampling=task.sampling,
                label=task.label,
            )
            for index in range(task.group_size):
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                next_s = max(next_s + pace.pause_s, time.monotonic() - 10 * pace.pause_s)
                await bus.samples.publish(replace(ready, index=index, reward=float(index)))
            await lease.ack()


if __name__ == "__main__":
    main()
