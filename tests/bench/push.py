"""Seconds of a push against bare ``torch.distributed.broadcast`` of the same bytes in the same buckets: same machine,
same run.

``python -m tests.bench.push`` prints, for each size, number of receivers and way to group them (``--groups``), the
bandwidth of both and their ratio (1 = as fast as bare; the goal is 0.9 from 64 MB on). Both are timed until the
receivers report that they have all bytes, and both receive each bucket into memory of its own, in other processes. The
push is the learner's: bus rows, a process group per receiver or push group, buckets announced over HTTP.
``--verify always`` compares checksums in every push, and prints the time of that. ``--senders 1 2``: the same weights
are sent by one rank, and in parts by two, each from a process of its own (``weightstore/transport/part_server.py``).
``python -m tests.bench.push --engine`` pushes to a built-in engine that generates meanwhile, and prints its stall; with
``--idle`` it generates nothing, and its pushes are compared with bare broadcasts. ``--sglang-python PYTHON``: the same
with a real SGLang on this machine's CPU; its pushes are also compared with its own API, called by a minimal client.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.engine_kinds import sglang_server
from tests.receiver_app import Behaviour, receivers
from tests.sglang import server as sglang_on_cpu
from tests.tiny_models import tiny_model, write_tiny_model
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.errors import EngineError
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.engine_process import EngineLimits, EnginePlaces, run_engine
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.bus.client.addresses import HERE
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import LiveView
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.system.coroutines import new_event_loop
from tidemill.bus.wire.messages import Sampling
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.format.manifest import Bucket, Manifest
from tidemill.weightstore.push.publisher import Publisher
from tidemill.weightstore.push.push import PushReport
from tidemill.weightstore.transport.broadcast import BroadcastGroup
from tidemill.weightstore.transport.part_server import PartServer
from tidemill.weightstore.transport.parts import Division, PartPlace

RUN = "bench"
WARM = 4
"""Rounds not counted: the first joins the group, and both copies of a receiver are allocated and written once by then.
"""


def bare_receiver(port: int, rank: int, world_size: int, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    flats = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    with suppress(RuntimeError):  # the sender has gone: the end
        while True:
            for flat in flats:
                dist.broadcast(flat, 0)
            dist.barrier()


@contextmanager
def bare_group(num_receivers: int, flats: list[torch.Tensor]) -> Iterator[None]:
    """Create the default group: this process is rank 0, children receive these broadcasts for ever, each into its own
    memory.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    sizes = [flat.numel() for flat in flats]
    children = [
        context.Process(target=bare_receiver, args=(store.port, rank, num_receivers + 1, sizes), daemon=True)
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


def bare_round(flats: list[torch.Tensor]) -> float:
    started = time.perf_counter()
    for flat in flats:
        dist.broadcast(flat, 0)
    dist.barrier()
    return time.perf_counter() - started


@contextmanager
def publishing(
    bus_url: str,
    run: str,
    directory: Path,
    epoch: int,
    bucket_bytes: int,
    manifest: Manifest | None = None,
    parts: Sequence[PartPlace] = (),
    **settings: Any,
) -> Iterator[Publisher]:
    """Run a publisher in this process; ``settings`` are those of ``weights``, ``parts`` those of other ranks."""
    config = WeightsConfig(bucket_bytes=bucket_bytes, min_engines=1, **{"verify": "never", **settings})
    publisher = Publisher(
        config,
        bus_url=bus_url,
        run=run,
        epoch=epoch,
        directory=directory,
        model_dir=directory / "model",
        division=None if manifest is None else Division(manifest, tuple(parts)),
    )
    try:
        publisher.start()
        yield publisher
    finally:
        publisher.close(drain=False)


def part_child(pipe: Any, names: list[str], bucket_bytes: int, rank: int) -> None:
    """Serve these layers as a rank of the learner does, and fill the copies whose numbers come over the pipe."""
    torch.set_num_threads(1)
    tensors = {name: torch.randn(1 << 20) for name in names}
    server = PartServer(Manifest.of(tensors.items()), WeightsConfig(bucket_bytes=bucket_bytes), rank=rank, at=HERE)
    pipe.send(server.start())
    with suppress(EOFError):  # the end
        while True:
            server.stage(pipe.recv(), tensors.items())
            pipe.send(None)


@contextmanager
def other_ranks(
    parts: Sequence[list[str]], bucket_bytes: int
) -> Iterator[tuple[list[PartPlace], Callable[[int], None]]]:
    """Run a process for each part. Yields their places, and a function that fills the copies of a number in all of
    them.
    """
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe() for _ in parts]
    children = [
        context.Process(target=part_child, args=(theirs, names, bucket_bytes, rank), daemon=True)
        for rank, ((_, theirs), names) in enumerate(zip(pipes, parts, strict=True), 1)
    ]
    for child in children:
        child.start()

    def fill(number: int) -> None:
        for ours, _ in pipes:
            ours.send(number)
        for ours, _ in pipes:
            ours.recv()

    try:
        yield [ours.recv() for ours, _ in pipes], fill
    finally:
        for child in children:
            child.kill()
            child.join()


