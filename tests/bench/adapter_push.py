"""Bytes and seconds of a push of adapters, against merged weights of the same version: same run, in turns.

``python -m tests.bench.adapter_push`` pushes versions of a random model, with adapters of ``--rank`` on all linear
layers, to two built-in engines in processes of their own: one receives adapters, the other one merged weights. It
prints the median ratio of pairs (0.01 = a hundredth). A push is timed from the matrices in the learner's memory until
the engine serves the version: merging and copying in the trainer's thread (``prepare``), and the rest (``push``). The
first pushes, with the comparison of the base, are printed apart.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.adapters import adapter, settings, weights_of
from tests.tiny_models import write_tiny_model
from tidemill.actors.config import EngineConfig
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.engine_process import EngineLimits, EnginePlaces, run_engine
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import LiveView
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.system.coroutines import new_event_loop
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.format.adapters import MergedTensors
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.publisher import Publisher
from tidemill.weightstore.push.push import PushReport
from tidemill.weightstore.transport.parts import Division

WARM = 2
"""Rounds not counted: the first joins the group, compares the base and allocates memory."""


def engine_child(bus_url: str, run: str, model_dir: Path) -> None:
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        places = EnginePlaces(run=run, bus_url=bus_url, model_dir=model_dir, id="engine")
        factory: Any = BuiltinEngine
        runner.run(run_engine(places, EngineConfig(), asyncio.Event(), factory=factory, limits=EngineLimits()))


async def make_layout(bus_url: str, run: str) -> None:
    async with connect(bus_url, run, BusConfig(), name="bench") as bus:
        await bus.create_layout()


async def until_served(bus_url: str, run: str) -> None:
    async with connect(bus_url, run, BusConfig(), name="bench") as bus:
        view = LiveView(bus)
        while not any(row.phase == "serving" for row in await view.alive("engine")):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@contextmanager
def pushing(bus_url: str, run: str, directory: Path, model_dir: Path, args: argparse.Namespace) -> Iterator[Publisher]:
    """Run an engine, and a publisher of adapters (run ``adapters``) or of weights."""
    asyncio.run(make_layout(bus_url, run))
    base = weights_of(model_dir)
    publisher = Publisher(
        WeightsConfig(bucket_bytes=64_000_000, min_engines=1, transport=args.transport, phase_deadline_s=120.0),
        bus_url=bus_url,
        run=run,
        epoch=1,
        directory=directory / run,
        model_dir=model_dir,
        division=Division(Manifest.of(base.items())),
        adapters=settings(args.rank, 2.0 * args.rank) if run == "adapters" else None,
    )
    child = multiprocessing.get_context("spawn").Process(
        target=engine_child, args=(bus_url, run, model_dir), daemon=True
    )
    child.start()
    try:
        publisher.start()
        if run == "adapters":
            publisher.stage_base(base.items())
        publisher.publish_initial(model_dir)
        asyncio.run(until_served(bus_url, run))
        yield publisher
    finally:
        publisher.close(drain=False)
        child.kill()
        child.join()


def told(kind: str, pushes: list[PushReport], seconds: list[float]) -> None:
    prepare, push = (statistics.median(each) for each in ([p.prepare_s for p in pushes], [p.seconds for p in pushes]))
    print(
        f"  {kind:9} {pushes[0].num_bytes / 1e6:8.2f} MB  prepare {prepare:.4f} s  push {push:.4f} s  "
        f"both {statistics.median(seconds):.4f} s  stall {max(p.stall_s['engine'] for p in pushes) * 1e3:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbytes", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transport", choices=("broadcast", "handles"), default="broadcast")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A layer has 23 MB in float32.
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": args.mbytes // 23}
    with (
        tempfile.TemporaryDirectory() as name,
        EmbeddedServer(Path(name) / "nats", BusConfig()) as server,
        ExitStack() as stack,
    ):
        model_dir = write_tiny_model(Path(name) / "model", **sizes)
        base, scale = weights_of(model_dir), settings(args.rank, 2.0 * args.rank).scale
        publishers = {
            run: stack.enter_context(pushing(server.url, run, Path(name), model_dir, args))
            for run in ("merged", "adapters")
        }
        reports: dict[str, list[PushReport]] = {run: [] for run in publishers}
        seconds: dict[str, list[float]] = {run: [] for run in publishers}
        for step in range(args.rounds + WARM):
            matrices = adapter(base, step, rank=args.rank)
            for run, publisher in publishers.items():
                tensors = matrices if run == "adapters" else MergedTensors(base, matrices, scale)
                started = time.perf_counter()
                reports[run].append(publisher.publish(step, tensors.items(), wait=True).result(0))
                seconds[run].append(time.perf_counter() - started)
                assert reports[run][-1].engines == ("engine",), reports[run][-1]
    assert all(report.adapter_engines == ("engine",) for report in reports["adapters"])
    num_bytes = {run: reports[run][0].num_bytes for run in reports}
    print(f"rank {args.rank}, {args.transport}, {args.rounds} pairs")
    for run in reports:
        told(run, reports[run][WARM:], seconds[run][WARM:])
    ratios = [ours / whole for ours, whole in zip(seconds["adapters"][WARM:], seconds["merged"][WARM:], strict=True)]
    print(f"  bytes, ratio {num_bytes['adapters'] / num_bytes['merged']:.4f}")
    print(f"  seconds, ratio {statistics.median(ratios):.4f}  ({min(ratios):.4f} to {max(ratios):.4f})")
    print(f"  first push  adapters {seconds['adapters'][0]:.3f} s  merged {seconds['merged'][0]:.3f} s")


if __name__ == "__main__":
    main()
