"""Cost of pushes for generation: tokens per CPU-second, and the gaps between tokens, with a push after every step and
without.

An engine process generates for eight streaming requests; a publisher like the learner's pushes the weights of a small
model at the pace of small steps. Quiet and pushing phases take turns. CPU is that of the decoding thread (built-in
engine) or of the whole server (SGLang); gaps are measured by the clients: the time between two tokens of one request.

``--sglang-python PYTHON``: the same on a real SGLang on this machine's CPU, with its requests paused in place and
retracted, and in slime's way: abort everything, flush, broadcast, and send the requests again.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import tempfile
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

from tests.bench.push import RUN, engine_url, make_layout, publishing
from tests.sglang import server as sglang_on_cpu
from tests.tiny_models import tiny_model, write_tiny_model
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.errors import EngineError
from tidemill.actors.serving.engine_process import EngineLimits, EnginePlaces, run_engine
from tidemill.bus.config import BusConfig
from tidemill.bus.keys import make_keys
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Sampling
from tidemill.launch.run.workers import engine_factory

REQUESTS, TOKENS = 8, 512
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
FLOOR_S = 0.02
"""Gap in seconds that is allowed during a push in addition to twice the median gap."""


class Clients:
    """Eight requests in flight, for ever, in a process of their own, so that the pushing process does not delay
    them.
    """

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._running, self._tokens = context.Event(), context.Value("q", 0)
        self._running.set()
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_ask_for_ever, args=(url, self._running, self._tokens, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._ours.recv()
        self.gaps: list[tuple[float, float]] = []
        """(begin of the gap, its length), monotonic seconds; set by ``end``, like ``broken``."""
        self.broken = 0
        """Number of interrupted responses."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of finished responses."""
        return int(self._tokens.value)

    def end(self) -> None:
        self._running.clear()
        self.gaps, self.broken = self._ours.recv()
        self._process.join()