async def make_layout(bus_url: str, run: str) -> None:
    async with connect(bus_url, run, BusConfig(), name="bench") as bus:
        await bus.create_layout()


def mega(num_bytes: float, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e6:7.0f} MB/s"


def compare(
    bus_url: str, directory: Path, num_receivers: int, mbytes: int, senders: int, args: argparse.Namespace
) -> None:
    """Print the times of bare broadcasts and of every grouping, in turn, ``--rounds`` times."""
    groups = args.groups
    tensors = {f"layer.{index}.weight": torch.randn(1 << 20) for index in range(max(1, mbytes * 1_000_000 >> 22))}
    bucket_bytes = args.bucket_mbytes * 1_000_000
    manifest = Manifest.of(tensors.items())
    flats = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in manifest.buckets(bucket_bytes)]
    pushes: dict[str, list[PushReport]] = {group: [] for group in groups}
    bare_s: dict[str, list[float]] = {group: [] for group in groups}
    dealt = [list(tensors)[rank::senders] for rank in range(senders)]
    own = {name: tensors[name] for name in dealt[0]}
    for epoch, group in enumerate(groups, 1):
        run_id = f"{mbytes}-{num_receivers}-{senders}-{group}"
        asyncio.run(make_layout(bus_url, run_id))
        settings = {"verify": args.verify, "group": group}
        with ExitStack() as stack:
            behaviours = {str(index): Behaviour(at_once=not args.in_turn) for index in range(num_receivers)}
            stack.enter_context(receivers(bus_url, run_id, behaviours))
            parts, fill = stack.enter_context(other_ranks(dealt[1:], bucket_bytes))
            pushing = publishing(
                bus_url, run_id, directory, epoch, bucket_bytes, Manifest.of(own.items()), parts, **settings
            )
            publisher = stack.enter_context(pushing)
            stack.enter_context(bare_group(num_receivers, flats))
            for step in range(args.rounds + WARM):
                staged = publisher.stage(step, own.items(), fill)
                handle = publisher.push(staged)
                staged.release()
                handle.wait()
                pushes[group].append(handle.result(0))
                bare_s[group].append(bare_round(flats))
        told(num_receivers, f"{group}, {senders} sender(s)", pushes[group][WARM:], bare_s[group][WARM:], args)


def told(
    num_receivers: int, group: str, pushes: list[PushReport], bare_s: list[float], args: argparse.Namespace
) -> None:
    assert all(len(push.engines) == num_receivers for push in pushes), pushes
    num_bytes = pushes[0].num_bytes
    seconds, transfer_s, prepare_s, bare = (
        statistics.median(values)
        for values in (
            [push.seconds for push in pushes],
            [push.transfer_s for push in pushes],
            [push.prepare_s for push in pushes],
            bare_s,
        )
    )
    ratio = statistics.median(bare / push.transfer_s for bare, push in zip(bare_s, pushes, strict=True))
    whole = statistics.median(bare / push.seconds for bare, push in zip(bare_s, pushes, strict=True))
    print(f"{num_receivers} receiver(s), group {group}, {num_bytes / 1e6:.0f} MB, median of {len(pushes)}")
    print(f"  bare broadcast  {bare:.4f} s  {mega(num_bytes, bare)}")
    print(f"  push, transfer  {transfer_s:.4f} s  {mega(num_bytes, transfer_s)}  ratio {ratio:.2f}")
    print(f"  push, whole     {seconds:.4f} s  {mega(num_bytes, seconds)}  ratio {whole:.2f}  (with bus rows)")
    if args.verify == "always":
        verify_s = statistics.median(max(push.verify_s.values()) for push in pushes)
        print(
            f"  verification    {verify_s:.4f} s  {mega(num_bytes, verify_s)}  {verify_s / transfer_s:.0%} of "
            "the transfer"
        )
    print(f"  preparation     {prepare_s:.4f} s  (in the trainer's thread)", flush=True)


