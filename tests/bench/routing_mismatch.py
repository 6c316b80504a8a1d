"""Difference between the log-probs of an engine and of the learner on a tiny mixture of experts, with and without the
engine's experts.

    python -m tests.bench.routing_mismatch

The engine computes in bfloat16, token by token, the learner in float32, in packed rows; or the engine has slightly
older weights.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.integration.expert_ranks import Way, learner
from tests.learner_steps import make_batches
from tests.megatron_world import one_rank
from tests.tiny_models import tiny_model, write_tiny_model
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.wire.messages import Sample, Sampling, Status
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.backends.megatron.layers.experts import Mixture

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4, "initializer_range": 0.2}
PROMPTS, LENGTH = 32, 64
WAYS = {
    "none": Way(),
    "rollout": Way(mixture=Mixture(replay=True, given=True)),
}
Measured = Mapping[str, float]


async def sampled(directory: Path, dtype: str) -> list[Sample]:
    """Return responses of an engine, with the experts of their tokens."""
    engine = BuiltinEngine(directory, EngineConfig(dtype=dtype), authority=Authority(unguarded=True))
    await asyncio.to_thread(engine.load)
    client = HttpEngine(await engine.start(), routed_experts=True)
    engine.phase = "serving"
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 299, 12).astype(np.int32) for _ in range(PROMPTS)]
    try:
        made = await asyncio.gather(
            *(
                client.generate(prompt, Sampling(max_new_tokens=LENGTH, seed=seed))
                for seed, prompt in enumerate(prompts)
            )
        )
    finally:
        await client.close()
        await engine.close()
    return [
        Sample(
            run="r",
            task=number + 1,
            index=0,
            group_size=1,
            attempt="a",
            prompt="p",
            tokens=np.concatenate([prompt, one.tokens]).astype(np.int32),
            response_length=len(one.tokens),
            response=one.text,
            rollout_log_probs=one.log_probs,
            loss_mask=np.ones(len(one.tokens), np.uint8),
            spans=one.spans,
            reward=0.0,
            status=Status.COMPLETED,
            sampling=Sampling(max_new_tokens=LENGTH),
            routed_experts=one.routed_experts,
        )
        for number, (prompt, one) in enumerate(zip(prompts, made, strict=True))
    ]


def mismatch(directory: Path, samples: list[Sample], way: Way) -> Measured:
    """Return the differences of the learner's log-probs from the engine's, over all sampled tokens (nats; k3 as in
    docs/metrics.md).
    """
    shape = RoutedShape.of(json.loads((directory / "config.json").read_text()))
    (batch,) = make_batches(samples, step=1, max_tokens=1024, routed=shape if way.mixture.given else None)
    with one_rank() as here:
        rows = learner(directory, here, way).trainer.log_probs(batch)
    ours = torch.cat(
        [row[torch.from_numpy(part.loss_mask_T)] for row, part in zip(rows, batch.micro_batches, strict=True)]
    ).double()
    gap = ours - torch.from_numpy(batch.engine_log_probs).double()
    return {
        "mean |difference|": float(gap.abs().mean()),
        "99th percentile": float(gap.abs().quantile(0.99)),
        "largest": float(gap.abs().max()),
        "KL (k3)": float((gap.exp() - 1 - gap).mean()),
    }


def measured(root: Path, case: str) -> dict[str, Measured]:
    """Return the differences of each way. ``case``: ``bfloat16`` = the engine's dtype; ``behind`` = the engine has
    older weights.
    """
    directory, older = write_tiny_model(root / "model", "qwen3_moe", **SIZES), root / "older"
    if case == "bfloat16":
        samples = asyncio.run(sampled(directory, "bfloat16"))
    else:
        model = tiny_model("qwen3_moe", **SIZES)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 3e-3 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        write_tiny_model(older, "qwen3_moe", **SIZES)
        model.save_pretrained(older)
        samples = asyncio.run(sampled(older, "float32"))
    return {name: mismatch(directory, samples, way) for name, way in WAYS.items()}


def main() -> None:
    """Print a table of every case."""
    torch.set_num_threads(1)
    for case in ("bfloat16", "behind"):
        with tempfile.TemporaryDirectory() as directory:
            for way, found in measured(Path(directory), case).items():
                sys.stdout.write(
                    f"{case:10} {way:8} " + "  ".join(f"{name} {value:.3g}" for name, value in found.items()) + "\n"
                )


if __name__ == "__main__":
    main()