def _ask_for_ever(url: str, running: Any, tokens: Any, pipe: Any) -> None:
    """Run in a process: report the beginning, and send gaps and interrupted responses at the end."""
    gaps: list[tuple[float, float]] = []
    broken = 0

    async def one(client: HttpEngine, seed: int) -> None:
        nonlocal broken
        prompt = np.arange(3, 11)
        while running.is_set():
            last_s, count, finish = 0.0, 0, ""
            with suppress(EngineError):
                async for told in client.stream(prompt, Sampling(max_new_tokens=TOKENS, seed=seed)):
                    now_s = time.monotonic()
                    if count and len(told.tokens) > count:
                        gaps.append((last_s, (now_s - last_s) / (len(told.tokens) - count)))
                    last_s, count, finish = now_s, len(told.tokens), told.finish or ""
            if finish in ("stop", "length"):
                tokens.value += count
            else:
                broken += 1
                await asyncio.sleep(0.01)

    async def all_() -> None:
        client = HttpEngine(url)
        try:
            await asyncio.gather(*[one(client, seed) for seed in range(REQUESTS)])
        finally:
            await client.close()

    gc.freeze()  # or a full collection delays all requests at once, and counts as a gap
    pipe.send("asking")
    asyncio.run(all_())
    pipe.send((gaps, broken))


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to push."""

    name: str
    config: EngineConfig
    transport: str = "broadcast"
    abort: bool = False
    """Abort and flush before the push, as slime does; otherwise requests live through it."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench stall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--phases",
        type=int,
        default=40,
        help="quiet and pushing in turn: short ones, so that what else the machine does falls on both",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.5,
        help="of a phase; four times that, and a quarter of the phases, for SGLang",
    )
    parser.add_argument("--step", type=float, default=0.1, help="seconds between the end of a push and the next one")
    parser.add_argument("--sglang-python", default="")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    builtin = EngineConfig(max_running=16)
    ways = [Way(name="built-in", config=builtin), Way(name="built-in, by handles", config=builtin, transport="handles")]
    if args.sglang_python:
        in_place = sglang_on_cpu.config(args.sglang_python)
        retract = sglang_on_cpu.config(args.sglang_python, pause="retract")
        ways += [
            Way(name="SGLang, in place", config=in_place),
            Way(name="SGLang, retract", config=retract),
            Way(name="SGLang, abort and ask again (slime)", config=in_place, abort=True),
        ]
    for way in ways:
        times = 1 if way.config.kind == "builtin" else 4
        measure(way, phases=args.phases // times, seconds=args.seconds * times, step_s=args.step)


def measure(way: Way, *, phases: int, seconds: float, step_s: float) -> None:
    with tempfile.TemporaryDirectory() as name, EmbeddedServer(Path(name) / "nats", BusConfig()) as server:
        directory = Path(name)
        asyncio.run(make_layout(server.url, RUN))
        model_dir = write_tiny_model(directory / "model", eos_token_id=None, **SIZES)
        with (
            engine(server.url, model_dir, way.config) as pid,
            publishing(server.url, RUN, directory, 1, 64_000_000, transport=way.transport) as publisher,
        ):
            publisher.publish_initial(model_dir)
            url = asyncio.run(engine_url(server.url))
            versions = [dict(tiny_model(seed=seed, **SIZES).state_dict()) for seed in (1, 2)]
            clients = Clients(url)
            time.sleep(3)
            seen = Seen()
            step = 0
            for phase in range(phases):
                before, began_s = spent(url, pid, way, clients), time.monotonic()
                while time.monotonic() - began_s < seconds:
                    if phase % 2 == 0:
                        time.sleep(0.05)
                        continue
                    step += 1
                    push_s = time.monotonic()
                    if way.abort:
                        asyncio.run(abort_and_flush(server.url, url))
                    publisher.publish(step, versions[step % 2].items(), wait=True).result(0)
                    seen.pushes.append((push_s, time.monotonic()))
                    time.sleep(step_s)
                tokens, cpu_s = (
                    after - first for after, first in zip(spent(url, pid, way, clients), before, strict=True)
                )
                (seen.pushing if phase % 2 else seen.quiet).append(tokens / cpu_s)
            clients.end()
    report(way, seen, clients)


@dataclass
class Seen:
    """The measurements."""

    quiet: list[float] = field(default_factory=list)
    """Tokens per CPU-second of each phase."""
    pushing: list[float] = field(default_factory=list)
    pushes: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of each push, monotonic seconds."""


def report(way: Way, seen: Seen, clients: Clients) -> None:
    during = [
        length
        for began, length in clients.gaps
        if any(began < end and began + length > begin for begin, end in seen.pushes)
    ]
    quiet = [
        length
        for began, length in clients.gaps
        if not any(began < end and began + length > begin for begin, end in seen.pushes)
    ]
    typical = median(quiet)
    durations = [end - begin for begin, end in seen.pushes]
    print(
        f"{way.name}: {len(seen.pushes)} pushes of {1e3 * median(durations):.0f} ms (median), "
        f"{clients.broken} responses broken off"
    )
    in_push = f"median {1e3 * median(during):.2f}, longest {1e3 * max(during):.1f} ms"
    print(f"  gap between tokens: median {1e3 * typical:.2f} ms; in a push: {in_push}")
    print(f"  tokens per CPU-second: quiet {median(seen.quiet):.0f}, pushing {median(seen.pushing):.0f}")
    print(f"RATIO {way.name}, tokens per CPU-second, pushing / quiet: {median(seen.pushing) / median(seen.quiet):.3f}")
    print(
        f"RATIO {way.name}, longest gap in a push / (2 x median + 20 ms): {max(during) / (2 * typical + FLOOR_S):.2f}",
        flush=True,
    )


def spent(url: str, pid: int, way: Way, clients: Clients) -> tuple[float, float]:
    """Return (tokens generated, CPU seconds) so far."""
    if way.config.kind == "builtin":
        load = asyncio.run(engine_load(url))
        return load["tokens_generated"], load["decode_cpu_s"]
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return clients.tokens, sum(sum(process.cpu_times()[:2]) for process in tree)


async def engine_load(url: str) -> dict[str, float]:
    """Return the engine's present counters."""
    async with aiohttp.ClientSession() as session, session.get(url + "/server_info") as answer:
        return dict((await answer.json())["internal_states"][0])


async def abort_and_flush(bus_url: str, url: str) -> None:
    async with connect(bus_url, RUN, name="bench") as bus:
        headers = (await make_keys(bus)).headers
    async with aiohttp.ClientSession(headers=headers) as session:
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
    from tidemill.launch.run import process

    async def body(draining: asyncio.Event) -> None:
        factory = engine_factory(config)
        places = EnginePlaces(run=RUN, bus_url=bus_url, model_dir=model_dir, id="engine")
        await run_engine(places, config, draining, factory=factory, limits=EngineLimits(drain_s=1.0))

    torch.set_num_threads(1)
    process.run(body, drain_s=10)


if __name__ == "__main__":
    main()
