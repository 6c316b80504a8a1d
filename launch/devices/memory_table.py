"""Memory that each process of a run needs, in bytes, from the model's sizes and the configuration. Pure.

The tensors of a rank are counted as Megatron's classes allocate them here, and the tensors that a layer keeps for the
backward pass one by one (``rank_memory.py``); tests compare both with a real rank. Memory of libraries (CUDA context,
NCCL, cuBLAS, fragmentation of the allocator: some GB together) is not in the table; of a rank on the CPU it is.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields

from tidemill.actors.serving.builtin.blocks import BLOCK, RowSizes, budget
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.launch.devices.rank_memory import (
    FLOAT32,
    ITEM_BYTES,
    NONE,
    VALUE_HEAD,
    Activations,
    RankElements,
    elements_of,
    largest_stage,
    logits_bytes,
    model_stages,
    num_expert_shares,
    num_shares,
    rank_elements,
)
from tidemill.launch.devices.shapes import Shapes, trained_tensors
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.layout.sizes import OFFLOADED_AT_ONCE, Dealt, num_senders
from tidemill.learner.settings.config import LearnerConfig

AUTO = "auto"
# Copies of the weights that a rank sends: the head, and the one being filled (`transport/staging.py`).
STAGED_COPIES = 2
SENDER = "rank that sends weights, besides"
# Memory of a rank's Python, torch and Megatron on the CPU before it has a model (torch 2.13, megatron-core 0.16).
LIBRARY_BYTES = 420_000_000
# The same of a built-in engine: Python, torch, the tokenizer, and what malloc keeps of a step's tensors.
ENGINE_LIBRARY_BYTES = 250_000_000
# A process's CUDA context on its device, about; not measured (`docs/decisions/023-nccl-in-a-process-of-its-own.md`).
CONTEXT_BYTES = 500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One line of the table."""

    process: str  # rank | rank that sends weights, besides | engine
    part: str
    bytes: int
    on_host: bool = False  # True for memory of the host even where the process computes on an accelerator


def of_rank(part: str, num_bytes: int, *, on_host: bool = False) -> MemoryRow:
    """Return a row of a rank."""
    return MemoryRow(process="rank", part=part, bytes=num_bytes, on_host=on_host)


