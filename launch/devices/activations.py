"""Bytes of the tensors that a layer keeps for the backward pass, counted one by one, and of logits. Tests compare them
with a real rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.learner.layout.sizes import FUSED_CHUNKS, LOGITS_AT_ONCE
from tidemill.learner.settings.config import RECOMPUTE
from tidemill.learner.settings.optimizer import LoraConfig

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
FLOAT32, TOKEN_ID = 4, 8
NONE, SELECTIVE, FULL = RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The activations of a rank's decoder: dtype, ranks that share the model, recomputation, kernels."""

    dtype: str
    tensor_parallel: int = 1
    recompute: str = NONE
    # True on CUDA: a norm keeps its input and a scale, not the normalised value in float32 as well.
    norm_kernel: bool = False
    # Rotary positions, and the norms of queries and keys, are kernels, with cosines and sines for all layers.
    rotary_kernel: bool = False
    # With adapters a norm, whose weight is frozen, keeps its input alone, and a layer without one keeps no input.
    lora: LoraConfig = field(default_factory=LoraConfig)

    def kept_per_token(self, shape: ModelShape) -> int:
        """Return the bytes that the decoder keeps per token between forward and backward pass, logits excluded."""
        item, hidden = ITEM_BYTES[self.dtype], shape.hidden
        norm = self._norm(hidden) + hidden * item
        # of each layer its input, or all that its backward pass needs
        layers = shape.num_layers * (
            hidden * item if self.recompute == FULL else self._layer(shape) - self.again_per_token(shape)
        )
        # The angles of the rotary positions, or their cosines and sines, once for all
        if self.recompute == FULL or self.rotary_kernel:
            layers += shape.rope.size(shape.head_dim) * FLOAT32
        return layers + TOKEN_ID + (self.tensor_parallel > 1) + norm  # embedding (and its mask), last norm

    def again_per_token(self, shape: ModelShape) -> int:
        """Return the bytes that the backward pass of one layer computes again, per token."""
        if self.recompute == FULL:
            return self._layer(shape)
        return self._mlp(shape) if self.recompute == SELECTIVE else 0

    def _layer(self, shape: ModelShape) -> int:
        item, split, hidden = ITEM_BYTES[self.dtype], self.tensor_parallel, shape.hidden
        heads, kv_heads = shape.num_heads // split, max(1, shape.num_kv_heads // split)
        queries, keys = heads * shape.head_dim, kv_heads * shape.head_dim
        norms = 2 * (self._norm(hidden) + hidden * item) + self._post_norm(shape)
        # Cosines and sines, for queries and for keys
        rotary = 0 if self.rotary_kernel else 4 * shape.rope.size(shape.head_dim) * item
        # the joint projection (of which the values are a view), rotated queries and keys, the output, and the sums of
        # the softmax
        attention = (queries + 2 * keys + queries + keys + queries) * item + heads * FLOAT32
        head_norms = self._head_norms(heads, kv_heads, shape.head_dim) if shape.head_norm else 0
        return norms + rotary + attention + head_norms + self._mlp(shape) + self._adapters(shape)

    def _adapters(self, shape: ModelShape) -> int:
        """Return the bytes per token that a layer keeps for its adapters, less the inputs of layers without any."""
        if not self.lora.rank:
            return 0
        inputs = {("q_proj", "k_proj", "v_proj"): shape.hidden, ("gate_proj", "up_proj"): shape.hidden}
        inputs[("down_proj",)] = shape.intermediate // self.tensor_parallel
        unkept = sum(size for names, size in inputs.items() if not set(names) & set(self.lora.targets))
        return (self.lora.rank * len(self.lora.targets) - unkept) * ITEM_BYTES[self.dtype]

    @property
    def _norm_copies(self) -> int:
        """Number of float32 copies of its input that a norm keeps where it is no kernel."""
        return 1 if self.lora.rank else 2

    def _mlp(self, shape: ModelShape) -> int:
        if shape.experts is not None:
            # the same of each expert of a token, which receives the token and returns its result
            of_expert = 5 * shape.experts.intermediate + 2 * shape.hidden
            return shape.experts.per_token * of_expert * ITEM_BYTES[self.dtype]
        # both halves of the first projection, and the input of the second
        inner = 3 * (shape.intermediate // self.tensor_parallel) * ITEM_BYTES[self.dtype]
        return inner + self._post_norm(shape)

    def _norm(self, size: int) -> int:
        """Return the bytes that a norm keeps per token beside its result."""
        return size * (ITEM_BYTES[self.dtype] if self.norm_kernel else self._norm_copies * FLOAT32) + FLOAT32

    def _post_norm(self, shape: ModelShape) -> int:
        """Return the bytes that a norm behind attention or MLP keeps per token (GLM-4)."""
        return self._norm(shape.hidden) if shape.post_norms else 0

    def _head_norms(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the bytes that the norms of queries and keys keep per token (Qwen3)."""
        scales = (heads + kv_heads) * FLOAT32
        if self.rotary_kernel:  # the input is a view of the joint projection, but of queries in several groups a copy
            return (0 if kv_heads == 1 else heads) * head_dim * ITEM_BYTES[self.dtype] + scales
        if self.norm_kernel or self.dtype != "float32":
            item = ITEM_BYTES[self.dtype] if self.norm_kernel else self._norm_copies * FLOAT32
            return (heads + kv_heads) * head_dim * item + scales
        # the norm's input is a view of the joint projection; of queries in several groups it is a copy
        copied = 0 if kv_heads == 1 else heads
        return (copied + (self._norm_copies - 1) * (heads + kv_heads)) * head_dim * FLOAT32 + scales


def logits_bytes(tokens: int, vocabulary: int, hidden: int, dtype: str, *, fused: bool = False) -> int:
    """Return the maximum bytes of logits and their gradients: all if they are few, else a chunk (``logprobs.py``)."""
    item = ITEM_BYTES[dtype]
    elements = tokens * vocabulary
    if fused:
        at_once = FUSED_CHUNKS * LOGITS_AT_ONCE
        return 2 * elements * item if elements <= at_once else max(tokens, at_once) * item + tokens * hidden * FLOAT32
    if elements <= LOGITS_AT_ONCE:
        return elements * (item + 2 * FLOAT32)
    chunk = max(tokens, LOGITS_AT_ONCE)
    product = 0 if item == FLOAT32 else chunk * item
    return chunk * 2 * FLOAT32 + product + tokens * hidden * FLOAT32
