"""CPU time of an actor for each sample, beside another checkout of the project.

python -m tests.bench actor_cost [--against DIRECTORY] [--prompt 6] [--tasks 1500] [--rounds 3]

A real actor process and a real nats-server; the engine is a server that answers at once with five tokens, so that only
the actor's own work is measured: leasing, requests, checks, rewards, publishing, acknowledging. Checkouts take turns,
each with a ``.venv`` of its own; ratios are of single rounds, because other work on the machine changes all times.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
from aiohttp import web

from tests.tree import ROOT
from tests.waits import until
from tidemill.actors.actor.process import run_actor
from tidemill.actors.config import ActorConfig
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect, raise_epoch
from tidemill.bus.wire.messages import Sampling, Task
from tidemill.launch.run import process

RUN, GROUP, WARM_TASKS = "cost", 8, 100


async def answer(http: web.Request) -> web.Response:
    """Answer /generate with five tokens for each request of a batch."""
    asked = json.loads(await http.read())
    answers = [_response(name) for name in ([asked["rid"]] if isinstance(asked["rid"], str) else asked["rid"])]
    return web.json_response(answers[0] if isinstance(asked["rid"], str) else answers)


def _response(name: str) -> dict[str, object]:
    meta = {"id": name, "finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 1, None]] * 5}
    meta |= {"weight_versions": [{"version": "0", "start": 0, "end": 5}], "prompt_tokens": 6, "e2e_latency": 0.1}
    return {"text": "4817", "output_ids": [1, 2, 3, 4, 5], "meta_info": meta}


def serve_engine(port: int) -> None:
    async def describe(http: web.Request) -> web.Response:
        return web.json_response({"weight_version": "0"})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", answer)
    app.router.add_route("*", "/{path:.*}", describe)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def work(bus_url: str, port: int) -> int:
    engines = (f"http://127.0.0.1:{port}",)
    config = ActorConfig(reward="digits", join_requests=True, engines=engines, max_samples_in_flight=256)
    return process.run(lambda draining: run_actor(bus_url, RUN, config, BusConfig(), draining, "actor"), drain_s=30)


async def issue(bus: Bus, count: int, prompt_tokens: int) -> None:
    epoch = await raise_epoch(bus)
    await bus.tasks.fence(epoch)
    for offset in range(count):
        task = Task(
            run=RUN,
            epoch=epoch,
            prompt="4817.=",
            prompt_tokens=np.arange(prompt_tokens, dtype=np.int32),
            group_size=GROUP,
            label="4817",
            sampling=Sampling(max_new_tokens=6, seed=5),
            prompt_epoch=0,
            offset=offset,
        )
        await bus.tasks.issue(task)


async def measure(checkout: Path, args: argparse.Namespace) -> float:
    """Return the CPU microseconds of an actor of ``checkout`` for each sample, its start apart."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [str(checkout / ".venv/bin/python"), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory), BusConfig(port=-1)) as server:
        async with connect(server.url, RUN, name="bench") as bus:
            await bus.create_layout()
            await issue(bus, args.tasks + WARM_TASKS, args.prompt)
            children = [
                await asyncio.create_subprocess_exec(*command, *words, cwd=checkout, env=environment)
                for words in (("engine", port), ("actor", server.url, port))
            ]
            try:
                actor = psutil.Process(children[1].pid)
                first, begin = await until(lambda: stored(bus, WARM_TASKS * GROUP)), actor.cpu_times()
                last, end = await until(lambda: stored(bus, args.tasks * GROUP)), actor.cpu_times()
            finally:
                for child in reversed(children):
                    child.send_signal(signal.SIGTERM)
                    await child.wait()
    return 1e6 * (end.user + end.system - begin.user - begin.system) / (last - first)


async def stored(bus: Bus, count: int) -> int:
    """Return the number of stored samples, 0 while it is below ``count``."""
    number = (await bus.samples.info()).last_seq
    return number if number >= count else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout with its .venv")
    parser.add_argument("--prompt", type=int, default=6, help="tokens of a prompt")
    parser.add_argument("--tasks", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    checkouts = [ROOT, *([args.against.resolve()] if args.against else [])]
    costs: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
    for number in range(args.rounds):
        for checkout in checkouts[:: 1 if number % 2 else -1]:
            costs[checkout].append(asyncio.run(measure(checkout, args)))
    for checkout in checkouts:
        print(f"{checkout}: {statistics.median(costs[checkout]):.0f} CPU microseconds a sample")
    if args.against:
        ratios = [here / there for here, there in zip(*costs.values(), strict=True)]
        print(f"RATIO here / there: {statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        serve_engine(int(sys.argv[2]))
    elif sys.argv[1:2] == ["actor"]:
        sys.exit(work(sys.argv[2], int(sys.argv[3])))
    else:
        main()
