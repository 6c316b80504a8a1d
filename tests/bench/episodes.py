"""Turns/s of episodes through the gateway, against asking the same engine directly for the same prompts.

python -m tests.bench.episodes [--episodes 32] [--turns 6] [--new-tokens 32] [--rounds 3]

An episode's prompt grows by its answers. ``direct``: the actor's client of engines, no gateway. ``ids``: the gateway's /generate with token
ids. ``log``: ``ids`` with ``again: replay``, every turn stored on a real bus before it is given. ``direct chat``: the same program of chat
completions asks the engine's own OpenAI API; ``chat``: the gateway's, which makes the history into the token ids of its answers again. All
take part in each round, in another order; the ratio is that of the medians. Engine, gateway and programs share this process, and the
model is tiny: the long turns of a large model do not hide the gateway's share here.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.engines.responses import Prompt
from actors.episodes.rollouts import ProgramRollout
from bus.config import BusConfig
from bus.server.nats_server import EmbeddedServer
from bus.streams.bus import connect
from bus.system.loop import new_event_loop
from bus.wire.messages import Sampling
from tests.episode_kit import Client, InProcess, Stage, said, stage, task
from tests.tiny_models import write_tiny_model


async def direct(scene: Stage, episode: int, turns: int, sampling: Sampling) -> None:
    """Play an episode with the engine alone."""
    tokens = first(episode)
    for turn in range(turns):
        asked = Prompt(name=f"{episode}.{turn}", tokens=np.array(tokens, np.int32), sampling=sampling, min_version=0, prefer="")
        response = await scene.responses.generate(asked)
        tokens += response.generation.tokens.tolist()


def first(episode: int) -> list[int]:
    """Return the prompt of an episode."""
    return np.random.default_rng(episode).integers(3, 290, 40).tolist()


def by_ids(turns: int) -> Callable[[Client], Awaitable[float]]:
    """Return a program of token ids."""

    async def program(client: Client) -> float:
        tokens = first(client.task["task"])
        for _ in range(turns):
            status, answer = await client.post("/generate", {"input_ids": tokens})
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


async def measured(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return turns/s by way and round."""
    sampling = Sampling(temperature=1.0, max_new_tokens=args.new_tokens)
    found: dict[str, list[float]] = {"direct": [], "ids": [], "log": [], "direct chat": [], "chat": []}
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "model", max_position_embeddings=4096)
        with EmbeddedServer(Path(directory) / "nats", BusConfig()) as server:
            config = BusConfig(rollouts=("agent",))
            async with connect(server.url, "bench", config, name="bench") as bus, stage(model, by_ids(args.turns)) as scene:
                await bus.create_layout()
                number = iter(range(1, 10**9))

                def rollout(program: Any, **log: Any) -> ProgramRollout:
                    return ProgramRollout(scene.gateway, InProcess(scene.session, program), max_calls_in_flight=4, **log)

                ways: dict[str, Callable[[int], Awaitable[Any]]] = {"direct": lambda n: direct(scene, n, args.turns, sampling)}
                own = by_chat(args.turns, temperature=1.0, max_tokens=args.new_tokens, model="m")
                ways["direct chat"] = lambda n: own(Client(scene.session, f"{scene.served.engine.url}/v1", "", {"task": n}))
                for name, made in (
                    ("ids", rollout(by_ids(args.turns))),
                    ("chat", rollout(by_chat(args.turns))),
                    ("log", rollout(by_ids(args.turns), turns=bus.turns, again="replay")),
                ):
                    asked = replace(task(budget=None), sampling=sampling)
                    ways[name] = lambda n, made=made, asked=asked: made.sample(replace(asked, id=n), 0, "a")  # type: ignore[misc]
                for round in range(args.rounds + 1):
                    for name in sorted(ways, key=lambda name: (hash((round, name)), name)):
                        begin = time.perf_counter()
                        await asyncio.gather(*(ways[name](next(number)) for _ in range(args.episodes)))
                        if round:  # the first is a rehearsal
                            found[name].append(args.episodes * args.turns / (time.perf_counter() - begin))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("episodes", 32), ("turns", 6), ("new-tokens", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:  # the loop of an actor
        found = runner.run(measured(parser.parse_args()))
    for name, speeds in found.items():
        direct = "direct chat" if "chat" in name else "direct"
        median, base = statistics.median(speeds), statistics.median(found[direct])
        more_ms = 1000 * (1 / median - 1 / base)
        ratio, spread = f"{median / base:5.2f} of {direct}", f"({min(speeds):.1f} .. {max(speeds):.1f})"
        print(f"{name:11} {median:8.1f} turns/s   {ratio:19}   {more_ms:+6.2f} ms a turn   {spread}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