def memory_rows(
    shape: ModelShape, config: RunConfig, *, cuda: bool, critic: ModelShape | None = None, engine_memory: int = 0
) -> tuple[MemoryRow, ...]:
    """Return the rows of one rank and of one built-in engine; ``cuda``: they compute on an accelerator.

    ``critic``: the model in ``learner.critic.path``; None = the policy's. ``engine_memory``: bytes of an engine's
    device; 0 = not known. A packed row has ``learner.max_tokens_per_micro_batch`` tokens, or those of the longest
    sample if it has more.
    """
    learner, engine = (dtype_on(setting, cuda=cuda) for setting in (config.learner.dtype, config.engine.dtype))
    tokens = -(-row_tokens(shape, config) // config.learner.context_parallel)
    libraries = of_rank("Python, torch and Megatron, about", LIBRARY_BYTES)
    return (
        *_state(shape.tensors(), valued(critic or shape).tensors(), config, learner, cuda=cuda),
        *_activations(tokens, shape, critic or shape, config.learner, learner, cuda=cuda),
        *(() if cuda else (libraries,)),
        *sending_rows(shape.tensors(), config, cuda=cuda),
        *engine_rows(
            parameters(shape), RowSizes.of(shape, ITEM_BYTES[engine]), config, cuda=cuda, memory_bytes=engine_memory
        ),
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
    return (*_state(tensors, whose, config, dtype, cuda=cuda), *sending_rows(tensors, config, cuda=cuda))


def dtype_on(setting: str, *, cuda: bool) -> str:
    """Return the dtype that ``learner.dtype`` or ``engine.dtype`` means on an accelerator or on the CPU."""
    if setting != AUTO:
        return setting
    return "bfloat16" if cuda else "float32"


def training_bytes(
    tensors: Shapes, dtype: str, learner: LearnerConfig, *, cuda: bool, critic: Shapes | None = None
) -> int:
    """Return the bytes of weights, gradients and the optimizer's state of a rank.

    ``critic``: None = as large as the policy.
    """
    stage = largest_stage(tensors, learner)
    models = [elements_of(stage, learner, trained_tensors(stage, learner))]
    if learner.algorithm.by_critic:
        largest = largest_stage(tensors if critic is None else critic, learner)
        models.append(elements_of(largest, learner, by_adam=True))
    rows = [row for elements in models for row in _model(elements, learner, dtype, cuda=cuda)]
    return sum(row.bytes for row in rows if not row.on_host)


def _state(tensors: Shapes, critic: Shapes, config: RunConfig, dtype: str, *, cuda: bool) -> Iterable[MemoryRow]:
    """Yield the rows of weights, gradients and the optimizer's state of a rank, and of its copies of them."""
    learner, item, split = config.learner, ITEM_BYTES[dtype], config.learner.tensor_parallel
    stage = largest_stage(tensors, learner)
    ours_of = trained_tensors(stage, learner)
    policys = elements_of(stage, learner, ours_of)
    critics = elements_of(largest_stage(critic, learner), learner, by_adam=True)
    num_weights, ours, its = policys.own, policys.trained, critics.own
    yield from _model(policys, learner, dtype, cuda=cuda, adapters=bool(learner.lora.rank))
    if learner.algorithm.by_critic:
        yield from _model(critics, learner, dtype, cuda=cuda, prefix="critic: ")
    moving = FLOAT32 if learner.algorithm.kl.reference_ema else item
    # With adapters, the model without them is the reference, and its weights are not copied.
    outer = {name: tensor for name, tensor in ours_of.items() if name.endswith(".lora_B")}
    reference = num_weights if not learner.lora.rank or learner.algorithm.kl.reference else rank_elements(outer, split)
    saved = ours if learner.lora.rank else num_weights
    copies, away = [], 0
    if learner.algorithm.needs_reference:
        copies.append(("reference model", moving * reference))
        away = num_weights if reference == num_weights else saved
    if config.weights.push_every > 1:
        copies.append(("weights of the last version", item * saved))
        away = max(away, saved)
    if copies and cuda:
        copies.append(("own weights, while one of the other two is in their place", item * away))
    for part, num_bytes in copies:
        yield of_rank(part, num_bytes, on_host=cuda)
    if learner.checkpoint.background:
        # Each tensor is copied by one of the replicas that have it, so another rank may have less.
        weights = item * saved * (2 if config.weights.push_every > 1 else 1) + (
            moving * num_weights if learner.algorithm.kl.moves else 0
        )
        state = policys.state_bytes(dtype)
        if learner.algorithm.by_critic:
            weights, state = weights + item * its, state + critics.state_bytes(dtype)
        yield of_rank(
            "copy of weights and the optimizer's state, for checkpoints, at most", weights + state, on_host=cuda
        )


def sending_rows(tensors: Shapes, config: RunConfig, *, cuda: bool, sharded: int = 1) -> Iterable[MemoryRow]:
    """Yield the rows of the rank that sends weights, for its copies and its processes. ``sharded``: see
    ``num_senders``.
    """
    dtype = dtype_on(config.learner.dtype, cuda=cuda)
    yield MemoryRow(
        process=SENDER,
        part=f"{STAGED_COPIES} copies of its part of the weights, for pushes",
        bytes=staged_bytes(tensors, config, dtype, sharded=sharded),
        on_host=config.weights.staging != "cuda",
    )
    if cuda:
        yield from _groups(tensors, config, dtype)


def senders_of(config: RunConfig, *, sharded: int = 1) -> int:
    """Return the number of ranks of each stage that send weights. ``sharded``: see ``num_senders``."""
    ours, at_most = config.learner, config.weights.senders_per_stage
    return num_senders(ours.tensor_parallel, ours.expert_parallel, at_most, sharded=sharded)


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
    part = f"processes of {count} group(s) of engines over NCCL, with a CUDA context and two buckets each"
    size = count * group_bytes(largest, config, dtype)
    yield MemoryRow(process=SENDER, part=f"{part}, if weights go over it", bytes=size)


def staged_bytes(tensors: Shapes, config: RunConfig, dtype: str, *, sharded: int = 1) -> int:
    """Return the bytes of the copies of the rank that sends the largest part of the weights. ``dtype``: theirs."""
    ours = config.learner
    senders = senders_of(config, sharded=sharded)
    parts: dict[tuple[int, int], int] = defaultdict(int)
    sent: set[str] = set()
    for stage, of_stage in enumerate(model_stages(tensors, ours)):
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
    kernels = {"norm_kernel": cuda, "rotary_kernel": cuda and learner.fused_rotary != "never"}
    activations = Activations(
        dtype=dtype, tensor_parallel=split, recompute=learner.recompute, lora=learner.lora, **kernels
    )
    # The first stage of a pipeline keeps as many rows as there are stages, each in its share of the layers.
    kept = f"kept for the backward pass of {tokens:,} tokens"
    trained = [shape, *([critic] if learner.algorithm.by_critic else [])]  # in turn, so the larger one counts
    yield of_rank(f"activations {kept}", tokens * max(map(activations.kept_per_token, trained)))
    if learner.recompute != NONE:
        again = max(map(activations.again_per_token, trained))
        yield of_rank("activations of one layer, computed again", tokens * again)
    if shape.experts is not None and learner.grouped_experts != "never" and (dtype == "bfloat16" or not cuda):
        weights = 2 * shape.hidden * shape.experts.intermediate * (shape.experts.count // learner.expert_parallel)
        yield of_rank("experts of one layer, side by side, and their gradient", 2 * weights * ITEM_BYTES[dtype])
    fused, vocabulary = cuda and learner.fused_log_probs != "never", shape.vocab_size // split
    logits = logits_bytes(tokens, vocabulary, shape.hidden, dtype, fused=fused)
    yield of_rank(f"logits of {tokens:,} tokens, at once", logits)
    if _overlapped(learner, cuda=cuda) and not (shape.tied and learner.pipeline_parallel == 1):
        part = "gradient of the output weight, without values, for the overlapped reduction"
        yield of_rank(part, vocabulary * shape.hidden * ITEM_BYTES[dtype])


def _overlapped(learner: LearnerConfig, *, cuda: bool) -> bool:
    """Return whether gradients are reduced during the backward pass (``choose_replicas``)."""
    auto = cuda and learner.virtual_pipeline == 1
    several = learner.data_parallel * learner.context_parallel > 1
    return several and {"auto": auto, "always": True}.get(learner.overlap_grad_reduce, False)


def _model(
    elements: RankElements, learner: LearnerConfig, dtype: str, *, cuda: bool, adapters: bool = False, prefix: str = ""
) -> Iterable[MemoryRow]:
    """Yield the rows of a model that is trained, or a part of it: weights, gradients, the optimizer's state."""
    among = ", adapters among them" if adapters else ""
    yield of_rank(f"{prefix}weights{among}", ITEM_BYTES[dtype] * elements.own)
    yield of_rank(f"{prefix}gradients, float32", FLOAT32 * elements.trained)
    divided = f", 1/{num_shares(learner)} of them" if num_shares(learner) > 1 else ""
    if divided and elements.experts:
        divided += f" and 1/{num_expert_shares(learner)} of its experts'"
    main = "" if dtype == "float32" else " and main weights"
    state, words = elements.state_bytes(dtype), elements.moments.words
    on_host = learner.offload_optimizer and cuda
    yield of_rank(f"{prefix}{words}{main}, float32{divided}", state, on_host=on_host)
    if learner.offload_optimizer:
        block = optimizer_bytes(min(elements.share, OFFLOADED_AT_ONCE), dtype)
        yield of_rank(f"{prefix}Adam's state of one block, in a step", block)


def engine_rows(
    num_parameters: int, sizes: RowSizes, config: RunConfig, *, cuda: bool, memory_bytes: int
) -> Iterable[MemoryRow]:
    """Yield the rows of one built-in engine. ``sizes``: of its rows in its dtype; ``memory_bytes``: of its device, 0 =
    not known. Raises UnsupportedModel as ``budget``.
    """
    if config.engine.kind != "builtin":
        return
    weights = ITEM_BYTES[dtype_on(config.engine.dtype, cuda=cuda)] * num_parameters
    yield MemoryRow(process="engine", part="weights", bytes=weights)
    yield MemoryRow(process="engine", part="weights of a push under way", bytes=weights)
    tokens, kv_bytes = kv_budget(sizes, config, memory_bytes)
    part = f"keys and values of {tokens:,} tokens (engine.kv_tokens), at most"
    yield MemoryRow(process="engine", part=part, bytes=kv_bytes)
    if states := sizes.states_bytes(config.engine.max_running):
        part = f"states of {config.engine.max_running} rows (engine.max_running), twice"
        yield MemoryRow(process="engine", part=part, bytes=states)
    if not cuda:
        # A bucket of a tensor that is larger than it is received into the standby copy, or needs as much memory.
        bucket_bytes = min(config.weights.bucket_size(on_gpu=False), weights)
        yield MemoryRow(process="engine", part="two buffers of the first push", bytes=2 * bucket_bytes)
        yield MemoryRow(process="engine", part="Python and torch, about", bytes=ENGINE_LIBRARY_BYTES)


def kv_budget(sizes: RowSizes, config: RunConfig, memory_bytes: int) -> tuple[int, int]:
    """Return the tokens for whose keys and values a built-in engine has room, and their bytes. Arguments as for
    ``engine_rows``.
    """
    limits = {name: getattr(config.engine, name) for name in ("max_running", "max_context", "kv_tokens")}
    num_blocks = budget(sizes, **limits, memory_bytes=memory_bytes)
    return num_blocks * BLOCK, num_blocks * sizes.block_bytes


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


class _Valued(ModelShape):
    """The model of a critic: a value head in the place of the output projection."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the model without its output projection, and the head."""
        shapes = ModelShape.tensors(self)
        shapes.pop("lm_head.weight", None)
        return {**shapes, VALUE_HEAD: (1, self.hidden)}


def valued(shape: ModelShape) -> ModelShape:
    """Return the shape of a critic that starts from a model of this shape."""
    return _Valued(**{field.name: getattr(shape, field.name) for field in fields(shape)})


def optimizer_bytes(num_parameters: int, dtype: str) -> int:
    """Return the bytes of Adam's state: two float32 moments, and float32 main weights for other dtypes."""
    return num_parameters * FLOAT32 * (2 if dtype == "float32" else 3)