class PlainClient:
    """A client of an SGLang server's own API: pauses it, broadcasts every bucket while the server's request is open,
    and resumes it.
    """

    def __init__(self, url: str, buckets: list[Bucket], flats: list[torch.Tensor]) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        self._asking = ThreadPoolExecutor(1)
        self._buckets, self._flats = buckets, flats
        self._group = BroadcastGroup.host("127.0.0.1", "plain", 2, "gloo", 60.0)
        meeting = {
            "master_address": "127.0.0.1",
            "master_port": self._group.port,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
        asked = self._asking.submit(self._ask, "/init_weights_update_group", {**meeting, "group_name": "plain"})
        self._group.meet()
        asked.result()

    def round(self) -> float:
        """Return the seconds of one push."""
        self._connection.close()  # the server has closed it by now, if it was idle for long
        started = time.perf_counter()
        self._ask("/pause_generation", {"mode": "in_place"})
        self._ask("/begin_weight_update", {})
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            told = {"names": [one.name for one in bucket.specs], "dtypes": [one.dtype for one in bucket.specs]}
            body = {
                **told,
                "shapes": [list(one.shape) for one in bucket.specs],
                "group_name": "plain",
                "load_format": "flattened_bucket",
            }
            asked = self._asking.submit(self._ask, "/update_weights_from_distributed", {**body, "flush_cache": False})
            self._group.send(flat)
            asked.result()
        self._ask("/end_weight_update", {})
        self._ask("/continue_generation", {})
        return time.perf_counter() - started

    def _ask(self, path: str, body: dict[str, Any]) -> None:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        said = answer.read()
        assert answer.status == 200, said

    def close(self) -> None:
        self._asking.shutdown()
        self._connection.close()
        self._group.close()


def engine_child(bus_url: str, model_dir: Path, sglang_url: str) -> None:
    torch.set_num_threads(1)
    config = sglang_on_cpu.config("", url=sglang_url) if sglang_url else EngineConfig()
    factory = SglangEngine if sglang_url else BuiltinEngine
    with asyncio.Runner(loop_factory=new_event_loop) as runner:  # like its process
        places = EnginePlaces(run=RUN, bus_url=bus_url, model_dir=model_dir, id="engine")
        runner.run(run_engine(places, config, asyncio.Event(), factory=factory, limits=EngineLimits()))


@contextmanager
def engine_process(bus_url: str, model_dir: Path, sglang_url: str) -> Iterator[None]:
    child = multiprocessing.get_context("spawn").Process(
        target=engine_child, args=(bus_url, model_dir, sglang_url), daemon=True
    )
    child.start()
    try:
        yield
    finally:
        child.kill()
        child.join()


async def engine_url(bus_url: str) -> str:
    async with connect(bus_url, RUN, BusConfig(), name="bench") as bus:
        view = LiveView(bus)
        while True:
            for row in await view.alive("engine"):
                if row.phase == "serving" and row.id == "engine":
                    return row.address
            await asyncio.sleep(0.1)


def generate_for_ever(url: str, running: threading.Event, counted: list[int]) -> None:
    """Keep eight requests in flight until ``running`` is cleared; tokens are counted, and no request may be lost."""

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
    layers = max(1, round(args.mbytes[0] / 13))
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": layers}
    model_dir = write_tiny_model(directory / "model", eos_token_id=None, **sizes)
    weights = dict(tiny_model(seed=1, **sizes).state_dict())
    buckets = Manifest.of(weights.items()).buckets(args.bucket_mbytes * 1_000_000)
    kind = "SGLang" if args.sglang_python else "built-in engine"
    flats = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in buckets]
    pushes, bare_s, plain_s = list[PushReport](), list[float](), list[float]()
    with ExitStack() as stack:
        server = ""
        if args.sglang_python:
            server = stack.enter_context(
                sglang_server(args.sglang_python, model_dir, directory / "sglang.log", dtype="float32")
            )
        stack.enter_context(engine_process(bus_url, model_dir, server))
        publisher = stack.enter_context(publishing(bus_url, RUN, directory, 9, args.bucket_mbytes * 1_000_000))
        publisher.publish_initial(model_dir)
        url = asyncio.run(engine_url(bus_url))
        counted = stack.enter_context(bare_group(1, flats) if args.idle else generating(url))
        plain = stack.enter_context(closing(PlainClient(server, buckets, flats))) if server and args.idle else None
        for step in range(1, args.rounds + 1 + WARM):
            pushes.append(publisher.publish(step, weights.items(), wait=True).result(0))
            if args.idle:
                bare_s.append(bare_round(flats))
            else:
                time.sleep(0.5)
            if plain is not None:
                plain_s.append(plain.round())
    if args.idle:
        told(1, f"pairs, {kind}, idle", pushes[WARM:], bare_s[WARM:], args)
        if plain_s:
            ratio = statistics.median(
                alone / push.transfer_s for alone, push in zip(plain_s[WARM:], pushes[WARM:], strict=True)
            )
            print(
                f"  SGLang's own    {statistics.median(plain_s[WARM:]):.4f} s  (its API, a plain client)  the "
                f"push against it {ratio:.2f}"
            )
        return
    assert all(push.engines == ("engine",) for push in pushes), pushes
    stalls = [push.stall_s["engine"] for push in pushes[WARM:]]
    transfers = [push.transfer_s for push in pushes[WARM:]]
    print(
        f"{kind} generating, {pushes[0].num_bytes / 1e6:.0f} MB, {len(stalls)} pushes, {sum(counted or [])} "
        "tokens meanwhile"
    )
    print(
        f"  transfer  {statistics.median(transfers):.4f} s  {mega(pushes[0].num_bytes, statistics.median(transfers))}"
    )
    print(f"  stall     median {statistics.median(stalls) * 1e3:.2f} ms, max {max(stalls) * 1e3:.2f} ms")


