"""What pushes cost generation: tokens per CPU-second, and the gaps between tokens, with a push after every step and without.

An engine process generates for eight streaming requests; a publisher, as the learner has one, pushes the weights of a small model at
the pace of small steps. Quiet and pushing phases take turns. CPU is that of the decoding thread (built-in engine) or of the whole server
(SGLang); gaps are seen by the clients: the time between two tokens of one request.

``--sglang-python PYTHON``: the same on a real SGLang on this machine's CPU, with its requests paused in place and retracted, and as
slime does it: abort everything, flush, broadcast, and ask again.
"""

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import psutil
import torch

from actors.config import EngineConfig
from actors.engine_client import HttpEngine
from actors.engine_process import run_engine
from actors.errors import EngineError
from bench.push import RUN, engine_url, make_layout, publishing
from bus.config import BusConfig
from bus.connection import connect
from bus.live import LiveView
from bus.messages import Sampling
from bus.server import EmbeddedServer
from launch.wiring import engine_factory
from tests.sglang import server as sglang_on_cpu
from tests.tiny_models import tiny_model, write_tiny_model

REQUESTS, TOKENS = 8, 512
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 4096}
FLOOR_S = 0.02
"""A gap during a push may be twice the median gap, and this."""


@dataclass
class Clients:
    """Eight requests in flight, for ever: when each token came, and how many were asked for again."""

    url: str
    running: threading.Event = field(default_factory=threading.Event)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(when the gap began, its length), seconds."""
    tokens: int = 0
    """Of finished responses."""
    broken: int = 0
    """Responses that were broken off."""

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        client = HttpEngine(self.url)
        try:
            await asyncio.gather(*[self._one(client, seed) for seed in range(REQUESTS)])
        finally:
            await client.close()

    async def _one(self, client: HttpEngine, seed: int) -> None:
        prompt = np.arange(3, 11)
        while self.running.is_set():
            last_s, count, finish = 0.0, 0, ""
            with suppress(EngineError):
                async for told in client.stream(prompt, Sampling(max_new_tokens=TOKENS, seed=seed)):
                    now_s = time.monotonic()
                    if count and len(told.tokens) > count:
                        self.gaps.append((last_s, (now_s - last_s) / (len(told.tokens) - count)))
                    last_s, count, finish = now_s, len(told.tokens), told.finish or ""
            if finish in ("stop", "length"):
                self.tokens += count
            else:
                self.broken += 1
                await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to push."""

    name: str
    config: EngineConfig
    abort: bool = False
    """Abort and flush before, as slime does; otherwise requests live through it."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench stall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phases", type=int, default=6, help="quiet and pushing in turn")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a phase")
    parser.add_argument("--step", type=float, default=0.1, help="seconds between the end of a push and the next one")
    parser.add_argument("--sglang-python", default="")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ways = [Way(name="built-in", config=EngineConfig(max_running=16))]
    if args.sglang_python:
        in_place = sglang_on_cpu.config(args.sglang_python)
        retract = sglang_on_cpu.config(args.sglang_python, pause="retract")
        ways += [
            Way(name="SGLang, in place", config=in_place),
            Way(name="SGLang, retract", config=retract),
            Way(name="SGLang, abort and ask again (slime)", config=in_place, abort=True),
        ]
    for way in ways:
        measure(way, args)


def measure(way: Way, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name, EmbeddedServer(Path(name) / "nats", BusConfig()) as server:
        directory = Path(name)
        asyncio.run(make_layout(server.url))
        model_dir = write_tiny_model(directory / "model", eos_token_id=None, **SIZES)
        with engine(server.url, model_dir, way.config) as pid, publishing(server.url, directory, 1, 64_000_000) as publisher:
            publisher.publish_initial(model_dir)
            url = asyncio.run(engine_url(server.url))
            versions = [dict(tiny_model(seed=seed, **SIZES).state_dict()) for seed in (1, 2)]
            clients = Clients(url)
            clients.running.set()
            thread = threading.Thread(target=clients.run)
            thread.start()
            time.sleep(3)
            seen = Seen()
            step = 0
            for phase in range(args.phases):
                began_s, before = time.monotonic(), spent(server.url, pid, way, clients)
                while time.monotonic() - began_s < args.seconds:
                    if phase % 2 == 0:
                        time.sleep(0.05)
                        continue
                    step += 1
                    push_s = time.monotonic()
                    if way.abort:
                        asyncio.run(abort_and_flush(url))
                    publisher.publish(step, versions[step % 2].items(), wait=True).result(0)
                    seen.pushes.append((push_s, time.monotonic()))
                    time.sleep(args.step)
                tokens, cpu_s = (after - first for after, first in zip(spent(server.url, pid, way, clients), before, strict=True))
                (seen.pushing if phase % 2 else seen.quiet).append(tokens / cpu_s)
            clients.running.clear()
            thread.join()
    report(way, seen, clients)


@dataclass
class Seen:
    """What was measured."""

    quiet: list[float] = field(default_factory=list)
    """Tokens per CPU-second of each phase."""
    pushing: list[float] = field(default_factory=list)
    pushes: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end), monotonic seconds."""


