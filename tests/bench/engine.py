"""Tokens per second of the built-in engine over HTTP, with both of its model runners, against transformers' batched
generate: same model, same run.

``python -m tests.bench.engine`` prints one line per engine and the ratios; more than 1 = the decoder is faster. The
engine answers 32 requests over loopback, with log-probs, client and server in the same process; generate gets one
padded batch and gives no log-probs. The ratio of the runners is also of the processor time of the decoding thread.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tests.tiny_models import write_tiny_model
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.wire.messages import Sampling

PROMPT_TOKENS = 24
PLAYERS = ("decoder over HTTP", "transformers as runner over HTTP", "transformers generate")


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


@asynccontextmanager
async def serving(
    model_dir: Path, runner: Literal["decoder", "transformers"], num_rows: int
) -> AsyncIterator[tuple[BuiltinEngine, HttpEngine]]:
    settings = EngineConfig(max_running=num_rows, runner=runner)
    engine = BuiltinEngine(model_dir, settings, authority=Authority(unguarded=True))
    engine.load()
    client = HttpEngine(await engine.start())
    engine.phase = "serving"
    try:
        yield engine, client
    finally:
        await client.close()
        await engine.close()


async def measure(
    model_dir: Path, prompts: np.ndarray, num_tokens: int, rounds: int
) -> tuple[list[list[float]], list[float]]:
    """Return the seconds of each player, in the order of ``PLAYERS``, of each round, and the processor seconds of the
    two decoding threads in all rounds. The players take turns, so that other load on the machine affects all.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa").eval()
    times: list[list[float]] = []
    async with (
        serving(model_dir, "decoder", len(prompts)) as (decoder, decoder_client),
        serving(model_dir, "transformers", len(prompts)) as (other, other_client),
    ):
        cpu_s = [0.0, 0.0]
        for number in range(rounds + 1):
            if number == 1:  # the first one warms all
                cpu_s = [-engine.scheduler.counters.decode_cpu_s for engine in (decoder, other)]
            moments = [time.perf_counter()]
            for client in (decoder_client, other_client):
                await engine_round(client, prompts, num_tokens)
                moments.append(time.perf_counter())
            generate_round(model, prompts, num_tokens)
            moments.append(time.perf_counter())
            times.append([end - start for start, end in pairwise(moments)])
        cpu_s = [
            spent + engine.scheduler.counters.decode_cpu_s
            for spent, engine in zip(cpu_s, (decoder, other), strict=True)
        ]
    return times[1:], cpu_s


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
        times, cpu_s = asyncio.run(measure(model_dir, prompts, args.tokens, args.rounds))
    total = args.requests * args.tokens
    for place, name in enumerate(PLAYERS):
        rate = total / statistics.median(seconds[place] for seconds in times)
        print(f"{name:36} {rate:8.0f} tokens/s, median of {args.rounds}")
    for place, name in enumerate(PLAYERS[1:], start=1):
        ratio = statistics.median(seconds[place] / seconds[0] for seconds in times)
        print(f"{f'ratio of {name} to decoder':60} {ratio:8.2f}")
    print(f"{'ratio of their processor seconds of decoding':60} {cpu_s[1] / cpu_s[0]:8.2f}")


if __name__ == "__main__":
    main()
