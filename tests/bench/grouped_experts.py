"""Step time of the learner with the experts of a rank in one grouped product, against one product for each expert.

Both train the same mixture of experts (Qwen3-MoE) on the same batches, in one process, in turn. ``python -m tests.bench
grouped_experts``
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tests.bench.learner_step import make_batch, our_step
from tidemill.learner.backends.megatron.layers.kernels import Wanted

SHAPES: dict[str, dict[str, int]] = {
    "8 experts of 32, 2 of them a token (hidden 64)": {"hidden": 64, "experts": 8, "each": 2, "inner": 32},
    "32 experts of 64, 4 of them a token (hidden 128)": {"hidden": 128, "experts": 32, "each": 4, "inner": 64},
    "128 experts of 64, 8 of them a token (hidden 128)": {"hidden": 128, "experts": 128, "each": 8, "inner": 64},
}
ON_CUDA = {
    "128 experts of 768, 8 of them a token (hidden 2048, as Qwen3-30B-A3B)": {
        "hidden": 2048,
        "experts": 128,
        "each": 8,
        "inner": 768,
    }
}
"""Shapes for an accelerator alone."""
LAYERS, VOCAB = 2, 128


def make_model(directory: Path, *, hidden: int, experts: int, each: int, inner: int) -> None:
    """Write a random Qwen3-MoE in Hugging Face format."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=each,
        norm_topk_prob=True,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(shape).save_pretrained(directory)


def compare(name: str, *, rounds: int, device: str) -> dict[str, float]:
    """Return the median milliseconds of both steps, and the ratio of the medians; the first losses must agree."""
    batch = make_batch(sequences=64, prompt=16, response=112 if name in ON_CUDA else 32, vocab=VOCAB)
    dtype, clock = ("bfloat16", time.perf_counter) if device == "cuda" else ("float32", time.process_time)
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), **(SHAPES | ON_CUDA)[name])
        wanted = {"grouped": Wanted(grouped_experts="always"), "sequential": Wanted(grouped_experts="never")}
        steps = {
            kind: our_step(Path(directory), batch, device, dtype=dtype, kernels=one) for kind, one in wanted.items()
        }
    first = {kind: step() for kind, step in steps.items()}
    assert abs(first["grouped"] - first["sequential"]) < (1e-2 if device == "cuda" else 1e-5), first
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, step in steps.items():
            began = clock()
            step()  # returns a number, so the device has finished
            times[kind].append(clock() - began)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    return {
        **{f"{kind}_ms": value * 1e3 for kind, value in median.items()},
        "ratio": median["grouped"] / median["sequential"],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench grouped_experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in SHAPES | (ON_CUDA if args.device == "cuda" else {}):
        found = compare(name, rounds=args.rounds, device=args.device)
        print(name, " ".join(f"{key}={value:.2f}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
