"""Tokens per second of the built-in engine over HTTP against transformers' batched generate: same model, same run.

``python -m bench.engine`` prints one line per engine and the ratio; more than 1 = the built-in engine is faster.
The engine answers 32 requests over loopback, with log-probs, client and server in the same process; generate gets one padded batch
and gives no log-probs.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from actors.builtin.engine import BuiltinEngine
from actors.config import EngineConfig
from actors.engine_client import HttpEngine
from bus.messages import Sampling
from tests.tiny_models import write_tiny_model

PROMPT_TOKENS = 24


async def run_engine(model_dir: Path, prompts: np.ndarray, num_tokens: int, rounds: int) -> list[tuple[float, float]]:
    """(wall seconds, CPU seconds) of each round."""
    engine = BuiltinEngine(model_dir, EngineConfig(max_running=len(prompts)))
    engine.load()
    client = HttpEngine(await engine.start())
    engine.phase = "serving"
    times = []
    try:
        for _ in range(rounds):
            wall, cpu = time.perf_counter(), time.process_time()
            sampling = [Sampling(max_new_tokens=num_tokens, seed=seed) for seed in range(len(prompts))]
            answers = await asyncio.gather(*(client.generate(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)))
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
            assert all(len(answer.tokens) == num_tokens for answer in answers), "a response ended early"
    finally:
        await client.close()
        await engine.close()
    return times


def run_generate(model_dir: Path, prompts: np.ndarray, num_tokens: int, rounds: int) -> list[tuple[float, float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa").eval()
    tokens = torch.from_numpy(prompts.astype(np.int64))
    times = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0, max_new_tokens=num_tokens, eos_token_id=None
            )
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        # Without end-of-sequence ids every response has its full length.
        model_dir = write_tiny_model(
            Path(directory), num_hidden_layers=args.layers, hidden_size=args.hidden, intermediate_size=2 * args.hidden, eos_token_id=None
        )
        (model_dir / "tokenizer_config.json").write_text(json.dumps({}), encoding="utf-8")
        prompts = np.random.default_rng(0).integers(3, 250, (args.requests, PROMPT_TOKENS))
        total = args.requests * args.tokens
        results = {
            "builtin over HTTP": asyncio.run(run_engine(model_dir, prompts, args.tokens, args.rounds)),
            "transformers generate": run_generate(model_dir, prompts, args.tokens, args.rounds),
        }
    rates = {}
    for name, times in results.items():
        wall, cpu = min(wall for wall, _ in times), min(cpu for _, cpu in times)
        rates[name] = total / wall
        print(f"{name:24} {total / wall:8.0f} tokens/s  {total / cpu:8.0f} tokens/CPU-s  best of {args.rounds}")
    print(f"ratio                    {rates['builtin over HTTP'] / rates['transformers generate']:8.2f}")


if __name__ == "__main__":
    main()
