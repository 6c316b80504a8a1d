"""CPU seconds and peak memory of the built-in engine over mixes of requests, against the same in another checkout.

``python -m tests.bench.engine_mixes --against DIRECTORY`` takes turns between this checkout and the other, each round
in a process of its own, and prints the medians and their ratio; less than 1 = this one is cheaper.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TINY = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
Ask = Callable[[np.ndarray, int, int], Awaitable[np.ndarray]]
"""(prompt, new tokens, seed) -> the response."""


def prompt(random: np.random.Generator, length: int) -> np.ndarray:
    return random.integers(3, 250, length, dtype=np.int64)


async def short(ask: Ask, random: np.random.Generator) -> None:
    """32 prompts of 24 tokens, 64 new ones each."""
    await asyncio.gather(*(ask(prompt(random, 24), 64, seed) for seed in range(32)))


async def uneven(ask: Ask, random: np.random.Generator) -> None:
    """32 prompts of 16 to 600 tokens, 16 to 160 new ones each."""
    sizes = [(int(random.integers(16, 600)), int(random.integers(16, 160))) for _ in range(32)]
    await asyncio.gather(*(ask(prompt(random, length), new, seed) for seed, (length, new) in enumerate(sizes)))


async def group(ask: Ask, random: np.random.Generator) -> None:
    """8 samples of a prompt of 500 tokens, 16 new ones each."""
    shared = prompt(random, 500)
    await asyncio.gather(*(ask(shared, 16, seed) for seed in range(8)))


async def turns(ask: Ask, random: np.random.Generator) -> None:
    """4 conversations of 5 turns, each of 100 tokens and 20 new ones."""

    async def talk(seed: int) -> None:
        context = prompt(random, 0)
        for _ in range(5):
            context = np.concatenate([context, prompt(random, 100)])
            context = np.concatenate([context, await ask(context, 20, seed)])

    await asyncio.gather(*map(talk, range(4)))


async def one_long(ask: Ask, random: np.random.Generator) -> None:
    """A prompt of 8,190 tokens beside 63 of 24, 8 new tokens each."""
    lengths = [8184, *[24] * 63]
    await asyncio.gather(*(ask(prompt(random, length), 8, seed) for seed, length in enumerate(lengths)))


MIXES: dict[str, tuple[Callable[[Ask, np.random.Generator], Awaitable[None]], dict[str, int]]] = {
    "short": (short, TINY),
    "uneven": (uneven, SMALL),
    "group": (group, SMALL),
    "turns": (turns, SMALL),
    "one_long": (one_long, SMALL),
}


async def measure(model_dir: Path, name: str, rounds: int) -> dict[str, float]:
    """Return CPU seconds of the decoding thread in the median round, and the growth of peak memory."""
    from tidemill.actors.config import EngineConfig
    from tidemill.actors.engines.engine_client import HttpEngine
    from tidemill.actors.serving.authority import Authority
    from tidemill.actors.serving.builtin.engine import BuiltinEngine
    from tidemill.bus.wire.messages import Sampling

    engine = BuiltinEngine(model_dir, EngineConfig(max_running=64), authority=Authority(unguarded=True))
    engine.load()
    client = HttpEngine(await engine.start())
    engine.phase = "serving"

    async def ask(tokens: np.ndarray, new: int, seed: int) -> np.ndarray:
        return np.asarray((await client.generate(tokens, Sampling(max_new_tokens=new, seed=seed))).tokens)

    before, random, seconds = _peak_mb(), np.random.default_rng(0), []
    try:
        for _ in range(rounds):
            started = engine.scheduler.counters.decode_cpu_s
            await MIXES[name][0](ask, random)
            await asyncio.wrap_future(engine.scheduler.call(lambda: None))
            seconds.append(engine.scheduler.counters.decode_cpu_s - started)
    finally:
        await client.close()
        await engine.close()
    return {"cpu_s": statistics.median(seconds[1:] or seconds), "grown_mb": _peak_mb() - before}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def child(name: str, rounds: int) -> None:
    import torch

    from tests.tiny_models import write_tiny_model

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        sizes: Any = MIXES[name][1]
        model_dir = write_tiny_model(Path(directory), eos_token_id=None, max_position_embeddings=8192, **sizes)
        (model_dir / "tokenizer_config.json").write_text("{}", encoding="utf-8")
        print(json.dumps(asyncio.run(measure(model_dir, name, rounds))))


def run_child(checkout: Path, name: str, rounds: int) -> dict[str, float]:
    """Measure in a process that imports the package of ``checkout``."""
    with tempfile.TemporaryDirectory() as links:
        (Path(links) / "tidemill").symlink_to(checkout)
        environment = os.environ | {"PYTHONPATH": f"{links}{os.pathsep}{checkout}"}
        command = [sys.executable, str(Path(__file__)), "--mix", name, "--rounds", str(rounds)]
        result = subprocess.run(command, env=environment, cwd=links, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(result.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--mix", choices=MIXES, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a process; the first warms it")
    parser.add_argument("--processes", type=int, default=3)
    args = parser.parse_args()
    if args.mix:
        child(args.mix, args.rounds)
        return
    checkouts = [ROOT, *([args.against.resolve()] if args.against else [])]
    for name in args.mixes:
        rounds = 1 if name == "one_long" else args.rounds
        found = [[run_child(checkout, name, rounds) for checkout in checkouts] for _ in range(args.processes)]
        for unit in ("cpu_s", "grown_mb"):
            medians = [statistics.median(one[place][unit] for one in found) for place in range(len(checkouts))]
            values = "".join(f"{value:10.3f}" for value in medians)
            print(f"{name:9} {unit:9}{values}" + (f"  ratio {medians[0] / medians[1]:.2f}" if args.against else ""))


if __name__ == "__main__":
    main()
