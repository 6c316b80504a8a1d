"""The learner's model is that of its files: log-probs of packed rows, and weights on every way back. For tests of
families and of bridges.

Knows the learner and, for reference values, transformers; no family.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.learner_steps import make_batches
from tidemill.bus.wire.messages import Sample
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.ranks.conversion import Conversion
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.trainer import Trainer

LogProbs = Callable[[Tensor, float], Tensor]
"""``(tokens, temperature)``: the log-prob of each token but the first, [T - 1]."""


def log_probs_of(model: Any, tokens: Tensor, *, temperature: float) -> Tensor:
    """Return the log-prob of each token but the first, [T - 1], under a model of transformers."""
    with torch.no_grad():
        logits = model(tokens[None]).logits[0] / temperature
    return logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]


def of_transformers(directory: Path) -> LogProbs:
    """Return the log-probs under the model that transformers loads from a directory, in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return lambda tokens, temperature: log_probs_of(model, tokens, temperature=temperature)


def weights_in(directory: Path) -> dict[str, Tensor]:
    """Return all weights in the files of a model directory."""
    return {
        name: weight for file in sorted(directory.glob("*.safetensors")) for name, weight in load_file(file).items()
    }


def vocabulary(directory: Path) -> int:
    """Return the number of tokens that a model knows."""
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


def scored_rows(
    policy: Any,
    samples: Sequence[Sample],
    *,
    max_tokens: int = 1 << 20,
    pad_to: int = 1,
    optimizer: Callable[..., Any] = MegatronOptimizer,
) -> list[tuple[int, Tensor]]:
    """Return (index of the sample, log-probs of its trained tokens under the policy) of every sample, from rows of
    ``max_tokens``. ``optimizer``: class of the policy's backend.
    """
    trainer = Trainer(policy, optimizer(policy, OptimizerConfig(), steps=10), AlgorithmConfig(), max_lag=2)
    batch = make_batches(list(samples), max_tokens=max_tokens, pad_to=pad_to)[0]
    return [
        (int(sample), ours_T[np.flatnonzero((row.sample_T == sample) & row.loss_mask_T)])
        for row, ours_T in zip(batch.micro_batches, trainer.log_probs(batch), strict=True)
        for sample in np.unique(row.sample_T[row.sample_T >= 0])
    ]


def assert_log_probs(
    found: Sequence[tuple[int, Tensor]], samples: Sequence[Sample], wanted: LogProbs, *, tolerance: float = 2e-5
) -> None:
    """Assert that ``scored_rows`` has the log-probs of each sequence alone."""
    assert sorted(number for number, _ in found) == list(range(len(samples)))
    for number, ours_T in found:
        tokens = torch.from_numpy(samples[number].tokens).long()
        theirs_T = wanted(tokens, samples[number].sampling.temperature)[-len(ours_T) :]
        torch.testing.assert_close(ours_T, theirs_T, atol=tolerance, rtol=0)


def assert_weights(found: Mapping[str, Tensor], directory: Path) -> None:
    """Assert that these are the weights of the files under their names, bit for bit; those of fewer bits in the files
    are widened.
    """
    there = weights_in(directory)
    assert found.keys() == there.keys()
    assert [name for name, weight in found.items() if not torch.equal(weight, there[name].to(weight.dtype))] == []


def assert_converts(directory: Path, scratch: Path, here: Any, *, bridge_class: str = "") -> None:
    """Assert that a checkpoint made of the files gives these files again, dtypes included."""
    conversion = Conversion(MegatronBackend(), here, code_path=bridge_class)
    conversion.to_checkpoint(directory, scratch / "checkpoint")
    conversion.to_model(scratch / "checkpoint", scratch / "again", directory)
    again, there = weights_in(scratch / "again"), weights_in(directory)
    assert_weights(again, directory)
    assert {name: weight.dtype for name, weight in again.items()} == {
        name: weight.dtype for name, weight in there.items()
    }
