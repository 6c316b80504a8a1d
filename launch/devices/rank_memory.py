"""Contents of the memory of one rank under Megatron: elements of weights, gradients and the state of its optimizer, and
bytes of the tensors that a layer keeps for the backward pass, counted one by one, and of logits. Pure; tests compare
them with a real rank.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.launch.devices.shapes import Shapes, is_whole, stages_of
from tidemill.learner.layout.sizes import FUSED_CHUNKS, LOGITS_AT_ONCE
from tidemill.learner.settings.config import RECOMPUTE, LearnerConfig
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.settings.optimizer import MUON

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
FLOAT32, TOKEN_ID = 4, 8
NONE, SELECTIVE, FULL = RECOMPUTE
ADAM, SGD = "adam", "sgd"
VALUE_HEAD = "lm_head.value"  # Name of a critic's value head here: in the last stage, where the output projection is
_EXPERTS = ".experts."  # In the names of the weights of routed experts, and of no other
_NOT_BY_MUON = ("embed", "lm_head", "bias")
"""In names of tensors that AdamW updates in Muon's place."""


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
        # the joint projection (the values are a view of it), rotated queries and keys, the output, and the sums of
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


class Moments(NamedTuple):
    """Tensors that an optimizer keeps beside the weights."""

    words: str
    elements: int


def moments_of(name: str, tensors: Shapes, count: Callable[[Shapes], int]) -> Moments:
    """Return the moments of an optimizer for trained tensors. ``count``: the elements of tensors on a rank."""
    if name == SGD:
        return Moments("SGD: momentum", count(tensors))
    if name != MUON:
        return Moments("Adam: two moments", 2 * count(tensors))
    matrices = {
        name: shape
        for name, shape in tensors.items()
        if (len(shape) == 2 or ".experts." in name) and not any(part in name for part in _NOT_BY_MUON)
    }
    words = "Muon: momentum of matrices, Adam's two moments of others"
    return Moments(words, 2 * count(tensors) - count(matrices))


@dataclass(frozen=True, slots=True)
class RankElements:
    """Numbers of elements of one rank."""

    own: int
    trained: int  # Elements with a gradient, adapters included
    share: int  # Elements with their optimizer state on this rank
    experts: bool  # True where experts are trained
    moments: Moments

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of the optimizer's state: its moments, and main weights for other dtypes than float32."""
        return FLOAT32 * (self.moments.elements + (0 if dtype == "float32" else self.share))


def elements_of(
    stage: Shapes, learner: LearnerConfig, trained: Shapes | None = None, *, by_adam: bool = False
) -> RankElements:
    """Return one rank's elements of its stage, padded for a distributed optimizer; ``trained``: None = all.

    ``by_adam``: as for a critic, whatever the policy's optimizer is.
    """
    ours = stage if trained is None else trained
    total, share = _with_share(ours, learner)
    frozen = rank_elements(
        {name: tensor for name, tensor in stage.items() if name not in ours},
        learner.tensor_parallel,
        learner.expert_parallel,
    )
    moments = moments_of(
        ADAM if by_adam else learner.optimizer.name, ours, lambda tensors: _with_share(tensors, learner)[1]
    )
    experts = any(_EXPERTS in name for name in ours)
    return RankElements(own=frozen + total, trained=total, share=share, experts=experts, moments=moments)


def _with_share(tensors: Shapes, learner: LearnerConfig) -> tuple[int, int]:
    """Return the number of elements of a rank's trained tensors, and the number whose optimizer state it keeps."""
    split, spread, sharded = learner.tensor_parallel, learner.expert_parallel, num_shares(learner) > 1
    total = share = 0
    experts = {name: tensor for name, tensor in tensors.items() if _EXPERTS in name}
    shared = {name: tensor for name, tensor in tensors.items() if _EXPERTS not in name}
    for part, shares in ((shared, num_shares(learner)), (experts, num_expert_shares(learner))):
        mine = buffer_elements(part, split, shares, spread) if sharded else rank_elements(part, split, spread)
        total, share = total + mine, share - (-mine // shares)
    return total, share


def num_shares(learner: LearnerConfig) -> int:
    """Return the number of copies of the model over which the optimizer's state is divided."""
    return learner.data_parallel * learner.context_parallel if learner.distributed_optimizer else 1


def num_expert_shares(learner: LearnerConfig) -> int:
    """Return the number of copies of each expert over which its optimizer's state is divided."""
    return num_shares(learner) * learner.tensor_parallel // learner.expert_parallel if num_shares(learner) > 1 else 1


def model_stages(tensors: Shapes, learner: LearnerConfig) -> Sequence[Shapes]:
    """Return the tensors of each stage of the pipeline."""
    return stages_of(tensors, learner.pipeline_parallel, learner.virtual_pipeline, edge_layers=learner.edge_layers)


def largest_stage(tensors: Shapes, learner: LearnerConfig) -> Shapes:
    """Return the tensors of the stage whose ranks have the most elements."""
    split = learner.tensor_parallel, learner.expert_parallel
    return max(model_stages(tensors, learner), key=lambda stage: rank_elements(stage, *split))


def rank_elements(tensors: Shapes, tensor_parallel: int, expert_parallel: int = 1) -> int:
    """Return the number of elements that one rank has of these tensors."""
    return sum(
        math.prod(tensor) // split_of(name, tensor_parallel, expert_parallel) for name, tensor in tensors.items()
    )


def buffer_elements(tensors: Shapes, tensor_parallel: int, shares: int, expert_parallel: int = 1) -> int:
    """Return the elements of a rank's buffer of trained weights, or of gradients, with a distributed optimizer.

    Experts have a buffer of their own.

    Megatron begins each parameter at a multiple of 64 elements and ends a bucket at one of 128 and of the number of
    shares (``_ParamAndGradBuffer``, megatron-core 0.16). With overlap there are several buckets, and their ends add
    some KB.
    """
    joint: dict[str, int] = defaultdict(int)
    for name, tensor in tensors.items():
        # Megatron has one parameter for queries, keys and values, and one for both halves of a gated MLP. Adapters have
        # their own.
        place = name
        if ".lora_" not in name:
            place = re.sub(r"\b(gate|up)_proj\b", "fc1", re.sub(r"\b[qkv]_proj\b", "qkv", name))
        joint[place] += math.prod(tensor) // split_of(name, tensor_parallel)
    divisor = math.lcm(shares, 128)
    aligned = sum(-(-elements // 64) * 64 // split_of(name, 1, expert_parallel) for name, elements in joint.items())
    return -(-aligned // divisor) * divisor


def split_of(name: str, tensor_parallel: int, expert_parallel: int = 1) -> int:
    """Return the number of ranks over which a tensor is split: 1 for norms, routers, a value head, some biases."""
    if _EXPERTS in name:
        return expert_parallel
    is_unsplit = is_whole(name) or "norm" in name or name == VALUE_HEAD
    return 1 if is_unsplit or name.endswith(("o_proj.bias", "down_proj.bias", ".gate.weight")) else tensor_parallel
