"""Turns/s of episodes through the gateway, against asking the same engine directly for the same prompts.

python -m tests.bench.episodes [--episodes 32] [--turns 6] [--new-tokens 32] [--rounds 3]

An episode's prompt grows by its answers. ``direct ids``: the program asks the engine's own /generate with token ids,
for log-probs, too;
``ids``: the same program asks the gateway's. ``log``: ``ids`` with ``again: replay``, every turn stored on a real bus
before it is given. ``no program``: the actor's client of engines alone, as for a rollout without a program. ``direct
chat``: the same program of chat completions asks the engine's own OpenAI API; ``chat``: the gateway's, which makes the
history into the token ids of its answers again. All take part in each round, in another order; the ratio is that of the
medians. The engine is a process of its own, as in a run; gateway and programs share this one, whose CPU time a turn is
printed. The model is tiny: the long turns of a large model do not hide the gateway's share here.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.episode_kit import Client, InProcess, said, task
from tests.tiny_models import write_tiny_model
from tidemill.actors.engines.activity import Activity
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.engines.responses import Prompt, Responses
from tidemill.actors.engines.server_discovery import UrlDiscovery
from tidemill.actors.engines.server_pool import EnginePool
from tidemill.actors.episodes.gateway import Gateway
from tidemill.actors.episodes.rollouts import ProgramRollout
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.actors.router.token_history import ModelText
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.streams.episode_turns import TurnStream
from tidemill.bus.system.coroutines import new_event_loop
from tidemill.bus.wire.messages import Sampling


async def direct(responses: Responses, episode: int, turns: int, sampling: Sampling) -> None:
    """Play an episode with the engine alone."""
    tokens = first(episode)
    for turn in range(turns):
        asked = Prompt(
            name=f"{episode}.{turn}", tokens=np.array(tokens, np.int32), sampling=sampling, min_version=0, prefer=""
        )
        response = await responses.generate(asked)
        tokens += response.generation.tokens.tolist()


def first(episode: int) -> list[int]:
    """Return the prompt of an episode."""
    return np.random.default_rng(episode).integers(3, 290, 40).tolist()


def by_ids(turns: int, **request: Any) -> Callable[[Client], Awaitable[float]]:
    """Return a program of token ids. ``request``: members of its requests."""

    async def program(client: Client) -> float:
        tokens = first(client.task["task"])
        for _ in range(turns):
            status, answer = await client.post("/generate", {"input_ids": tokens, **request})
            assert status == 200, answer
            tokens += answer["output_ids"]
        return 1.0

    return program


def by_chat(turns: int, **sampling: Any) -> Callable[[Client], Awaitable[float]]:
    """Return a program of chat messages. ``sampling``: members of its requests."""

    async def program(client: Client) -> float:
        messages = [("user", f"What is three plus {client.task['task']}?")]
        for _ in range(turns):
            messages += [("assistant", said(await client.chat(*messages, **sampling))), ("user", "Are you sure?")]
        return 1.0

    return program


@asynccontextmanager
async def engine(model: Path) -> AsyncIterator[str]:
    """Serve the model in a process of its own; yield its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.engine_child", str(model), "0"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()  # its end
        await process.wait()


async def measured(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return turns/s, and milliseconds of this process's CPU a turn, by way and round."""
    sampling = Sampling(temperature=1.0, max_new_tokens=args.new_tokens)
    found: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("no program", "direct ids", "ids", "log", "direct chat", "chat")
    }
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "model", max_position_embeddings=4096)
        with EmbeddedServer(Path(directory) / "nats", BusConfig()) as server:
            config = BusConfig(rollouts=("agent",))
            async with (
                connect(server.url, "bench", config, name="bench") as bus,
                engine(model) as url,
                aiohttp.ClientSession() as session,
                asyncio.TaskGroup() as group,
            ):
                await bus.create_layout()
                engines = EnginePool(UrlDiscovery([url], HttpEngine), HttpEngine)
                running = group.create_task(engines.run())
                responses = Responses(engines, timeout_s=60.0, retries=3, activity=Activity())
                gateway = Gateway(ModelText.read(str(model), "model.path"), responses)
                await gateway.start()
                number = iter(range(1, 10**9))

                def rollout(program: Any, turns: TurnStream | None = None, again: str = "restart") -> ProgramRollout:
                    config = RolloutConfig(use="agent:own:program", max_calls_in_flight=4, again=again)
                    return ProgramRollout(gateway, InProcess(session, program), config, turns)

                ways: dict[str, Callable[[int], Awaitable[Any]]] = {
                    "no program": lambda n: direct(responses, n, args.turns, sampling)
                }
                ids = by_ids(
                    args.turns,
                    sampling_params={"temperature": 1.0, "max_new_tokens": args.new_tokens},
                    return_logprob=True,
                )
                ways["direct ids"] = lambda n: ids(Client(session, url, "", {"task": n}))
                own = by_chat(args.turns, temperature=1.0, max_tokens=args.new_tokens, model="m")
                ways["direct chat"] = lambda n: own(Client(session, f"{url}/v1", "", {"task": n}))
                for name, made in (
                    ("ids", rollout(by_ids(args.turns))),
                    ("chat", rollout(by_chat(args.turns))),
                    ("log", rollout(by_ids(args.turns), turns=bus.turns, again="replay")),
                ):
                    asked = replace(task(budget=None), sampling=sampling)
                    ways[name] = lambda n, made=made, asked=asked: made.sample(replace(asked, id=n), 0, "a")  # type: ignore[misc]
                for round in range(args.rounds + 1):
                    for name in sorted(ways, key=lambda name: (hash((round, name)), name)):
                        begin, busy = time.perf_counter(), time.process_time()
                        await asyncio.gather(*(ways[name](next(number)) for _ in range(args.episodes)))
                        if round:  # the first is a rehearsal
                            turns = args.episodes * args.turns
                            found[name].append(
                                (turns / (time.perf_counter() - begin), 1000 * (time.process_time() - busy) / turns)
                            )
                await gateway.close()
                running.cancel()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("episodes", 32), ("turns", 6), ("new-tokens", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:  # the loop of an actor
        found = runner.run(measured(parser.parse_args()))
    for name, rounds in found.items():
        direct = "direct chat" if "chat" in name else "direct ids"
        speeds = [speed for speed, _ in rounds]
        median, base = statistics.median(speeds), statistics.median(speed for speed, _ in found[direct])
        ratio, spread = f"{median / base:5.2f} of {direct}", f"({min(speeds):.1f} .. {max(speeds):.1f})"
        busy = statistics.median(milliseconds for _, milliseconds in rounds)
        print(f"{name:11} {median:8.1f} turns/s   {ratio:19}   {busy:5.2f} ms of CPU a turn   {spread}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
