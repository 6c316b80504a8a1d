"""Memory that each process of a run needs, in bytes, from the model's sizes and the configuration. Pure: reads nothing,
loads no torch.

The tensors of a rank are counted as Megatron's classes allocate them here, and the tensors that a layer keeps for the
backward pass one by one (``_layer_bytes``); tests compare both with a real rank. Memory of libraries (CUDA context,
NCCL, cuBLAS, fragmentation of the allocator: some GB together) is not in the table; of a rank on the CPU it is.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from tidemill.actors.serving.builtin.blocks import BLOCK, block_bytes, budget
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.launch.devices.shapes import Shapes, is_whole, stages_of, trained_tensors
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.layout.sizes import FUSED_CHUNKS, LOGITS_AT_ONCE, OFFLOADED_AT_ONCE, Dealt, num_senders
from tidemill.learner.settings.config import RECOMPUTE, LearnerConfig
from tidemill.learner.settings.lora import LoraConfig

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
FLOAT32, TOKEN_ID = 4, 8
AUTO = "auto"
NONE, SELECTIVE, FULL = RECOMPUTE
VALUE_HEAD = "lm_head.value"  # Name of a critic's value head here: in the last stage, where the output projection is
_EXPERTS = ".experts."  # In the names of the weights of routed experts, and of no other
# Copies of the weights that a rank sends: the head, and the one being filled (`transport/staging.py`).
STAGED_COPIES = 2
SENDER = "rank that sends weights, besides"
# Memory of a rank's Python, torch and Megatron on the CPU before it has a model (torch 2.13, megatron-core 0.16).
LIBRARY_BYTES = 420_000_000
# A process's CUDA context on its device, about; not measured (`docs/decisions/023-nccl-in-a-process-of-its-own.md`).
CONTEXT_BYTES = 500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One line of the table."""

    process: str
    """rank | rank that sends weights, besides | engine."""
    part: str
    bytes: int
    on_host: bool = False
    """True for memory of the host even where the process computes on an accelerator."""


