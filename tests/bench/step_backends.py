"""A step on FSDP2 over transformers: against Megatron and plain transformers, and its parts by family.

``--backends``: the same step on FSDP2, on Megatron, and in plain transformers with torch's AdamW (padded, without
diagnostics). ``--families NAME ...``: models of ``tests.families`` at a larger size, against plain transformers, with
the shares of the processor time in attention (also layers that carry a state) and in the output layer with the loss,
forward and backward. Processor time, in turn, medians.
"""

import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.bench.learner_step import SHAPES, SMOLLM, make_batch, make_model, make_smollm, plain_step, trainer_parts
from tests.families import FAMILIES, KINDS, write_family
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.trainer.trainer import Trainer

SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8192}
BOUND_SIZES = {"vocab_size_per_layer_input": SIZES["vocab_size"], "mamba_d_head": 2 * SIZES["hidden_size"] // 8}
"""Sizes that follow from the others in the families that have them; 8 heads, twice as wide as the hidden states."""
BATCH = {"sequences": 16, "prompt": 60, "response": 24, "vocab": SIZES["vocab_size"]}
ATTENTION = re.compile("Attention|DeltaNet|Mamba|Conv|Mixer|Linear.*Attn")
"""Classes of the modules that read other tokens."""


def in_turn(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median processor time of each step, in seconds."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, step in steps.items():
            began_s = time.process_time()
            step()
            times[kind].append(time.process_time() - began_s)
    return {kind: statistics.median(values) for kind, values in times.items()}


def compare_backends(shapes: Sequence[str], *, rounds: int) -> None:
    """Print the ratios of a step between the backends and plain transformers, for each shape."""
    for name in (*shapes, "prompt 60, response 24") if list(shapes) == list(SHAPES) else shapes:
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory)
            if name in SMOLLM:
                layers, _, batch_shape = SMOLLM[name]
                make_smollm(model, layers)
            else:
                shape = SHAPES[name]
                batch_shape = {key: shape[key] for key in ("sequences", "prompt", "response", "vocab")}
                make_model(model, layers=shape["layers"], hidden=shape["hidden"], vocab=shape["vocab"])
            batch = make_batch(**batch_shape)
            trainers = {kind: trainer(model, fsdp=kind == "fsdp") for kind in ("megatron", "fsdp")}
            steps: dict[str, Callable[[], float]] = {kind: partial(loss_of, trainers[kind], batch) for kind in trainers}
            steps["plain"] = plain_step(model, batch, "cpu")
        first = {kind: step() for kind, step in steps.items()}
        assert max(first.values()) - min(first.values()) < 1e-5, first
        median = in_turn(steps, rounds)
        pairs = (("fsdp", "megatron"), ("megatron", "plain"), ("fsdp", "plain"))
        ratios = " ".join(f"{ours}/{other}={median[ours] / median[other]:.3f}" for ours, other in pairs)
        print(f"{name}: megatron_s={median['megatron']:.3f} {ratios}", flush=True)


def trainer(directory: Path, *, fsdp: bool) -> Trainer:
    parts = trainer_parts(directory, "cpu", dtype="float32", kernels=None, fsdp=fsdp)
    return Trainer(*parts, AlgorithmConfig(), max_lag=2)


def loss_of(trained: Trainer, batch: StepBatch) -> float:
    return trained.train(batch)["train/loss"]


def compare_families(names: Sequence[str], *, rounds: int) -> None:
    """Print a family's step against plain transformers, and the shares of attention and of the output layer."""
    for name in names or KINDS:
        batch = make_batch(**BATCH)
        with tempfile.TemporaryDirectory() as directory:
            bound = {key: value for key, value in BOUND_SIZES.items() if key in FAMILIES[name][1]}
            write_family(Path(directory), name, **SIZES, **bound)
            policy, optimizer = trainer_parts(Path(directory), "cpu", dtype="float32", kernels=None, fsdp=True)
            plain = plain_step(Path(directory), batch, "cpu")
        ours = Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2)
        steps = {"fsdp": partial(loss_of, ours, batch), "plain": plain}
        in_turn(steps, 1)
        median = in_turn(steps, rounds)
        spent_s = Counter[str]()
        watch(policy.root, spent_s)
        began_s = time.process_time()
        for _ in range(rounds):
            ours.train(batch)
        whole_s = time.process_time() - began_s
        shares = " ".join(f"{part}={spent_s[part] / whole_s:.3f}" for part in ("attention", "output"))
        ratio = median["fsdp"] / median["plain"]
        print(f"{name}: fsdp_s={median['fsdp']:.3f} fsdp/plain={ratio:.3f} {shares}", flush=True)


def watch(root: Any, spent_s: Counter[str]) -> None:
    """Add the processor time of a model's attention and of its output layer with the loss to ``spent_s``."""
    began_s: dict[str, float] = {}

    def begin(part: str) -> None:
        began_s[part] = time.process_time()

    def end(part: str) -> None:
        spent_s[part] += time.process_time() - began_s.pop(part)

    def follow(part: str, states: Tensor, result: Tensor) -> None:
        # Hooks of tensors: those of modules do not see inputs that are given by name. The backward pass of a part
        # begins with the gradient of its result, and ends with that of the states that it alone reads.
        if states.requires_grad and result.requires_grad:
            result.register_hook(lambda _: begin(part))
            states.register_hook(lambda _: end(part))

    def attended(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        end("attention")
        states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        follow("attention", states, output[0] if isinstance(output, tuple) else output)

    for layer in root.modules():
        if ATTENTION.search(type(layer).__name__) and not ATTENTION.search(type(parent_of(root, layer)).__name__):
            layer.register_forward_pre_hook(lambda *_: begin("attention"))
            layer.register_forward_hook(attended, with_kwargs=True)
    compute = root.forward

    def forward(tokens_T: Tensor, packed: Any, finish: Callable[[Tensor], Any]) -> Any:
        def timed(hidden_TH: Tensor) -> Any:
            begin("output")
            result = finish(hidden_TH)
            end("output")
            follow("output", hidden_TH, result[0])
            return result

        return compute(tokens_T, packed, timed)

    root.forward = forward


def parent_of(root: Any, module: Any) -> Any:
    """Return the module that has ``module`` as a child."""
    return next(parent for parent in root.modules() if any(child is module for child in parent.children()))