@contextmanager
def generating(url: str) -> Iterator[list[int]]:
    """While entered, generate; yield the number of tokens of each answer."""
    running, counted = threading.Event(), list[int]()
    running.set()
    client = threading.Thread(target=generate_for_ever, args=(url, running, counted))
    client.start()
    try:
        yield counted
    finally:
        running.clear()
        client.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbytes", type=int, nargs="+", default=[128])
    parser.add_argument("--bucket-mbytes", type=int, default=64)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--groups", nargs="+", default=["pairs"], help="weights.group: pairs, all, or a number")
    parser.add_argument(
        "--senders", type=int, nargs="+", default=[1], help="ranks that send a part of the weights each"
    )
    parser.add_argument(
        "--in-turn", action="store_true", help="a bucket is announced when the one before is stored, as to SGLang"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--verify", choices=("never", "always"), default="never")
    parser.add_argument("--engine", action="store_true")
    parser.add_argument(
        "--idle", action="store_true", help="with --engine: it does not generate, and is compared with bare"
    )
    parser.add_argument("--sglang-python", default="", help="with --engine: a real SGLang of this interpreter, on CPU")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with EmbeddedServer(directory / "nats", BusConfig()) as server:
            if args.engine:
                asyncio.run(make_layout(server.url, RUN))
                with_engine(server.url, directory, args)
                return
            for mbytes in args.mbytes:
                for num_receivers in args.receivers:
                    for senders in args.senders:
                        compare(
                            server.url,
                            directory / f"{mbytes}-{num_receivers}-{senders}",
                            num_receivers,
                            mbytes,
                            senders,
                            args,
                        )


if __name__ == "__main__":
    main()
