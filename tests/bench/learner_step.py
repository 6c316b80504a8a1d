"""Step time of the learner's trainer against the same step in plain transformers and torch.

Both take the whole step on the same data: log-probs, advantages, truncated importance weights, clipped loss, backward,
gradient clipping, Adam. Ours is packed and computes the diagnostics too; the plain one pads. Run in one process,
interleaved, so that a busy machine slows both. ``python -m tests.bench learner_step``

``--prompts``: a step on the shape of SmolLM2-135M with random weights, its prompts computed once, against the same step
with whole sequences, and against one in which half of the groups have equal rewards; processor time, in turn.

``--lora RANK``: a step that trains adapters on that shape, against the same step with all weights.

``--backends``, ``--families NAME ...``: a step on FSDP2 over transformers, see ``step_backends.py``.

``--against DIRECTORY``: the trainer of another checkout instead, such as that of an older commit (``git worktree add
DIRECTORY COMMIT``, of 2026-11-29 or later), each in a process of its own, step by step in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.bus.client.addresses import KeptPort
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.settings.config import OptimizerConfig

SHAPES: dict[str, dict[str, int]] = {
    "digits (2 layers, hidden 64)": {
        "layers": 2,
        "hidden": 64,
        "sequences": 256,
        "prompt": 6,
        "response": 8,
        "vocab": 32,
    },
    "larger (4 layers, hidden 256)": {
        "layers": 4,
        "hidden": 256,
        "sequences": 64,
        "prompt": 24,
        "response": 40,
        "vocab": 512,
    },
}
SMOLLM = {
    "prompt 60, response 24": (30, 8, {"sequences": 16, "prompt": 60, "response": 24, "vocab": 49152}),
    "prompt 500, response 50": (10, 2, {"sequences": 16, "prompt": 500, "response": 50, "vocab": 49152}),
}
"""Layers (a third of them bounds the memory), whole sequences of a row, and two groups of eight."""
GROUP = 8
ROUNDS = 15
STEPS = """
import importlib.util, json, os, pathlib, sys, time, torch
from tidemill.learner.trainer import trainer
directory, sizes, file, checkout = sys.argv[1:]
assert pathlib.Path(trainer.__file__).resolve().is_relative_to(checkout), f"{trainer.__file__} is not of {checkout}"
spec = importlib.util.spec_from_file_location("learner_step", file)
learner_step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(learner_step)
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
torch.set_num_threads(1)
step = learner_step.our_step(pathlib.Path(directory), learner_step.make_batch(**json.loads(sizes)), "cpu")
for _ in sys.stdin:
    began = time.process_time()
    loss = step()
    print(time.process_time() - began, loss, file=answers, flush=True)
"""
"""A process that takes a step for every line of its input, and answers with its processor time in seconds and its loss.
Both sides run this file, so that their data are the same, with the package of their own checkout.
"""


def make_model(directory: Path, *, layers: int, hidden: int, vocab: int) -> None:
    """Write a random Qwen3 in Hugging Face format."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = hidden // 16
    shape = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(shape).save_pretrained(directory)


