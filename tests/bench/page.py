"""The page of a run under load: processor time of its server and of the bus by viewers, first answers, and old samples.

python -m tests.bench.page [--rate 2000] [--processes 200] [--seconds 20] [--history 300000] [--rounds 2]
python -m tests.bench.page --rounds 0 --history 10000000    # about 5 GB of disk

A load process publishes ready samples, one step a second with 150 metrics, and a heartbeat a second for each process.
Variants, interleaved: no page, a page without viewers, with 1, and with 21. ``load`` and ``bus`` are the processor time
of a sample in the publisher and in nats-server, ``page`` the share of a core that the server takes, and a further
viewer the difference of 21 and 1 by 20. Then a page of a run with ``--history`` samples: seconds from the start of the
command to its first overview, and of a list of 100 samples at the end, in the middle, at the begin, and by a time.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.bench.looking import ROOT, paced
from tests.bench.many_samples import write_samples
from tests.bench.sample_path import make_sample, prepare, server_cpu_s
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.samples import headers_of
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Done, Plan
from tidemill.bus.wire.subjects import nonce

VARIANTS = {"no page": -1, "no viewer": 0, "1 viewer": 1, "21 viewers": 21}
NUM_METRICS = 150
REPEATS = 5
TOKENS = 64
HISTORY_STEPS = 10_000  # Of 1,000 samples each in a history of ten million


async def load(url: str, run: str, args: argparse.Namespace) -> dict[str, float]:
    """Publish for ``args.seconds``; return the processor time of a sample, and the rate that was reached."""
    async with connect(url, run, name="load") as bus:
        await bus.plans.fence(1)
        sample = make_sample(run, 1, TOKENS)
        data, headers = encode_sample(sample), headers_of(sample)
        subject = subjects.sample(run, "train", 3, "bench-0")
        count = int(args.rate * args.seconds)

        async def publish(number: int) -> None:
            named = {**headers, subjects.MESSAGE_ID: f"{1 + number // 8}.{number % 8}.{nonce()}"}
            await bus.samples.publish_bytes(data, subject, named, task=1 + number // 8)

        beside = [asyncio.create_task(step_for_ever(bus)), asyncio.create_task(beat_for_ever(bus, args.processes))]
        began_s, cpu_s = time.monotonic(), time.process_time()
        await paced(count, args.rate, publish)
        result = {"load": (time.process_time() - cpu_s) / count * 1e6, "rate": count / (time.monotonic() - began_s)}
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
    return result


async def step_for_ever(bus: Bus) -> None:
    for step in range(1, 1 << 30):
        columns = {"tasks": np.array([step], np.int64), "seqs": np.arange(8, dtype=np.int64) + 8 * step - 7}
        await bus.plans.append(
            Plan(
                epoch=1,
                step=step,
                version_steps={3: 0},
                oldest_step=None,
                data_parallel=1,
                **{"num_micro_batches": 1, "config_digest": "", "chain": "", **columns},
                group_sizes=np.array([8], np.int32),
                ranks=np.zeros(8, np.int32),
                micro_batches=np.zeros(8, np.int32),
            )
        )
        metrics = {f"train/metric_{number}": step * 0.1 for number in range(NUM_METRICS)}
        await bus.plans.append(Done(epoch=1, step=step, metrics={**metrics, "data/reward_mean": 0.5}))
        await asyncio.sleep(1)


async def beat_for_ever(bus: Bus, processes: int) -> None:
    rows = bus.rows("live")
    for beat in range(1 << 30):
        for number in range(processes):
            row = {"role": "actor", "id": f"a{number}", "host": "h", "pid": 1, "phase": "working"}
            row |= {"load": {"tokens_generated": 100.0 * beat, "waiting_share": 0.1, "in_flight": 8.0}}
            await rows.put(f"actor.a{number}", row)
            await asyncio.sleep(0.5 / processes)


async def view(url: str, viewers: int, seconds: float) -> float:
    """Read the events of several viewers; return the bytes that one gets in a second."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def read() -> int:
            num_bytes = 0
            async with session.get(f"{url}events") as response:
                try:
                    async with asyncio.timeout(seconds):
                        async for piece in response.content.iter_any():
                            num_bytes += len(piece)
                except TimeoutError:
                    pass
            return num_bytes

        return sum(await asyncio.gather(*[read() for _ in range(viewers)])) / max(1, viewers) / seconds


@contextmanager
def page(url: str, run: str, directory: Path) -> Iterator[tuple[str, int]]:
    """Run ``tidemill dashboard``; yield its address and process id."""
    file = directory / f"{nonce()}.url"
    words = ["dashboard", "--bus", url, "--run", run, "--port", "0", "--url-file", str(file)]
    process = subprocess.Popen([sys.executable, "-m", "tidemill", *words], stdout=subprocess.DEVNULL, cwd=ROOT)
    try:
        while not file.exists():
            assert process.poll() is None, "the page has ended"
            time.sleep(0.01)
        yield file.read_text().strip(), process.pid
    finally:
        process.terminate()
        process.wait()


