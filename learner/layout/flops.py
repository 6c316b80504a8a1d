"""Operations of training a model, from the values of its config.json. Knows no torch."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.model_values import num_experts, sparse_layers

PER_PRODUCT = 2
"""Operations of one multiplication and addition."""
PASSES = 3
"""One forward pass, and a backward pass of twice its work: the gradient of the input and that of the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Operations of the forward and backward pass of one model.

    Counted are the matrix products of the layers, the output layer and attention, as the formula needs them: without
    the embedding, norms and activations, without padding, and without recomputation (model FLOPs utilisation, not that
    of the hardware). A causal query has its own and the earlier positions as keys. Of routed experts those of a token
    count. Source: Chowdhery et al. 2022 (PaLM), appendix B: 6 N per token and 12 x layers x heads x head size per pair
    of positions, of which it counts all instead of the causal half.
    """

    per_token: int
    """Operations of the weights, per token."""
    per_pair: int
    """Operations of attention, per query and key."""

    @classmethod
    def of(cls, values: JsonMapping, *, value_head: bool = False) -> "StepFlops":
        """Return the operations for the values of a config.json that the learner can train (``sizes.refusals``).

        ``value_head``: the output layer has one row instead of the vocabulary's.
        """
        hidden, layers = values["hidden_size"], values["num_hidden_layers"]
        projections, pair = _latent_attention(values) if values.get("kv_lora_rank") else _attention(values)
        mlps = sum(
            _experts(values) if sparse else 3 * hidden * values["intermediate_size"] for sparse in sparse_layers(values)
        )
        weights = layers * projections + mlps + hidden * (1 if value_head else values["vocab_size"])
        return cls(per_token=PASSES * PER_PRODUCT * weights, per_pair=PASSES * PER_PRODUCT * layers * pair)

    @classmethod
    def read(cls, model_dir: Path, *, value_head: bool = False) -> "StepFlops":
        """Return the operations for a Hugging Face directory that the learner can train. ``value_head``: as for
        ``of``.
        """
        return cls.of(json.loads((model_dir / "config.json").read_text()), value_head=value_head)

    @property
    def pair_tokens(self) -> int:
        """Number of pairs of tokens whose attention costs as much as the weights for one token."""
        return round(self.per_token / self.per_pair)

    def step(self, lengths: Iterable[int]) -> int:
        """Return the operations of one pass over sequences of ``lengths`` tokens and back."""
        return self.behind((0, length) for length in lengths)

    def behind(self, spans: Iterable[tuple[int, int]]) -> int:
        """Return the same for parts of sequences: (tokens before it in its sequence, its tokens)."""
        return sum(
            length * self.per_token + (before * length + length * (length + 1) // 2) * self.per_pair
            for before, length in spans
        )

    def utilisation(self, lengths: Iterable[int], *, seconds: float, peak: float) -> float:
        """Return the share of ``peak`` operations per second (of all devices together) that a step of ``seconds`` used:
        MFU.
        """
        return self.step(lengths) / (seconds * peak)


def _attention(values: JsonMapping) -> tuple[int, int]:
    """Return the weights of a layer's attention, and the products of a query with a key and of its share with a
    value.
    """
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    head = values.get("head_dim") or hidden // heads
    return hidden * (heads + 2 * kv_heads) * head + heads * head * hidden, 2 * heads * head


def _latent_attention(values: JsonMapping) -> tuple[int, int]:
    """Return the same two numbers for queries, keys and values from latents (DeepSeek-V3)."""
    hidden, heads, rotary, value = (
        values[name] for name in ("hidden_size", "num_attention_heads", "qk_rope_head_dim", "v_head_dim")
    )
    query, latent, rank = values["qk_nope_head_dim"] + rotary, values["kv_lora_rank"], values.get("q_lora_rank")
    queries = rank * (hidden + heads * query) if rank else hidden * heads * query
    keys = hidden * (latent + rotary) + latent * heads * (values["qk_nope_head_dim"] + value)
    return queries + keys + heads * value * hidden, heads * (query + value)


def _experts(values: JsonMapping) -> int:
    """Return the weights that a token passes in a layer with experts: the router, its own experts, and shared ones."""
    hidden = values["hidden_size"]
    inner = values.get("moe_intermediate_size") or values["intermediate_size"]
    shared = values.get("shared_expert_intermediate_size") or inner * (values.get("n_shared_experts") or 0)
    return hidden * num_experts(values) + 3 * hidden * (inner * values["num_experts_per_tok"] + shared)
