"""Floating-point operations of a training step, counted from a model's config.json and the lengths of its sequences. No torch."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PER_PRODUCT = 2
"""Operations of one multiplication and addition."""
PASSES = 3
"""One forward pass, and a backward pass of twice its work: the gradient of the input and that of the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Operations of the forward and backward pass of one model.

    Counted are the matrix products of the layers, the output layer and attention, as the formula needs them: without the embedding,
    norms and activations, without padding, and without what recomputation adds (model FLOPs utilisation, not that of the hardware).
    A causal query has its own and the earlier positions as keys. Source: Chowdhery et al. 2022 (PaLM), appendix B: 6 N per token and
    12 x layers x heads x head size per pair of positions, of which it counts all instead of the causal half.
    """

    per_token: int
    """Operations of the weights, per token."""
    per_pair: int
    """Operations of attention, per query and key."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "StepFlops":
        """Return the operations for the values of a config.json that the learner can train (``sizes.refusals``)."""
        hidden, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
        kv_heads = values.get("num_key_value_heads") or heads
        head = values.get("head_dim") or hidden // heads
        projections = hidden * (heads + 2 * kv_heads) * head + heads * head * hidden
        layer = projections + 3 * hidden * values["intermediate_size"]
        weights = layers * layer + hidden * values["vocab_size"]
        # the product of a query with a key, and that of its weight with a value
        pairs = layers * 2 * heads * head
        return cls(per_token=PASSES * PER_PRODUCT * weights, per_pair=PASSES * PER_PRODUCT * pairs)

    @classmethod
    def read(cls, model_dir: Path) -> "StepFlops":
        """Return the operations for a Hugging Face directory that the learner can train."""
        return cls.of(json.loads((model_dir / "config.json").read_text()))

    def step(self, lengths: Iterable[int]) -> int:
        """Return the operations of one pass over sequences of ``lengths`` tokens and back."""
        return sum(length * self.per_token + length * (length + 1) // 2 * self.per_pair for length in lengths)

    def utilisation(self, lengths: Iterable[int], *, seconds: float, peak: float) -> float:
        """Return the share of ``peak`` operations per second (of all devices together) that a step of ``seconds`` used: MFU."""
        return self.step(lengths) / (seconds * peak)
