"""Tokens per second of the built-in engine over HTTP against transformers' batched generate: same model, same run.

``python -m tests.bench.engine`` prints one line per engine and the ratio; more than 1 = the built-in engine is faster.
The engine answers 32 requests over loopback, with log-probs, client and server in the same process; generate gets one
padded batch and gives no log-probs.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.tiny_models import write_tiny_model
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.wire.messages import Sampling

PROMPT_TOKENS = 24


async def engine_round(client: HttpEngine, prompts: np.ndarray, num_tokens: int) -> None:
    sampling = [Sampling(max_new_tokens=num_tokens, seed=seed) for seed in range(len(prompts))]
    answers = await asyncio.gather(
        *(client.generate(prompt, each) for prompt, each in zip(prompts, sampling, strict=True))
    )
    assert all(len(answer.tokens) == num_tokens for answer in answers), "a response ended early"


@torch.inference_mode()
def generate_round(model: Any, prompts: np.ndarray, num_tokens: int) -> None:
    tokens = torch.from_numpy(prompts)
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        top_k=0,
        max_new_tokens=num_tokens,
        eos_token_id=None,
    )


async def measure(model_dir: Path, prompts: np.ndarray, num_tokens: int, rounds: int) -> list[tuple[float, float]]:
    """Return (seconds of the engine, seconds of generate) of each round, taking turns, so that other load on the
    machine affects both.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa").eval()
    engine = BuiltinEngine(model_dir, EngineConfig(max_running=len(prompts)), authority=Authority(unguarded=True))
    engine.load()
    client = HttpEngine(await engine.start())
    engine.phase = "serving"
    found = []
    try:
        for _ in range(rounds + 1):
            started = time.perf_counter()
            await engine_round(client, prompts, num_tokens)
            between = time.perf_counter()
            generate_round(model, prompts, num_tokens)
            found.append((between - started, time.perf_counter() - between))
    finally:
        await client.close()
        await engine.close()
    return found[1:]  # the first one warms both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        # Without end-of-sequence ids every response has its full length.
        model_dir = write_tiny_model(
            Path(directory),
            num_hidden_layers=args.layers,
            hidden_size=args.hidden,
            intermediate_size=2 * args.hidden,
            eos_token_id=None,
        )
        (model_dir / "tokenizer_config.json").write_text(json.dumps({}), encoding="utf-8")
        prompts = np.random.default_rng(0).integers(3, 250, (args.requests, PROMPT_TOKENS), dtype=np.int64)
        times = asyncio.run(measure(model_dir, prompts, args.tokens, args.rounds))
    total = args.requests * args.tokens
    for place, name in enumerate(("builtin over HTTP", "transformers generate")):
        print(
            f"{name:22} {total / statistics.median(each[place] for each in times):8.0f} tokens/s, median of "
            f"{args.rounds}"
        )
    print(f"{'ratio':22} {statistics.median(generate / engine for engine, generate in times):8.2f}")


if __name__ == "__main__":
    main()
