"""Cost of a sample from an actor to the learner's reader, against a bare nats-py pipeline with the same guarantees.

python -m tests.bench.sample_path [--rounds 4] [--samples 3000] [--tokens 3500] [--loop asyncio]

Ours: ``SampleStream.publish`` of Sample objects (encoded, with the summary headers) -> ``SampleStream.read`` (decoded,
every invariant checked). Bare: ``js.publish`` of ready bytes of the same size with a message id -> a pull consumer
without acknowledgements by sequence; neither encodes nor decodes. Two bare readers: ``fetch`` as in the client
library's documentation, and ``callback``, the cheapest way to receive that the library offers, without heartbeats or
reopening. Publisher, reader and server are processes of their own, 32 publishes are in flight, every publish is awaited
until stored, and every reader checks that nothing is missing.

Rounds are interleaved: each runs every variant once, in turning order. CPU is user + system time of each process for
the measured samples (after a warm-up of a tenth). The ratio compares medians; CPU is the figure that counts where cores
are shared, samples/s is for information.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import nats
import numpy as np
from nats.js import api

from tidemill.bus.config import BusConfig
from tidemill.bus.errors import WireError
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Sample, Sampling, Span, Status
from tidemill.bus.wire.subjects import nonce

IN_FLIGHT = 32
VARIANTS = ("ours", "fetch", "callback")


def make_sample(run: str, task: int, tokens: int) -> Sample:
    random = np.random.default_rng(task)
    return Sample(
        run=run,
        task=task,
        index=0,
        group_size=8,
        attempt="bench",
        prompt="How many tides has a lunar day?",
        tokens=random.integers(0, 150_000, tokens + 100, dtype=np.int32),
        response_length=tokens,
        response="two " * 50,
        rollout_log_probs=-random.random(tokens, dtype=np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        spans=(Span(version=3, num_tokens=tokens // 2), Span(version=4, num_tokens=tokens - tokens // 2)),
        reward={"score": 1.0, "format": 0.5},
        status=Status.COMPLETED,
        sampling=Sampling(max_new_tokens=4096),
        label="2",
        metadata={"source": "bench"},
        actor="bench-0",
        engine="http://127.0.0.1:30000",
    )


async def in_flight(count: int, publish: Callable[[int], Awaitable[object]]) -> None:
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await publish(number)

    await asyncio.gather(*[worker() for _ in range(IN_FLIGHT)])


async def publisher(variant: str, url: str, run: str, count: int, tokens: int) -> dict[str, float]:
    samples = [make_sample(run, task, tokens) for task in range(1, 33)]
    async with connect(url, run, name="publisher") as bus:
        js = bus.nc.jetstream()
        payloads, subject = [encode_sample(sample) for sample in samples], f"tm.{run}.sample.train.3.bench-0"

        async def ours(number: int) -> None:
            sample = samples[number % len(samples)]
            object.__setattr__(
                sample, "attempt", f"bench{number}"
            )  # another message id, without paying for another Sample
            await bus.samples.publish(sample)

        async def bare(number: int) -> None:
            await js.publish(subject, payloads[number % len(payloads)], headers={"Nats-Msg-Id": f"1.0.bench{number}"})

        publish = ours if variant == "ours" else bare
        return await measured(count, lambda begin, end: in_flight(end - begin, lambda number: publish(begin + number)))


async def reader(variant: str, url: str, run: str, count: int, tokens: int) -> dict[str, float]:
    del tokens
    async with connect(url, run, name="reader") as bus:
        receive = {"ours": read_ours, "fetch": read_fetch, "callback": read_callback}[variant]
        return await receive(bus, count)


async def read_ours(bus: Any, count: int) -> dict[str, float]:
    stream = bus.samples.read(await bus.samples.cursor(), vocab_size=150_000)

    async def take(begin: int, end: int) -> None:
        for number in range(begin, end):
            received = await anext(stream)
            assert received.seq == number + 1
            if isinstance(received.sample, WireError):
                raise received.sample

    found = await measured(count, take)
    await stream.aclose()
    return found


def by_sequence() -> api.ConsumerConfig:
    return api.ConsumerConfig(
        name=nonce(),
        ack_policy=api.AckPolicy.NONE,
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=1,
        mem_storage=True,
    )


async def read_fetch(bus: Any, count: int) -> dict[str, float]:
    js, stream = bus.nc.jetstream(), f"TM_{bus.run}_SAMPLES"
    info = await js.add_consumer(stream, by_sequence())
    sub = await js.pull_subscribe_bind(consumer=info.name, stream=stream)
    held: list[Any] = []

    async def take(begin: int, end: int) -> None:
        for number in range(begin, end):
            while not held:
                try:
                    held.extend(reversed(await sub.fetch(64, timeout=5)))
                except nats.errors.TimeoutError:
                    continue
            assert held.pop().metadata.sequence.stream == number + 1

    return await measured(count, take)


async def read_callback(bus: Any, count: int) -> dict[str, float]:
    js, stream = bus.nc.jetstream(), f"TM_{bus.run}_SAMPLES"
    info = await js.add_consumer(stream, by_sequence())
    inbox, queue, asked = bus.nc.new_inbox(), asyncio.Queue[Any](), 0

    async def arrived(message: Any) -> None:
        queue.put_nowait(message)

    await bus.nc.subscribe(inbox, cb=arrived, pending_bytes_limit=-1)

    async def take(begin: int, end: int) -> None:
        nonlocal asked
        for number in range(begin, end):
            if asked <= 32:
                request = json.dumps({"batch": 64 - asked, "expires": 30_000_000_000}).encode()
                await bus.nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{info.name}", request, reply=inbox)
                asked = 64
            message = await queue.get()
            asked -= 1
            assert message.metadata.sequence.stream == number + 1

    return await measured(count, take)


async def measured(count: int, work: Callable[[int, int], Coroutine[Any, Any, None]]) -> dict[str, float]:
    """Return CPU and wall seconds of ``count`` samples, after a warm-up of a tenth more."""
    warm = count // 10
    await work(0, warm)
    cpu, wall = time.process_time(), time.monotonic()
    await work(warm, warm + count)
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.monotonic() - wall}


def server_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def one(variant: str, server: EmbeddedServer, args: argparse.Namespace) -> dict[str, float]:
    """Return CPU-us per sample of each process, and samples/s."""
    run = f"bench-{nonce()}"
    asyncio.run(prepare(server.url, run))
    command = [
        sys.executable,
        "-m",
        "tests.bench.sample_path",
        "--url",
        server.url,
        "--run",
        run,
        "--variant",
        variant,
        "--loop",
        args.loop,
    ]
    command += ["--samples", str(args.samples), "--tokens", str(args.tokens)]
    before = server_cpu_s(server.pid)
    children = {
        role: subprocess.Popen(
            [*command, "--role", role], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for role in ("reader", "publisher")
    }
    found = {role: json.loads(child.communicate(timeout=120)[0]) for role, child in children.items()}
    spent = server_cpu_s(server.pid) - before
    asyncio.run(clear(server.url, run))
    cost = {role: result["cpu_s"] / args.samples * 1e6 for role, result in found.items()}
    cost["server"] = spent / (args.samples * 1.1) * 1e6
    return {**cost, "sum": sum(cost.values()), "samples/s": args.samples / found["reader"]["wall_s"]}


async def prepare(url: str, run: str) -> None:
    async with connect(url, run, name="prepare") as bus:
        await bus.create_layout()


async def clear(url: str, run: str) -> None:
    async with connect(url, run, name="clear") as bus:
        for name in ("TASKS", "SAMPLES", "PLAN", "PARTIALS", "DEAD"):
            await bus.js.delete_stream(f"TM_{run}_{name}")
        for bucket in ("weights", "run", "live", "wanted"):
            await bus.js.delete_key_value(f"TM_{run}_{bucket}")


def compare(args: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory), BusConfig()) as server:
        for number in range(args.rounds):
            turn = number % len(VARIANTS)
            for variant in VARIANTS[turn:] + VARIANTS[:turn]:
                rounds[variant].append(one(variant, server, args))
                print(
                    f"round {number} {variant:9}",
                    *[f"{k}={v:.0f}" for k, v in rounds[variant][-1].items()],
                    file=sys.stderr,
                )
    medians = {
        variant: {key: statistics.median(result[key] for result in results) for key in results[0]}
        for variant, results in rounds.items()
    }
    for bare in VARIANTS[1:]:
        medians["ours"][f"ratio to {bare}"] = medians["ours"]["sum"] / medians[bare]["sum"]
    return medians


def report(medians: dict[str, Any], args: argparse.Namespace) -> None:
    size = len(encode_sample(make_sample("bench", 1, args.tokens)))
    print(
        f"{size} bytes a sample, {args.samples} samples, medians of {args.rounds} rounds, {args.loop}; CPU-us "
        "per sample"
    )
    print(f"{'':10}{'publisher':>11}{'server':>9}{'reader':>9}{'sum':>9}{'samples/s':>11}")
    for variant in VARIANTS:
        row = medians[variant]
        print(
            f"{variant:10}{row['publisher']:11.0f}{row['server']:9.0f}{row['reader']:9.0f}{row['sum']:9.0f}{row['samples/s']:11.0f}"
        )
    for bare in VARIANTS[1:]:
        print(f"RATIO ours / {bare}: {medians['ours'][f'ratio to {bare}']:.2f}")


def run_loop(main: Coroutine[Any, Any, dict[str, float]], loop: str) -> dict[str, float]:
    if loop == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    return asyncio.run(main)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=3500)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    for hidden in ("--role", "--url", "--run", "--variant"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.role:
        report(compare(args), args)
        return
    role = {"publisher": publisher, "reader": reader}[args.role]
    print(json.dumps(run_loop(role(args.variant, args.url, args.run, args.samples, args.tokens), args.loop)))


if __name__ == "__main__":
    main()
