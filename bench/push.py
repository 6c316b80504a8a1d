"""Seconds of a push to 1 and 2 receivers against one bare ``torch.distributed.broadcast`` of the same bytes: same machine, same run.

``python -m bench.push`` prints, for each number of receivers, the bandwidth of both and their ratio (1 = as fast as bare; the goal
is 0.9 from 64 MB on). Both are timed until the receivers say that they have everything. The push is what the learner does: bus rows,
one process group per receiver, buckets announced over HTTP, each copied into place by its receiver.
``--verify always`` compares checksums in every push, and prints what that takes.
``python -m bench.push --engine`` pushes to a built-in engine that generates meanwhile, and prints its stall.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from actors.builtin.engine import BuiltinEngine
from actors.config import EngineConfig
from actors.engine_client import HttpEngine
from actors.engine_process import run_engine
from actors.errors import EngineError
from bus.config import BusConfig
from bus.connection import connect
from bus.live import LiveView
from bus.messages import Sampling
from bus.server import EmbeddedServer
from tests.receiver_app import Behaviour, receivers
from tests.tiny_models import tiny_model, write_tiny_model
from weightstore.config import WeightsConfig
from weightstore.publisher import Publisher
from weightstore.push import PushReport

RUN = "bench"


def bare_receiver(port: int, rank: int, world_size: int, num_bytes: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    with suppress(RuntimeError):  # the sender has gone: the end
        while True:
            dist.broadcast(flat, 0)
            dist.barrier()


@contextmanager
def bare_group(num_receivers: int, num_bytes: int) -> Iterator[None]:
    """The default group with this process as rank 0, and children that receive broadcasts for ever."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    children = [
        context.Process(target=bare_receiver, args=(store.port, rank, num_receivers + 1, num_bytes), daemon=True)
        for rank in range(1, num_receivers + 1)
    ]
    for child in children:
        child.start()
    dist.init_process_group("gloo", store=dist.PrefixStore("default_pg", store), rank=0, world_size=num_receivers + 1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        for child in children:
            child.kill()
            child.join()


def bare_round(flat: torch.Tensor) -> float:
    started = time.perf_counter()
    dist.broadcast(flat, 0)
    dist.barrier()
    return time.perf_counter() - started


@contextmanager
def publishing(bus_url: str, directory: Path, epoch: int, bucket_bytes: int, verify: str = "never") -> Iterator[Publisher]:
    config = WeightsConfig(bucket_bytes=bucket_bytes, min_engines=1, verify=verify)
    publisher = Publisher(config, bus_url=bus_url, run=RUN, epoch=epoch, directory=directory, model_dir=directory / "model")
    try:
        publisher.start()
        yield publisher
    finally:
        publisher.close(drain=False)


async def make_layout(bus_url: str) -> None:
    async with connect(bus_url, RUN, BusConfig(), name="bench") as bus:
        await bus.create_layout()


def mega(num_bytes: float, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e6:7.0f} MB/s"


def compare(bus_url: str, directory: Path, num_receivers: int, args: argparse.Namespace) -> None:
    tensors = {f"layer.{index}.weight": torch.randn(1 << 20) for index in range(max(1, args.mbytes * 1_000_000 >> 22))}
    flat = torch.cat([tensor.view(torch.uint8) for tensor in tensors.values()])
    pushes: list[PushReport] = []
    bare_s: list[float] = []
    with receivers(bus_url, RUN, {f"{num_receivers}-{index}": Behaviour() for index in range(num_receivers)}):
        with publishing(bus_url, directory, num_receivers, args.bucket_mbytes * 1_000_000, args.verify) as publisher:
            with bare_group(num_receivers, flat.numel()):
                for step in range(args.rounds + 1):
                    pushes.append(publisher.publish(step, tensors.items(), wait=True).result(0))
                    bare_s.append(bare_round(flat))
    assert all(len(push.engines) == num_receivers for push in pushes), pushes
    pushes, bare_s = pushes[1:], bare_s[1:]  # the first round warms both, and joins
    seconds, transfer_s, prepare_s, bare = (
        statistics.median(values)
        for values in ([push.seconds for push in pushes], [push.transfer_s for push in pushes], [push.prepare_s for push in pushes], bare_s)
    )
    ratio = statistics.median(bare / push.transfer_s for bare, push in zip(bare_s, pushes, strict=True))
    whole = statistics.median(bare / push.seconds for bare, push in zip(bare_s, pushes, strict=True))
    print(f"{num_receivers} receiver(s), {flat.numel() / 1e6:.0f} MB, median of {len(pushes)}")
    print(f"  bare broadcast  {bare:.4f} s  {mega(flat.numel(), bare)}")
    print(f"  push, transfer  {transfer_s:.4f} s  {mega(flat.numel(), transfer_s)}  ratio {ratio:.2f}")
    print(f"  push, whole     {seconds:.4f} s  {mega(flat.numel(), seconds)}  ratio {whole:.2f}  (with bus rows)")
    if args.verify == "always":
        verify_s = statistics.median(max(push.verify_s.values()) for push in pushes)
        print(f"  verification    {verify_s:.4f} s  {mega(flat.numel(), verify_s)}  {verify_s / transfer_s:.0%} of the transfer")
    print(f"  preparation     {prepare_s:.4f} s  (in the trainer's thread)")


def engine_child(bus_url: str, model_dir: Path) -> None:
    torch.set_num_threads(1)
    asyncio.run(run_engine(bus_url, RUN, model_dir, EngineConfig(), BusConfig(), asyncio.Event(), "engine", factory=BuiltinEngine))


async def engine_url(bus_url: str) -> str:
    async with connect(bus_url, RUN, BusConfig(), name="bench") as bus:
        view = LiveView(bus)
        while True:
            for row in await view.alive("engine"):
                if row.phase == "serving" and row.id == "engine":
                    return row.address
            await asyncio.sleep(0.1)


def generate_for_ever(url: str, running: threading.Event, counted: list[int]) -> None:
    """Eight requests in flight until ``running`` is cleared; tokens are counted, and none may be lost."""

    async def one(client: HttpEngine, seed: int) -> None:
        while running.is_set():
            with suppress(EngineError):
                answer = await client.generate(np.arange(3, 11), Sampling(max_new_tokens=64, seed=seed))
                counted.append(len(answer.tokens))

    async def all_() -> None:
        client = HttpEngine(url)
        try:
            await asyncio.gather(*[one(client, seed) for seed in range(8)])
        finally:
            await client.close()

    asyncio.run(all_())


def with_engine(bus_url: str, directory: Path, args: argparse.Namespace) -> None:
    layers = max(1, round(args.mbytes / 13))
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": layers}
    model_dir = write_tiny_model(directory / "model", eos_token_id=None, **sizes)
    weights = dict(tiny_model(seed=1, **sizes).state_dict())
    engine = multiprocessing.get_context("spawn").Process(target=engine_child, args=(bus_url, model_dir), daemon=True)
    engine.start()
    try:
        with publishing(bus_url, directory, 9, args.bucket_mbytes * 1_000_000) as publisher:
            publisher.publish_initial(model_dir)
            url = asyncio.run(engine_url(bus_url))
            running, counted = threading.Event(), []
            running.set()
            client = threading.Thread(target=generate_for_ever, args=(url, running, counted))
            client.start()
            pushes = []
            for step in range(1, args.rounds + 2):
                pushes.append(publisher.publish(step, weights.items(), wait=True).result(0))
                time.sleep(0.5)
            running.clear()
            client.join()
    finally:
        engine.kill()
        engine.join()
    assert all(push.engines == ("engine",) for push in pushes), pushes
    stalls = [push.stall_s["engine"] for push in pushes[1:]]
    transfers = [push.transfer_s for push in pushes[1:]]
    print(f"built-in engine generating, {pushes[0].bytes / 1e6:.0f} MB, {len(stalls)} pushes, {sum(counted)} tokens meanwhile")
    print(f"  transfer  {statistics.median(transfers):.4f} s  {mega(pushes[0].bytes, statistics.median(transfers))}")
    print(f"  stall     median {statistics.median(stalls) * 1e3:.2f} ms, max {max(stalls) * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbytes", type=int, default=128)
    parser.add_argument("--bucket-mbytes", type=int, default=64)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--verify", choices=("never", "always"), default="never")
    parser.add_argument("--engine", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with EmbeddedServer(directory / "nats", BusConfig()) as server:
            asyncio.run(make_layout(server.url))
            if args.engine:
                with_engine(server.url, directory, args)
                return
            for num_receivers in args.receivers:
                compare(server.url, directory / str(num_receivers), num_receivers, args)


if __name__ == "__main__":
    main()