def make_smollm(directory: Path, layers: int) -> None:
    """Write a random model of the shape of SmolLM2-135M, which has 30 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(directory)


def make_batch(*, sequences: int, prompt: int, response: int, vocab: int) -> StepBatch:
    """Return one packed micro-batch of sequences with responses of about ``response`` tokens; groups have a prompt."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(0, vocab, (-(-sequences // GROUP), prompt))
    lengths_N = generator.integers(max(1, response // 2), response + response // 2 + 1, sequences)
    parts: dict[str, list[NDArray[Any]]] = {
        name: [] for name in ("tokens", "targets", "positions", "sample", "mask", "mu", "lag")
    }
    for row, length in enumerate(lengths_N):
        size = prompt + int(length)
        tokens = np.concatenate([prompts[row // GROUP], generator.integers(0, vocab, int(length))])
        mask = np.zeros(size, np.bool_)
        mask[prompt - 1 : -1] = True
        parts["tokens"].append(tokens)
        parts["targets"].append(np.append(tokens[1:], 0))
        parts["positions"].append(np.arange(size))
        parts["sample"].append(np.full(size, row, np.int32))
        parts["mask"].append(mask)
        parts["mu"].append(np.where(mask, -np.log(vocab) + generator.normal(0, 0.1, size), 0).astype(np.float32))
        parts["lag"].append(np.where(mask, generator.integers(0, 3, size), -1).astype(np.int32))
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    micro_batch = MicroBatch(
        tokens_T=joined["tokens"].astype(np.int64),
        targets_T=joined["targets"].astype(np.int64),
        position_ids_T=joined["positions"].astype(np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths_N + prompt)]).astype(np.int32),
        sample_T=joined["sample"],
        sequence_T=joined["sample"],
        turn_T=np.where(joined["mask"], joined["sample"], -1).astype(np.int32),
        loss_mask_T=joined["mask"],
        rollout_log_probs_T=joined["mu"],
        lag_T=joined["lag"],
    )
    return StepBatch(
        step=1,
        dp_rank=0,
        recorded=False,
        micro_batches=(micro_batch,),
        num_tokens=int(joined["mask"].sum()),
        temperatures_N=np.ones(sequences),
        rewards_N=generator.integers(0, 2, sequences).astype(np.float32),
        groups_N=np.repeat(np.arange(sequences // GROUP), GROUP).astype(np.int64),
        response_lengths_N=lengths_N.astype(np.int32),
        sampled_N=lengths_N.astype(np.int32),
        turn_samples_C=np.arange(sequences, dtype=np.int32),
        turn_rewards_C=np.zeros(sequences, np.float32),
        turn_tokens_C=lengths_N.astype(np.int32),
        num_sequences=sequences,
        truncated_N=np.zeros(sequences, np.bool_),
        unended_N=np.zeros(sequences, np.bool_),
        trainable_N=lengths_N.astype(np.int32),
        minibatches_N=np.zeros(sequences, np.int32),
        demonstration_N=np.zeros(sequences, np.bool_),
        num_minibatches=1,
        max_new_tokens=2 * response,
        state=b"",
    )


def our_step(
    directory: Path, batch: StepBatch, device: str, *, dtype: str = "float32", kernels: Wanted | None = None
) -> Callable[[], float]:
    """Return the trainer's step, which returns the loss."""
    from tidemill.learner.trainer.trainer import Trainer

    trainer = Trainer(*trainer_parts(directory, device, dtype=dtype, kernels=kernels), AlgorithmConfig(), max_lag=2)
    return lambda: trainer.train(batch)["train/loss"]


def trainer_parts(
    directory: Path, device: str, *, dtype: str, kernels: Wanted | None, lora: int = 0, fsdp: bool = False
) -> tuple[Any, Any]:
    """Return the policy and its optimizer. ``lora``: rank of the adapters that it trains; 0 = all weights."""
    from tidemill.learner.backends.megatron.groups import join
    from tidemill.learner.backends.megatron.model import build_policy
    from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
    from tidemill.learner.layout.parallel import Parallel, choose_device

    global _parallel
    if _parallel is None:
        with KeptPort() as port:
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.number))
            _parallel = join(tensor_parallel_size=1, device=choose_device(device), seed=0)
    assert isinstance(_parallel, Parallel)
    if fsdp:
        from tidemill.learner.backends.fsdp.optimizer import FsdpOptimizer
        from tidemill.learner.backends.fsdp.policy import build_policy as build_fsdp_policy

        model = build_fsdp_policy(directory, dtype=dtype, parallel=_parallel)
        return model, FsdpOptimizer(model, OptimizerConfig(lr=1e-4), steps=1000)
    if lora:
        from tidemill.learner.settings.lora import LoraConfig, Tuning

        tuning = {"tuning": Tuning(lora=LoraConfig(rank=lora, alpha=2.0 * lora))}
    else:
        tuning = {}  # an older checkout of ``--against`` may have none
    policy = build_policy(directory, dtype=dtype, parallel=_parallel, kernels=kernels, **tuning)
    return policy, MegatronOptimizer(policy, OptimizerConfig(lr=1e-4), steps=1000)


_parallel: Any = None


def plain_step(directory: Path, batch: StepBatch, device: str) -> Callable[[], float]:
    """Return the same step with transformers and torch (right-padded, AdamW, no diagnostics), which returns the
    loss.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), weight_decay=0.0)
    row, settings = batch.micro_batches[0], AlgorithmConfig()
    bounds = list(zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True))

    def padded(values: NDArray[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(values[a:b]) for a, b in bounds], batch_first=True).to(
            device
        )

    def step() -> float:
        rewards = torch.from_numpy(batch.rewards_N).to(device).view(-1, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        tokens, targets, mask, mu = (
            padded(x) for x in (row.tokens_T, row.targets_T, row.loss_mask_T, row.rollout_log_probs_T)
        )
        attention = padded(np.ones_like(row.tokens_T))
        optimizer.zero_grad()
        logits = model(tokens, attention_mask=attention).logits.float()
        log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        old = log_probs.detach()
        weights = (old - mu).exp().clamp(settings.weight.low, settings.weight.high)
        ratio = (log_probs - old).exp()
        surrogate = torch.minimum(
            ratio * advantages, ratio.clamp(1 - settings.clip.low, 1 + settings.clip.high) * advantages
        )
        loss = -(weights * surrogate * mask).sum() / batch.num_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def compare(name: str, *, rounds: int = ROUNDS, device: str = "cpu") -> dict[str, float]:
    """Return median and minimum seconds of both, and the ratio of the medians; the first losses must agree."""
    shape = SHAPES[name]
    batch = make_batch(**{key: shape[key] for key in ("sequences", "prompt", "response", "vocab")})
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), layers=shape["layers"], hidden=shape["hidden"], vocab=shape["vocab"])
        steps = {"ours": our_step(Path(directory), batch, device), "plain": plain_step(Path(directory), batch, device)}
    first = {kind: step() for kind, step in steps.items()}
    assert abs(first["ours"] - first["plain"]) < 1e-5, first
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, step in steps.items():
            began = time.perf_counter()
            step()
            times[kind].append(time.perf_counter() - began)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    best = {kind: min(values) for kind, values in times.items()}
    return {
        "ours_ms": median["ours"] * 1e3,
        "plain_ms": median["plain"] * 1e3,
        "ratio": median["ours"] / median["plain"],
        "ratio_of_minima": best["ours"] / best["plain"],
    }


def against(other: Path, name: str, *, rounds: int = ROUNDS) -> dict[str, float]:
    """Return processor time of a step of this checkout and of another, and the median of the ratios of steps beside
    each other.
    """
    shape = SHAPES[name]
    batch = json.dumps({key: shape[key] for key in ("sequences", "prompt", "response", "vocab")})
    trees = {"ours": Path(__file__).resolve().parents[2], "other": other.resolve()}
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as links:
        make_model(Path(directory), layers=shape["layers"], hidden=shape["hidden"], vocab=shape["vocab"])
        children = {}
        for kind, tree in trees.items():
            (Path(links) / kind).mkdir()
            (Path(links) / kind / "tidemill").symlink_to(tree)  # before the editable installation of this checkout
            environment = os.environ | {"PYTHONPATH": f"{Path(links) / kind}{os.pathsep}{tree}"}
            command = [sys.executable, "-c", STEPS, directory, batch, str(Path(__file__).resolve()), str(tree)]
            children[kind] = subprocess.Popen(
                command, cwd=links, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        try:
            taken = [{kind: _step_of(child) for kind, child in children.items()} for _ in range(rounds + 1)]
        finally:
            for child in children.values():
                assert child.stdin is not None
                child.stdin.close()
                child.wait()
    first, *taken = taken
    assert abs(first["ours"][1] - first["other"][1]) < 1e-5, first
    times = {kind: [step[kind][0] for step in taken] for kind in trees}
    return {f"{kind}_ms": statistics.median(values) * 1e3 for kind, values in times.items()} | {
        "ratio": statistics.median(a / b for a, b in zip(*times.values(), strict=True)),
        "ratio_of_minima": min(times["ours"]) / min(times["other"]),
    }


def prompts(name: str, *, rounds: int) -> dict[str, float]:
    """Return the median processor time of a step with whole sequences, in seconds, and those of the others to it."""
    from tidemill.learner.batch.shared_prompts import packings, repacked
    from tidemill.learner.trainer.trainer import Trainer

    class Whole(Trainer):
        """A trainer that computes every sequence whole."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self._obstacle = "the other side of the comparison"

    layers, in_row, shape = SMOLLM[name]
    batch, none_N = make_batch(**shape), np.zeros(shape["sequences"], np.bool_)
    [[parts]] = packings(batch, none_N)
    rows = [parts[start : start + in_row] for start in range(0, len(parts), in_row)]
    batch = replace(repacked(batch, [rows], [len(rows)], pad_to=1), step=3)  # the first two steps are complete
    equal = replace(batch, rewards_N=np.where(batch.groups_N == 0, np.float32(1), batch.rewards_N))
    with tempfile.TemporaryDirectory() as directory:
        make_smollm(Path(directory), layers)
        arguments = trainer_parts(Path(directory), "cpu", dtype="float32", kernels=None)
    whole, shared = (kind(*arguments, AlgorithmConfig(), max_lag=2) for kind in (Whole, Trainer))
    steps = {"whole": (whole, batch), "shared": (shared, batch), "half_zero": (whole, equal), "both": (shared, equal)}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, (trainer, its_batch) in steps.items():
            began = time.process_time()
            trainer.train(its_batch)
            times[kind].append(time.process_time() - began)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    return {"whole_s": median["whole"]} | {kind: value / median["whole"] for kind, value in median.items()}


def adapters(name: str, rank: int, *, rounds: int) -> dict[str, float]:
    """Return the median processor time of a step with all weights, in seconds, and that with adapters to it."""
    from tidemill.learner.trainer.trainer import Trainer

    layers, _, shape = SMOLLM[name]
    kinds = (("all", 0), ("lora", rank))
    batch = make_batch(**shape)
    with tempfile.TemporaryDirectory() as directory:
        make_smollm(Path(directory), layers)
        parts = {
            kind: trainer_parts(Path(directory), "cpu", dtype="float32", kernels=None, lora=lora)
            for kind, lora in kinds
        }
    trainers = {kind: Trainer(*arguments, AlgorithmConfig(), max_lag=2) for kind, arguments in parts.items()}
    first = {kind: trainer.train(batch)["train/loss"] for kind, trainer in trainers.items()}
    assert first["all"] == first["lora"], first  # new adapters are 0
    times: dict[str, list[float]] = {kind: [] for kind in trainers}
    for _ in range(rounds):
        for kind, trainer in trainers.items():
            began = time.process_time()
            trainer.train(batch)
            times[kind].append(time.process_time() - began)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    return {"all_s": median["all"], "ratio": median["lora"] / median["all"]}


def _step_of(child: Any) -> tuple[float, float]:
    """Return processor time in seconds and loss of a child's next step."""
    child.stdin.write("step\n")
    child.stdin.flush()
    seconds, loss = child.stdout.readline().split()
    return float(seconds), float(loss)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench learner_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--against", type=Path, metavar="DIRECTORY", help="another checkout, whose trainer is compared with"
    )
    parser.add_argument("--prompts", action="store_true", help="prompts computed once, and groups without gradient")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="a step of adapters of this rank")
    parser.add_argument("--backends", action="store_true", help="FSDP2, Megatron and plain transformers in turn")
    parser.add_argument("--families", nargs="*", help="FSDP2: the shares of attention and output layer; none = some")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.backends or args.families is not None:
        from tests.bench.step_backends import compare_backends, compare_families

        if args.backends:
            compare_backends(args.shapes, rounds=args.rounds)
        if args.families is not None:
            compare_families(args.families, rounds=args.rounds)
        return
    if args.prompts or args.lora:
        for name in args.shapes if set(args.shapes) <= set(SMOLLM) else SMOLLM:
            found = adapters(name, args.lora, rounds=args.rounds) if args.lora else prompts(name, rounds=args.rounds)
            print(name, " ".join(f"{key}={value:.2f}" for key, value in found.items()), flush=True)
        return
    for name in args.shapes:
        rounds = args.rounds
        found = (
            against(args.against, name, rounds=rounds)
            if args.against
            else compare(name, rounds=rounds, device=args.device)
        )
        print(name, " ".join(f"{key}={value:.2f}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