def one(variant: str, server: EmbeddedServer, directory: Path, args: argparse.Namespace) -> dict[str, float]:
    run, viewers = f"bench-{nonce()}", VARIANTS[variant]
    asyncio.run(prepare(server.url, run))
    role = [sys.executable, "-m", "tests.bench.page", "--url", server.url, "--run", run, "--role", "load"]
    role += [word for name in ("rate", "processes", "seconds") for word in (f"--{name}", str(getattr(args, name)))]

    def measured(pid: int, address: str) -> dict[str, float]:
        child = subprocess.Popen(role, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        time.sleep(3)  # its start is no load
        before, pages, began_s = server_cpu_s(server.pid), server_cpu_s(pid) if pid else 0.0, time.monotonic()
        traffic = asyncio.run(view(address, viewers, args.seconds - 5)) if viewers > 0 else 0.0
        if viewers <= 0:
            time.sleep(args.seconds - 5)
        passed_s = time.monotonic() - began_s
        page_share = 100 * (server_cpu_s(pid) - pages) / passed_s if pid else 0.0
        bus_share = 100 * (server_cpu_s(server.pid) - before) / passed_s
        result = json.loads(child.communicate(timeout=600)[0])
        return {**result, "bus %": bus_share, "page %": page_share, "KB/s a viewer": traffic / 1e3}

    if viewers < 0:
        return measured(0, "")
    with page(server.url, run, directory) as (address, pid):
        return measured(pid, address)


async def fill(url: str, run: str, count: int) -> None:
    """Store samples, and the metrics of ten thousand steps."""
    # Ids are remembered for the window, and no sample here is stored twice.
    config = BusConfig(samples_max_bytes=20 << 30, duplicate_window_s=0.1)
    async with connect(url, run, config, name="fill") as bus:
        await bus.create_layout()
        await bus.plans.fence(1)
        await asyncio.to_thread(write_samples, url, run, count)
        assert (await bus.samples.info()).messages == count
        for step in range(1, HISTORY_STEPS + 1):
            metrics = {f"train/metric_{number}": step * 0.1 for number in range(NUM_METRICS)}
            await bus.plans.append(Done(epoch=1, step=step, metrics=metrics))


async def lists(address: str, count: int) -> dict[str, float]:
    async with aiohttp.ClientSession() as session:

        async def seconds(path: str) -> tuple[float, Any]:
            """Return the shortest of several times: the rest is other work on the machine."""
            timings = []
            for _ in range(REPEATS):
                began_s = time.monotonic()
                async with session.get(f"{address}api/{path}") as response:
                    body = await response.json()
                assert response.status == 200, body
                timings.append(time.monotonic() - began_s)
            return min(timings), body

        await seconds("run")
        newest, _ = await seconds("samples")
        first, _ = await seconds("samples?before=101")
        middle, body = await seconds(f"samples?before={count // 2}")
        assert len(body["rows"]) == 100
        found, _ = await seconds(f"find?time={body['rows'][0]['stored_s']}")
        series, body = await seconds("series")
        assert len(body["series"]) == NUM_METRICS
        return {
            "newest 100": newest,
            "100 in the middle": middle,
            "first 100": first,
            "sequence of a time": found,
            "all series": series,
        }


def history(server: EmbeddedServer, directory: Path, count: int) -> dict[str, float]:
    run = f"bench-{nonce()}"
    asyncio.run(fill(server.url, run, count))
    began_s = time.monotonic()
    with page(server.url, run, directory) as (address, _):
        listening_s = time.monotonic() - began_s
        timings = asyncio.run(lists(address, count))
    return {"start to listening": listening_s, **timings}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--history", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=2)
    for hidden in ("--role", "--url", "--run"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "load":
        print(json.dumps(asyncio.run(load(args.url, args.run, args))))
        return
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "nats", BusConfig()) as server:
        results: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
        for number in range(args.rounds):
            names = list(VARIANTS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                results[name].append(one(name, server, Path(folder), args))
                print(name, {key: round(value, 2) for key, value in results[name][-1].items()}, file=sys.stderr)
        if args.rounds:
            report({name: medians_of(rows) for name, rows in results.items()})
        if args.history:
            for name, value in history(server, Path(folder), args.history).items():
                print(f"{args.history} samples: {name:20} {value:8.3f} s")


def medians_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def report(medians: dict[str, dict[str, float]]) -> None:
    names = list(medians["no page"])
    print(f"{'':12}" + "".join(f"{name:>16}" for name in names))
    for variant, row in medians.items():
        print(f"{variant:12}" + "".join(f"{row[name]:16.1f}" for name in names))
    further = (medians["21 viewers"]["page %"] - medians["1 viewer"]["page %"]) / 20
    print(f"RATIO a further viewer: {further:.2f} % of a core")
    print(f"RATIO publisher with a page and a viewer / without: {_ratio(medians, 'load'):.3f}")


def _ratio(medians: dict[str, dict[str, float]], name: str) -> float:
    return medians["1 viewer"][name] / medians["no page"][name]


if __name__ == "__main__":
    main()
