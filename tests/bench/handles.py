"""Seconds to hand weights to an engine of this host by handles, against a plain memory copy of the same bytes: same
process, same run.

``python -m tests.bench.handles`` prints, for each size, the median ratio of pairs (1 = as fast as the copy; the goal is
0.8):
``read``: the engine's part, copying the handles of all buckets into its own tensors, in the process that also copies
plainly;
``push``: a whole push to one receiver (bus, ZMQ, begin, buckets, end), against a plain copy in the learner's process.
Then the same push by broadcast, over the transfer by handles. ``--verify always`` as in ``bench.push``.
Last, a push of 310 tensors of 64 bytes (as many as Qwen3-1.7B has): its requests alone take that time, which a larger
one adds to its copy. Once in two requests, as to the built-in engine, and once in one for each step, as to SGLang.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.bench.push import mega
from tests.receiver_app import Behaviour, receivers
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.push.publisher import Publisher
from tidemill.weightstore.transport.handles import HostMemory, Mapped

BUCKET_BYTES = 64_000_000
SMALL = {f"layer.{index}.weight": torch.randn(32).to(torch.bfloat16) for index in range(310)}


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def reader(handles: list[dict[str, Any]], rounds: int, tell: Connection) -> None:
    """Run in another process: copy the memory of handles, and the same bytes from its own memory, in turns."""
    torch.set_num_threads(1)
    mapped = Mapped()
    own = [torch.ones(handle["num_bytes"], dtype=torch.uint8) for handle in handles]
    into = [torch.ones(handle["num_bytes"], dtype=torch.uint8) for handle in handles]

    def plain() -> None:
        for target, source in zip(into, own, strict=True):
            target.copy_(source)

    def read() -> None:
        for target, handle in zip(into, handles, strict=True):
            target.copy_(mapped.part(handle))

    tell.send([(timed(plain), timed(read)) for _ in range(rounds + 1)])


def read_pairs(num_bytes: int, rounds: int) -> list[tuple[float, float]]:
    """Return (plain, read) seconds; the first pair, which maps the memory, comes first."""
    memory = HostMemory()
    block = memory.empty(num_bytes)
    block.fill_(7)
    handles = [memory.handle(part, 1) for part in block.split(BUCKET_BYTES)]
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    child = context.Process(target=reader, args=(handles, rounds, theirs), daemon=True)
    child.start()
    pairs: list[tuple[float, float]] = ours.recv()
    child.join()
    memory.close()
    return pairs


async def make_layout(bus_url: str, run: str) -> None:
    async with connect(bus_url, run, BusConfig(), name="bench") as bus:
        await bus.create_layout()


def push_pairs(
    bus_url: str, directory: Path, transport: str, tensors: dict[str, torch.Tensor], args: Any, *, at_once: bool = True
) -> list[tuple[float, float]]:
    """Return (plain, transfer) seconds of pushes to one receiver, warmed up by two."""
    config = WeightsConfig(
        bucket_bytes=args.bucket_mbytes * 1_000_000,
        min_engines=1,
        verify=args.verify,
        transport=transport,
        overlap=False,
        phase_deadline_s=120.0,
    )
    source, pairs = torch.cat([tensor.view(torch.uint8) for tensor in tensors.values()]), []
    target = torch.ones_like(source)
    run = f"{transport}-{source.numel()}-{at_once}"
    asyncio.run(make_layout(bus_url, run))
    publisher = Publisher(config, bus_url=bus_url, run=run, epoch=1, directory=directory)
    with receivers(bus_url, run, {"engine": Behaviour(at_once=at_once)}):
        try:
            publisher.start()
            for step in range(args.rounds + 3):
                report = publisher.publish(step, tensors.items(), wait=True).result(0)
                assert len(report.engines) == 1, report
                pairs.append((timed(lambda: target.copy_(source)), report.transfer_s))
        finally:
            publisher.close(drain=False)
    return pairs[3:]  # both stagings, and both copies of the receiver, are touched first


def ratio(pairs: list[tuple[float, float]]) -> str:
    plain_s, other_s = (statistics.median(each) for each in zip(*pairs, strict=True))
    return (
        f"plain {plain_s:.4f} s  this {other_s:.4f} s  ratio "
        f"{statistics.median(plain / other for plain, other in pairs):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbytes", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bucket-mbytes", type=int, default=64)
    parser.add_argument("--verify", choices=("never", "always"), default="never")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name, EmbeddedServer(Path(name) / "nats", BusConfig()) as server:
        for mbytes in args.mbytes:
            num_tensors = max(1, mbytes * 1_000_000 >> 22)
            tensors = {f"layer.{index}.weight": torch.randn(1 << 20) for index in range(num_tensors)}
            num_bytes = num_tensors << 22
            print(f"{num_bytes / 1e6:.0f} MB, median of {args.rounds}")
            first, *pairs = read_pairs(num_bytes, args.rounds)
            print(f"  read  {ratio(pairs)}  (first, which maps: {first[0] / first[1]:.2f})")
            by = {
                each: push_pairs(server.url, Path(name) / each, each, tensors, args)
                for each in ("handles", "broadcast")
            }
            print(
                f"  push  {ratio(by['handles'])}  "
                f"{mega(num_bytes, statistics.median(other for _, other in by['handles']))}"
            )
            faster = statistics.median(over for _, over in by["broadcast"]) / statistics.median(
                over for _, over in by["handles"]
            )
            print(f"  by broadcast, over handles  {faster:.1f}")
        took: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(6):  # in turns: the machine may be slower for a while
            pairs = push_pairs(server.url, Path(name) / f"small-{turn}", "handles", SMALL, args, at_once=turn % 2 == 0)
            took[turn % 2 == 0] += [transfer_s for _, transfer_s in pairs]
        two, steps = (1e3 * statistics.median(took[each]) for each in (True, False))
        print(f"requests alone: two {two:.2f} ms  one for each step {steps:.2f} ms  ratio {two / steps:.2f}")


if __name__ == "__main__":
    main()
