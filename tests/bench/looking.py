"""Cost of readers for the queue: publishing and reading with 0, 1 and 8 of them, in the same run.

python -m tests.bench.looking [--rounds 3] [--samples 1500] [--tokens 3500] [--rate 150]

A publisher and the learner's reader (decoding, checking) work as in ``bench.sample_path``, while other readers follow
the stream, each a ``tidemill tail --follow`` process of its own: ``tails`` read every payload (and print it, to
nowhere), ``filters`` have ``--reward '>2'``, which no sample meets, and so read headers alone. The first part is at
full speed (samples/s from the first publish to the last read), the second at ``--rate`` samples/s: CPU time of a sample
in publisher, server and reader, and a publish's wait for its acknowledgement.

Rounds are interleaved: each runs every variant once, in turning order. Ratios compare medians with those of the same
run without such readers. Where there are fewer cores than processes, the readers' own CPU time takes from all others:
full speed then measures the machine more than the queue, and the CPU per sample is the figure that counts.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.sample_path import IN_FLIGHT, clear, in_flight, make_sample, prepare, server_cpu_s
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import WireError
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.subjects import nonce

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = {"nobody": (0, ()), "1 tail": (1, ()), "8 tails": (8, ()), "8 filters": (8, ("--reward", ">2"))}
"""Variants by name: number of readers, and their options."""
_MORE_FLAT_OUT = 4
"""Factor of the number of samples at full speed."""


async def publisher(url: str, run: str, count: int, tokens: int, rate: float) -> dict[str, float]:
    samples = [make_sample(run, task, tokens) for task in range(1, 33)]
    waits: list[float] = []
    async with connect(url, run, name="publisher") as bus:

        async def publish(number: int) -> None:
            sample = samples[number % len(samples)]
            object.__setattr__(
                sample, "attempt", f"bench{number}"
            )  # another message id, without paying for another Sample
            began = time.monotonic()
            await bus.samples.publish(sample)
            waits.append(time.monotonic() - began)

        cpu, wall = time.process_time(), time.time()
        if rate:
            await paced(count, rate, publish)
        else:
            await in_flight(count, publish)
        cpu_s = time.process_time() - cpu
    return {
        "cpu_s": cpu_s,
        "began_s": wall,
        "wait_p50_ms": percentile(waits, 0.5),
        "wait_p95_ms": percentile(waits, 0.95),
    }


async def paced(count: int, rate: float, publish: Any) -> None:
    """Publish at ``rate`` a second, with at most as many in flight as at full speed."""
    room, began = asyncio.Semaphore(IN_FLIGHT), time.monotonic()

    async def one(number: int) -> None:
        async with room:
            await publish(number)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(began + number / rate - time.monotonic())
            group.create_task(one(number))


def percentile(waits: list[float], share: float) -> float:
    return sorted(waits)[int(share * (len(waits) - 1))] * 1e3


async def reader(url: str, run: str, count: int) -> dict[str, float]:
    async with connect(url, run, name="reader") as bus:
        stream = bus.samples.read(await bus.samples.cursor(), vocab_size=150_000)
        cpu = time.process_time()
        for number in range(count):
            received = await anext(stream)
            assert received.seq == number + 1
            if isinstance(received.sample, WireError):
                raise received.sample
        ended, cpu_s = time.time(), time.process_time() - cpu
        await stream.aclose()  # type: ignore[attr-defined]
    return {"cpu_s": cpu_s, "ended_s": ended}


async def readers_there(url: str, run: str, count: int) -> None:
    """Wait until ``count`` consumers read SAMPLES."""
    async with connect(url, run, name="look") as bus, asyncio.timeout(120):

        async def there() -> int:
            return len((await bus.jet.call(f"CONSUMER.NAMES.TM_{run}_SAMPLES"))["consumers"] or [])

        while True:
            if await there() >= count:
                return
            await asyncio.sleep(0.05)


def one(variant: str, server: EmbeddedServer, args: argparse.Namespace, rate: float) -> dict[str, float]:
    run, (onlookers, wanted) = f"bench-{nonce()}", VARIANTS[variant]
    asyncio.run(prepare(server.url, run))
    tail = [
        sys.executable,
        "-m",
        "tidemill",
        "tail",
        "--bus",
        server.url,
        "--run",
        run,
        "--last",
        "0",
        "--follow",
        "--jsonl",
        *wanted,
    ]
    role = [sys.executable, "-m", "tests.bench.looking", "--url", server.url, "--run", run]
    role += ["--samples", str(args.samples), "--tokens", str(args.tokens), "--rate", str(rate), "--role"]
    tails = [subprocess.Popen(tail, stdout=subprocess.DEVNULL, cwd=ROOT) for _ in range(onlookers)]
    children: dict[str, subprocess.Popen[str]] = {}
    try:
        children["reader"] = subprocess.Popen([*role, "reader"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        asyncio.run(readers_there(server.url, run, onlookers + 1))
        before = server_cpu_s(server.pid)
        children["publisher"] = subprocess.Popen([*role, "publisher"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        found = {name: json.loads(child.communicate(timeout=180)[0]) for name, child in children.items()}
        spent = server_cpu_s(server.pid) - before
    finally:
        for child in (*tails, *children.values()):
            child.terminate()
            child.wait()
    asyncio.run(clear(server.url, run))
    cost = {name: result["cpu_s"] / args.samples * 1e6 for name, result in found.items()} | {
        "server": spent / args.samples * 1e6
    }
    return {
        **cost,
        "sum": sum(cost.values()),
        "samples/s": args.samples / (found["reader"]["ended_s"] - found["publisher"]["began_s"]),
        "wait p50": found["publisher"]["wait_p50_ms"],
        "wait p95": found["publisher"]["wait_p95_ms"],
    }


def compare(server: EmbeddedServer, args: argparse.Namespace, rate: float) -> dict[str, dict[str, float]]:
    """Return the medians of every variant."""
    names = list(VARIANTS)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(args.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            rounds[name].append(one(name, server, args, rate))
            print(f"round {number} {name:10}", *[f"{k}={v:.1f}" for k, v in rounds[name][-1].items()], file=sys.stderr)
    return {
        name: {key: statistics.median(result[key] for result in results) for key in results[0]}
        for name, results in rounds.items()
    }


def report(medians: dict[str, dict[str, float]], title: str, ratios: tuple[str, ...]) -> None:
    columns = list(medians["nobody"])
    print(f"{title}; CPU-us per sample, waits in ms")
    print(f"{'':10}" + "".join(f"{column:>11}" for column in columns))
    for name, row in medians.items():
        print(f"{name:10}" + "".join(f"{row[column]:11.{1 if 'wait' in column else 0}f}" for column in columns))
    for name in list(VARIANTS)[1:]:
        print(
            f"RATIO {name} / nobody: "
            + ", ".join(f"{key} {medians[name][key] / medians['nobody'][key]:.2f}" for key in ratios)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=3500)
    parser.add_argument("--rate", type=float, default=150.0, help="samples/s of the paced half")
    for hidden in ("--role", "--url", "--run"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "publisher":
        print(json.dumps(asyncio.run(publisher(args.url, args.run, args.samples, args.tokens, args.rate))))
    elif args.role == "reader":
        print(json.dumps(asyncio.run(reader(args.url, args.run, args.samples))))
    else:
        with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory), BusConfig()) as server:
            title = f"{args.tokens} tokens a sample, medians of {args.rounds} rounds"
            paced_medians = compare(server, args, args.rate)
            report(
                paced_medians,
                f"{args.samples} samples at {args.rate:g} a second, {title}",
                ("publisher", "server", "reader", "wait p50"),
            )
            args.samples *= _MORE_FLAT_OUT
            report(compare(server, args, 0), f"{args.samples} samples flat out, {title}", ("samples/s",))


if __name__ == "__main__":
    main()