def memory_rows(
    shape: ModelShape, config: RunConfig, *, cuda: bool, critic: ModelShape | None = None, engine_memory: int = 0
) -> tuple[MemoryRow, ...]:
    """Return the rows of one rank and of one built-in engine; ``cuda``: they compute on an accelerator.

    ``critic``: the model in ``learner.critic.path``; None = the policy's. ``engine_memory``: bytes of an engine's
    device; 0 = not known. A packed row has
    ``learner.max_tokens_per_micro_batch`` tokens, or as many as the longest sample if that has more.
    """
    learner, engine = (dtype_on(setting, cuda=cuda) for setting in (config.learner.dtype, config.engine.dtype))
    tokens = -(-row_tokens(shape, config) // config.learner.context_parallel)
    libraries = MemoryRow(process="rank", part="Python, torch and Megatron, about", bytes=LIBRARY_BYTES)
    return (
        *_state(shape.tensors(), valued(critic or shape).tensors(), config, learner, cuda=cuda),
        *_activations(tokens, shape, critic or shape, config.learner, learner, cuda=cuda),
        *(() if cuda else (libraries,)),
        *_sending(shape.tensors(), config, learner, cuda=cuda),
        *_engine(shape, config, engine, engine_memory),
    )


def state_rows(
    tensors: Shapes, config: RunConfig, *, cuda: bool, critic: Shapes | None = None
) -> tuple[MemoryRow, ...]:
    """Return the rows of one rank by the model's tensors, without activations and logits: for other families.

    ``critic``: the tensors of the critic's model; None = as many as the policy's. Sizes are as in ``training_bytes``: a
    matrix that a family keeps whole on every tensor-parallel rank counts as split.
    """
    dtype = dtype_on(config.learner.dtype, cuda=cuda)
    whose = tensors if critic is None else critic
    return (*_state(tensors, whose, config, dtype, cuda=cuda), *_sending(tensors, config, dtype, cuda=cuda))


def dtype_on(setting: str, *, cuda: bool) -> str:
    """Return the dtype that ``learner.dtype`` or ``engine.dtype`` means on an accelerator or on the CPU."""
    if setting != AUTO:
        return setting
    return "bfloat16" if cuda else "float32"


def training_bytes(
    tensors: Shapes, dtype: str, learner: LearnerConfig, *, cuda: bool, critic: Shapes | None = None
) -> int:
    """Return the bytes of weights, gradients and Adam's state of a rank; ``critic``: None = as large as the policy."""
    stage = _largest_stage(tensors, learner)
    rows = [*_model(_elements(stage, learner, trained_tensors(stage, learner)), learner, dtype, cuda=cuda)]
    if learner.algorithm.by_critic:
        rows += _model(
            _elements(_largest_stage(tensors if critic is None else critic, learner), learner),
            learner,
            dtype,
            cuda=cuda,
        )
    return sum(row.bytes for row in rows if not row.on_host)


def num_shares(learner: LearnerConfig) -> int:
    """Return the number of copies of the model over which the optimizer's state is divided."""
    return learner.data_parallel * learner.context_parallel if learner.distributed_optimizer else 1


def num_expert_shares(learner: LearnerConfig) -> int:
    """Return the number of copies of each expert over which its optimizer's state is divided."""
    return num_shares(learner) * learner.tensor_parallel // learner.expert_parallel if num_shares(learner) > 1 else 1


def _state(tensors: Shapes, critic: Shapes, config: RunConfig, dtype: str, *, cuda: bool) -> Iterable[MemoryRow]:
    """Yield the rows of weights, gradients and Adam's state of a rank, and of its copies of them."""
    learner, item, split = config.learner, ITEM_BYTES[dtype], config.learner.tensor_parallel
    stage = _largest_stage(tensors, learner)
    ours_of = trained_tensors(stage, learner)
    policys, critics = _elements(stage, learner, ours_of), _elements(_largest_stage(critic, learner), learner)
    num_weights, ours, its = policys.own, policys.trained, critics.own
    yield from _model(policys, learner, dtype, cuda=cuda, adapters=bool(learner.lora.rank))
    if learner.algorithm.by_critic:
        yield from _model(critics, learner, dtype, cuda=cuda, prefix="critic: ")
    moving = FLOAT32 if learner.algorithm.kl.reference_ema else item
    # With adapters, the model without them is the reference, and its weights are not copied.
    outer = {name: tensor for name, tensor in ours_of.items() if name.endswith(".lora_B")}
    reference = num_weights if not learner.lora.rank or learner.algorithm.kl.reference else rank_elements(outer, split)
    saved = ours if learner.lora.rank else num_weights
    copies = [
        *([("reference model", moving * reference)] if learner.algorithm.needs_reference else []),
        *([("weights of the last version", item * saved)] if config.weights.push_every > 1 else []),
    ]
    if copies and cuda:
        away = max(
            num_weights if part.startswith("reference") and reference == num_weights else saved for part, _ in copies
        )
        copies.append(("own weights, while one of the other two is in their place", item * away))
    for part, num_bytes in copies:
        yield MemoryRow(process="rank", part=part, bytes=num_bytes, on_host=cuda)
    if learner.checkpoint.background:
        # Each tensor is copied by one of the replicas that have it, so another rank may have less.
        weights = item * saved * (2 if config.weights.push_every > 1 else 1) + (
            moving * num_weights if learner.algorithm.kl.moves else 0
        )
        state = optimizer_bytes(policys.share, dtype)
        if learner.algorithm.by_critic:
            weights, state = weights + item * its, state + optimizer_bytes(critics.share, dtype)
        yield MemoryRow(
            process="rank",
            part="copy of weights and Adam's state, for checkpoints, at most",
            bytes=weights + state,
            on_host=cuda,
        )


def _sending(tensors: Shapes, config: RunConfig, dtype: str, *, cuda: bool) -> Iterable[MemoryRow]:
    yield MemoryRow(
        process=SENDER,
        part=f"{STAGED_COPIES} copies of its part of the weights, for pushes",
        bytes=staged_bytes(tensors, config, dtype),
        on_host=config.weights.staging != "cuda",
    )
    if cuda:
        yield from _groups(tensors, config, dtype)


def group_bytes(largest_tensor: int, config: RunConfig, dtype: str) -> int:
    """Return the device memory of a sender to one group over NCCL: a CUDA context and two buckets."""
    return CONTEXT_BYTES + 2 * max(config.weights.bucket_size(on_gpu=True), ITEM_BYTES[dtype] * largest_tensor)


def _groups(tensors: Shapes, config: RunConfig, dtype: str) -> Iterable[MemoryRow]:
    """Yield the row of processes that send over NCCL, where settings allow it: GPUs and versions are not known."""
    weights, learner = config.weights, config.learner
    if weights.backend == "gloo" or weights.transport == "handles" or learner.colocated or learner.device == "cpu":
        return
    count = -(-max(1, config.up.engines) // weights.engines_together)
    largest = max(map(math.prod, tensors.values()), default=0)
    part = (
        f"processes of {count} group(s) of engines over NCCL, with a CUDA context and two buckets each, if "
        "weights go over it"
    )
    yield MemoryRow(process=SENDER, part=part, bytes=count * group_bytes(largest, config, dtype))


def staged_bytes(tensors: Shapes, config: RunConfig, dtype: str) -> int:
    """Return the bytes of the copies of the rank that sends the largest part of the weights. ``dtype``: theirs."""
    ours = config.learner
    senders = num_senders(ours.tensor_parallel, ours.expert_parallel, config.weights.senders_per_stage)
    parts: dict[tuple[int, int], int] = defaultdict(int)
    sent: set[str] = set()
    for stage, of_stage in enumerate(
        stages_of(tensors, ours.pipeline_parallel, ours.virtual_pipeline, edge_layers=ours.edge_layers)
    ):
        dealt = Dealt(senders)
        # A tied embedding is in two stages, and is sent by the first
        for name in [name for name in of_stage if name not in sent]:
            parts[stage, dealt.sender(name)] += math.prod(of_stage[name])
        sent |= of_stage.keys()
    return STAGED_COPIES * ITEM_BYTES[dtype] * max(parts.values(), default=0)


def _activations(
    tokens: int, shape: ModelShape, critic: ModelShape, learner: LearnerConfig, dtype: str, *, cuda: bool
) -> Iterable[MemoryRow]:
    """Yield the rows of the tensors that a rank keeps and computes for ``tokens`` tokens of a packed row."""
    split = learner.tensor_parallel
    rotary = cuda and learner.fused_rotary != "never"
    activations = Activations(
        dtype=dtype,
        tensor_parallel=split,
        recompute=learner.recompute,
        norm_kernel=cuda,
        rotary_kernel=rotary,
        lora=learner.lora,
    )
    # The first stage of a pipeline keeps as many rows as there are stages, each in its share of the layers.
    kept = f"kept for the backward pass of {tokens:,} tokens"
    trained = [shape, *([critic] if learner.algorithm.by_critic else [])]  # in turn, so the larger one counts
    yield MemoryRow(
        process="rank", part=f"activations {kept}", bytes=tokens * max(map(activations.kept_per_token, trained))
    )
    if learner.recompute != NONE:
        again = max(map(activations.again_per_token, trained))
        yield MemoryRow(process="rank", part="activations of one layer, computed again", bytes=tokens * again)
    if shape.experts is not None and learner.grouped_experts != "never" and (dtype == "bfloat16" or not cuda):
        weights = 2 * shape.hidden * shape.experts.intermediate * (shape.experts.count // learner.expert_parallel)
        yield MemoryRow(
            process="rank",
            part="experts of one layer, side by side, and their gradient",
            bytes=2 * weights * ITEM_BYTES[dtype],
        )
    yield MemoryRow(
        process="rank",
        part=f"logits of {tokens:,} tokens, at once",
        bytes=logits_bytes(
            tokens, shape.vocab_size // split, shape.hidden, dtype, fused=cuda and learner.fused_log_probs != "never"
        ),
    )
    if _overlapped(learner, cuda=cuda) and not (shape.tied and learner.pipeline_parallel == 1):
        weight = shape.vocab_size // split * shape.hidden * ITEM_BYTES[dtype]
        yield MemoryRow(
            process="rank",
            part="gradient of the output weight, without values, for the overlapped reduction",
            bytes=weight,
        )


def _overlapped(learner: LearnerConfig, *, cuda: bool) -> bool:
    """Return whether gradients are reduced during the backward pass (``choose_replicas``)."""
    auto = cuda and learner.virtual_pipeline == 1
    several = learner.data_parallel * learner.context_parallel > 1
    return several and {"auto": auto, "always": True}.get(learner.overlap_grad_reduce, False)


@dataclass(frozen=True, slots=True)
class _Elements:
    """Numbers of elements of one rank."""

    own: int
    trained: int
    """Elements with a gradient, adapters included."""
    share: int
    """Elements with their optimizer state on this rank."""
    experts: bool
    """True where experts are trained."""


def _elements(stage: Shapes, learner: LearnerConfig, trained: Shapes | None = None) -> _Elements:
    """Return one rank's elements of its stage, padded for a distributed optimizer; ``trained``: None = all."""
    split, spread, ours = learner.tensor_parallel, learner.expert_parallel, stage if trained is None else trained
    total = share = 0
    experts = {name: tensor for name, tensor in ours.items() if _EXPERTS in name}
    shared = {name: tensor for name, tensor in ours.items() if _EXPERTS not in name}
    for tensors, shares in ((shared, num_shares(learner)), (experts, num_expert_shares(learner))):
        sharded = num_shares(learner) > 1
        mine = buffer_elements(tensors, split, shares, spread) if sharded else rank_elements(tensors, split, spread)
        total, share = total + mine, share - (-mine // shares)
    frozen = rank_elements({name: tensor for name, tensor in stage.items() if name not in ours}, split, spread)
    return _Elements(own=frozen + total, trained=total, share=share, experts=bool(experts))


def _model(
    elements: _Elements, learner: LearnerConfig, dtype: str, *, cuda: bool, adapters: bool = False, prefix: str = ""
) -> Iterable[MemoryRow]:
    """Yield the rows of a model that is trained, or a part of it: weights, gradients, Adam's state."""
    among = ", adapters among them" if adapters else ""
    yield MemoryRow(process="rank", part=f"{prefix}weights{among}", bytes=ITEM_BYTES[dtype] * elements.own)
    yield MemoryRow(process="rank", part=f"{prefix}gradients, float32", bytes=FLOAT32 * elements.trained)
    divided = f", 1/{num_shares(learner)} of them" if num_shares(learner) > 1 else ""
    if divided and elements.experts:
        divided += f" and 1/{num_expert_shares(learner)} of its experts'"
    yield from _optimizer(
        elements.share, dtype, divided=divided, offloaded=learner.offload_optimizer, cuda=cuda, prefix=prefix
    )


def _optimizer(
    elements: int, dtype: str, *, divided: str, offloaded: bool, cuda: bool, prefix: str
) -> Iterable[MemoryRow]:
    part = f"{prefix}Adam: two moments" + ("" if dtype == "float32" else " and main weights") + f", float32{divided}"
    yield MemoryRow(process="rank", part=part, bytes=optimizer_bytes(elements, dtype), on_host=offloaded and cuda)
    if offloaded:
        block = min(elements, OFFLOADED_AT_ONCE)
        yield MemoryRow(
            process="rank", part=f"{prefix}Adam's state of one block, in a step", bytes=optimizer_bytes(block, dtype)
        )


def _engine(shape: ModelShape, config: RunConfig, dtype: str, memory_bytes: int) -> Iterable[MemoryRow]:
    if config.engine.kind != "builtin":
        return
    weights = ITEM_BYTES[dtype] * parameters(shape)
    yield MemoryRow(process="engine", part="weights", bytes=weights)
    yield MemoryRow(process="engine", part="weights of a push under way", bytes=weights)
    tokens, kv_bytes = kv_budget(shape, config, dtype, memory_bytes)
    yield MemoryRow(
        process="engine", part=f"keys and values of {tokens:,} tokens (engine.kv_tokens), at most", bytes=kv_bytes
    )


def kv_budget(shape: ModelShape, config: RunConfig, dtype: str, memory_bytes: int) -> tuple[int, int]:
    """Return the tokens for whose keys and values a built-in engine has room, and their bytes; ``memory_bytes``: of its
    device, 0 = not known.
    """
    engine, item = config.engine, ITEM_BYTES[dtype]
    num_blocks = budget(
        shape,
        item,
        max_running=engine.max_running,
        max_context=engine.max_context,
        kv_tokens=engine.kv_tokens,
        memory_bytes=memory_bytes,
    )
    return num_blocks * BLOCK, num_blocks * block_bytes(shape, item)


def row_tokens(shape: ModelShape, config: RunConfig) -> int:
    """Return the number of tokens of the longest packed row: the budget, or a single sample that is longer than it."""
    context, new_tokens = shape.max_positions, config.sampling.max_new_tokens
    if not any(source.responses_key for source in config.data.used):  # recorded responses need no engine
        context = min(context, config.engine.max_context or context)
    longest = (config.data.max_prompt_tokens or context - new_tokens) + new_tokens
    return max(config.learner.max_tokens_per_micro_batch, min(longest, context))


def parameters(shape: ModelShape) -> int:
    """Return the number of parameters; a tied output projection counts once."""
    return sum(math.prod(tensor) for tensor in shape.tensors().values())


def rank_parameters(
    shape: ModelShape, tensor_parallel: int, pipeline_parallel: int = 1, expert_parallel: int = 1
) -> int:
    """Return the number of parameters of one rank, in the largest stage of a pipeline, adapters excluded."""
    return max(
        rank_elements(stage, tensor_parallel, expert_parallel)
        for stage in stages_of(shape.tensors(), pipeline_parallel)
    )


def rank_elements(tensors: Shapes, tensor_parallel: int, expert_parallel: int = 1) -> int:
    """Return the number of elements that one rank has of these tensors."""
    return sum(
        math.prod(tensor) // split_of(name, tensor_parallel, expert_parallel) for name, tensor in tensors.items()
    )


class _Valued(ModelShape):
    """The model of a critic: a value head in the place of the output projection."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the model without its output projection, and the head."""
        shapes = ModelShape.tensors(self)
        shapes.pop("lm_head.weight", None)
        return {**shapes, VALUE_HEAD: (1, self.hidden)}


def valued(shape: ModelShape) -> ModelShape:
    """Return the shape of a critic that starts from a model of this shape."""
    return _Valued(**{each.name: getattr(shape, each.name) for each in fields(shape)})


def _largest_stage(tensors: Shapes, learner: LearnerConfig) -> Shapes:
    stages = stages_of(tensors, learner.pipeline_parallel, learner.virtual_pipeline, edge_layers=learner.edge_layers)
    return max(stages, key=lambda stage: rank_elements(stage, learner.tensor_parallel, learner.expert_parallel))


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
            place = re.sub(
                r"\b([qkv]_proj|gate_proj|up_proj)\b",
                lambda projection: "qkv" if projection[0][0] in "qkv" else "fc1",
                name,
            )
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


def optimizer_bytes(num_parameters: int, dtype: str) -> int:
    """Return the bytes of Adam's state: two float32 moments, and float32 main weights for other dtypes."""
    return num_parameters * FLOAT32 * (2 if dtype == "float32" else 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The activations of a rank's decoder: dtype, ranks that share the model, recomputation, kernels."""

    dtype: str
    tensor_parallel: int = 1
    recompute: str = NONE
    norm_kernel: bool = False
    """True on CUDA: a norm keeps its input and a scale, not the normalised value in float32 as well."""
    rotary_kernel: bool = False
    """Rotary positions, and the norms of queries and keys, are kernels, with cosines and sines for all layers."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """With adapters a norm, whose weight is frozen, keeps its input alone, and a layer without one keeps no input."""

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
            return (
                shape.experts.per_token * (5 * shape.experts.intermediate + 2 * shape.hidden) * ITEM_BYTES[self.dtype]
            )
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
            return (heads + kv_heads) * head_dim * (
                ITEM_BYTES[self.dtype] if self.norm_kernel else self._norm_copies * FLOAT32
            ) + scales
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