def report(way: Way, seen: Seen, clients: Clients) -> None:
    during = [length for began, length in clients.gaps if any(began < end and began + length > begin for begin, end in seen.pushes)]
    quiet = [length for began, length in clients.gaps if not any(began < end and began + length > begin for begin, end in seen.pushes)]
    typical = median(quiet)
    durations = [end - begin for begin, end in seen.pushes]
    print(f"{way.name}: {len(seen.pushes)} pushes of {1e3 * median(durations):.0f} ms (median), {clients.broken} responses broken off")
    in_push = f"median {1e3 * median(during):.2f}, longest {1e3 * max(during):.1f} ms"
    print(f"  gap between tokens: median {1e3 * typical:.2f} ms; in a push: {in_push}")
    print(f"  tokens per CPU-second: quiet {median(seen.quiet):.0f}, pushing {median(seen.pushing):.0f}")
    print(f"RATIO {way.name}, tokens per CPU-second, pushing / quiet: {median(seen.pushing) / median(seen.quiet):.3f}")
    print(f"RATIO {way.name}, longest gap in a push / (2 x median + 20 ms): {max(during) / (2 * typical + FLOOR_S):.2f}", flush=True)


def spent(bus_url: str, pid: int, way: Way, clients: Clients) -> tuple[float, float]:
    """(tokens generated, CPU seconds) so far."""
    if way.config.kind == "builtin":
        load = asyncio.run(engine_load(bus_url))
        return load["tokens_generated"], load["decode_cpu_s"]
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return clients.tokens, sum(sum(process.cpu_times()[:2]) for process in tree)


async def engine_load(bus_url: str) -> dict[str, float]:
    """Counters of the engine's live row, newer than this call."""
    async with connect(bus_url, RUN, BusConfig(), name="bench") as bus:
        view = LiveView(bus)
        ((before, _),) = await view.refresh("engine")
        while True:
            ((row, _),) = await view.refresh("engine")
            if row.load["decode_cpu_s"] != before.load["decode_cpu_s"]:
                return row.load
            await asyncio.sleep(0.01)


async def abort_and_flush(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for path, body in (("/abort_request", {"abort_all": True}), ("/flush_cache", {})):
            async with session.post(url + path, json=body) as answer:
                await answer.read()


@contextmanager
def engine(bus_url: str, model_dir: Path, config: EngineConfig) -> Iterator[int]:
    process = multiprocessing.get_context("spawn").Process(target=engine_child, args=(bus_url, model_dir, config))
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.terminate()
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()


def engine_child(bus_url: str, model_dir: Path, config: EngineConfig) -> None:
    from launch import process

    async def body(draining: asyncio.Event) -> None:
        factory = engine_factory(config)
        await run_engine(bus_url, RUN, model_dir, config, BusConfig(), draining, "engine", factory=factory, drain_s=1.0)

    torch.set_num_threads(1)
    process.run(body, drain_s=10)


if __name__ == "__main__":
    main()
