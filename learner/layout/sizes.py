"""Facts about a model by its config.json: whether the learner can train it, its layers by rank, operations of a step.

The values are those of the file, so a key that is missing has the default of transformers' class. Knows no torch.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.model_values import (
    EXPERTS_OF,
    MISTRAL_WINDOW,
    as_older,
    language_values,
    num_experts,
    sparse_layers,
)
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.model_files import text_tensors_in

FAMILIES = (
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Values of ``model_type`` that have a bridge."""
WITH_BIAS = ("deepseek_v3", "glm4_moe")  # families with a bias per expert in their routers
LOGITS_AT_ONCE = 1 << 23  # number of logits in memory at once (32 MB in float32); see ``learner/kernels/logprobs.py``
FUSED_CHUNKS = 8  # factor of that number with fused kernels, which need no memory beside the logits
OFFLOADED_AT_ONCE = 1 << 26
"""Weights with offloaded state on the device at a time: a power of two, to which pinned allocations are rounded up."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")  # number of the layer in a Hugging Face name
SPLIT = ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes that tensor parallelism divides."""
_SPLIT_TOO = {
    "deepseek_v3": ("q_lora_rank", "kv_lora_rank", "shared"),
    "glm4_moe": ("shared",),
    "qwen2_moe": ("shared_expert_intermediate_size",),
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants that Megatron has built in for Llama's scaling; its factor is an argument."""


def refusals(
    values: JsonMapping,
    *,
    where: str,
    tensor_parallel: int,
    sequence_parallel: bool = False,
    pipeline_parallel: int = 1,
    virtual_pipeline: int = 1,
    first_stage_layers: int = 0,
    last_stage_layers: int = 0,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    own_bridge: bool = False,
) -> list[ConfigRefused]:
    """Return an error for each value of a model's configuration that the learner cannot train.

    ``own_bridge``: the user's bridge computes the model, so only the sizes are compared with the layout.
    """
    family = values.get("model_type")
    if family not in FAMILIES and not own_bridge:
        want = f"one of {', '.join(FAMILIES)}, or for another family learner.backend: fsdp or learner.bridge"
        return [ConfigRefused(f"{where}: model_type", want, family)]
    family = str(family)
    problems = [
        *_split_refusals(values, family, where, tensor_parallel),
        *_expert_layout(values, family, where, expert_parallel),
    ]
    if family in EXPERTS_OF and tensor_parallel > 1 and not sequence_parallel:
        want = "true with learner.tensor_parallel > 1 for a model with experts: every rank sends its own tokens to them"
        problems.append(ConfigRefused("learner.sequence_parallel", want, sequence_parallel))
    if not own_bridge:
        problems += (
            ConfigRefused(f"{where}: {name}", want, values.get(name)) for name, want in _value_refusals(values, family)
        )
    layers, heads = values.get("num_hidden_layers"), values.get("num_attention_heads")
    parts = tensor_parallel * context_parallel
    if isinstance(layers, int):
        edges = (first_stage_layers, last_stage_layers)
        problems += _stage_refusals(layers, where, pipeline_parallel, virtual_pipeline, edges)
    if isinstance(heads, int) and heads % parts and context_parallel > 1:
        wanted = (
            f"a multiple of learner.tensor_parallel x learner.context_parallel = {parts}, whose ranks divide the "
            "heads for attention"
        )
        problems.append(ConfigRefused(f"{where}: num_attention_heads", wanted, heads))
    return problems if own_bridge else [*problems, *_rope_refusals(values, where, family)]


def _rope_refusals(values: JsonMapping, where: str, family: str) -> Iterator[ConfigRefused]:
    """Yield an error for rotary positions that Megatron computes differently."""
    try:
        rope_arguments(as_older(values).get("rope_scaling"), where=where, family=family)
    except ConfigRefused as refused:
        yield refused
    except ValueError as error:
        yield ConfigRefused(f"{where}: rope_parameters", "one set for all layers", str(error))


def stage_layers(num_layers: int, pipeline_parallel: int, first: int = 0, last: int = 0) -> list[int]:
    """Return the number of layers of each stage. Stages without a number of their own have equal parts of the rest.

    Layers that are left over, which ``refusals`` refuses, are in the last stage.
    """
    inner_stages = pipeline_parallel - bool(first) - bool(last)
    inner_layers = (num_layers - first - last) // inner_stages if inner_stages else 0
    layers = [first or inner_layers, *[inner_layers] * (pipeline_parallel - 2), last or inner_layers][
        -pipeline_parallel:
    ]
    return [*layers[:-1], num_layers - sum(layers[:-1])]


SENDERS = 8
"""Ranks of FSDP that send by default, as many as a machine has GPUs: each has a process group with every engine."""


def num_senders(tensor_parallel: int, expert_parallel: int, at_most: int = 0, *, sharded: int = 1) -> int:
    """Return the number of ranks of each stage that send weights. ``at_most``: 0 = all that have parts of them alone.

    ``sharded``: replicas over which every weight is divided (FSDP), which is gathered for any sender; of these at most
    ``SENDERS`` send by default. 1 = each replica has the whole.
    """
    senders = math.lcm(tensor_parallel, expert_parallel) * (sharded if at_most else min(sharded, SENDERS))
    return min(senders, at_most) if at_most else senders


class Dealt:
    """The layers of a stage, dealt out to the ranks of the stage that send, in the order in which they come.

    All tensors of a layer have one sender, so engines that join several of them can be compared with it.
    """

    def __init__(self, senders: int) -> None:
        self._senders, self._layers = senders, dict[str, int]()

    def sender(self, name: str) -> int:
        """Return the number in its stage of the rank that sends the tensor of this Hugging Face name."""
        layer = _LAYER.search(name)
        return self._layers.setdefault(layer[1], len(self._layers)) % self._senders if layer else 0


def _stage_refusals(
    layers: int, where: str, pipeline: int, virtual: int, edges: tuple[int, int]
) -> Iterator[ConfigRefused]:
    """Yield an error for layers that the stages cannot share. ``edges``: layers of the first and last stage, or 0."""
    set_edges = [f"learner.{name}_stage_layers" for name, edge in zip(("first", "last"), edges, strict=True) if edge]
    inner_stages, inner_layers = pipeline - len(set_edges), layers - sum(edges)
    if not set_edges:
        chunks = pipeline * virtual
        if layers % chunks:
            factors = "learner.pipeline_parallel" + (" x learner.virtual_pipeline" if virtual > 1 else "")
            want = f"a multiple of {factors} = {chunks}, or learner.first_stage_layers or learner.last_stage_layers"
            yield ConfigRefused(f"{where}: num_hidden_layers", want, layers)
    elif inner_layers < inner_stages or (inner_layers % inner_stages if inner_stages else inner_layers):
        want = f"{sum(edges)}, of {' and '.join(set_edges)}" + (
            f", and equal numbers for {inner_stages} other stages" if inner_stages else ""
        )
        yield ConfigRefused(f"{where}: num_hidden_layers", want, layers)


def _split_refusals(values: JsonMapping, family: str, where: str, tensor_parallel: int) -> Iterator[ConfigRefused]:
    derived = {
        "shared": _int(values, "moe_intermediate_size") * _int(values, "n_shared_experts"),
        "kv_lora_rank": _int(values, "kv_lora_rank") + _int(values, "qk_rope_head_dim"),
    }
    for name in (*SPLIT, *_SPLIT_TOO.get(family, ())):
        size = derived.get(name, values.get(name))
        shown = "moe_intermediate_size" if name == "shared" else name
        if isinstance(size, int) and size % tensor_parallel:
            yield ConfigRefused(f"{where}: {shown}", f"a multiple of learner.tensor_parallel = {tensor_parallel}", size)


def _expert_layout(values: JsonMapping, family: str, where: str, expert_parallel: int) -> Iterator[ConfigRefused]:
    if expert_parallel == 1:
        return
    if family not in EXPERTS_OF:
        want = f"a family with experts ({', '.join(EXPERTS_OF)}), or learner.expert_parallel = 1"
        yield ConfigRefused(f"{where}: model_type", want, family)
    elif num_experts(values) % expert_parallel:
        want = f"a multiple of learner.expert_parallel = {expert_parallel}"
        yield ConfigRefused(f"{where}: {EXPERTS_OF[family]}", want, num_experts(values))


def _int(values: JsonMapping, name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0


def _value_refusals(values: JsonMapping, family: str) -> Iterator[tuple[str, str]]:
    """Yield (key, wanted value) for each key with a value that Megatron would compute differently, or not at all."""
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        yield "hidden_act", "silu"
    if values.get("quantization_config"):
        yield "quantization_config", "none: unquantised weights, which training needs"
    yield from _attention_refusals(values, family)
    if family in EXPERTS_OF:
        yield from _expert_refusals(values, family)


def _attention_refusals(values: JsonMapping, family: str) -> Iterator[tuple[str, str]]:
    # Elsewhere than in these two, the output projection would have a bias as well, which Megatron's layers do not have.
    if values.get("attention_bias") and family not in ("glm4", "glm4_moe"):
        yield "attention_bias", "false: the output projection has no bias in the learner"
    if values.get("mlp_bias"):
        yield "mlp_bias", "false: an MLP has no bias in the learner"
    window = values.get("sliding_window", MISTRAL_WINDOW if family == "mistral" else None)
    longest = _int(values, "max_position_embeddings")
    if family in ("mistral", "mixtral") and isinstance(window, int) and window < longest:
        yield "sliding_window", "null, or at least max_position_embeddings: attention has no window in the learner"
    if values.get("use_sliding_window"):
        yield "use_sliding_window", "false: attention has no window in the learner"
    kinds = values.get("layer_types")
    if kinds and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        yield "layer_types", "full_attention in every layer: attention has no window in the learner"
    if family == "deepseek_v3" and values.get("rope_interleave") is False:
        yield "rope_interleave", "true: Megatron's latent attention has pairs of neighbours"


def _expert_refusals(values: JsonMapping, family: str) -> Iterator[tuple[str, str]]:
    by_softmax = family in ("qwen3_moe", "mixtral") or (family == "qwen2_moe" and values.get("norm_topk_prob"))
    if by_softmax and values.get("num_experts_per_tok") == 1:
        yield "num_experts_per_tok", "> 1: Megatron has no softmax over a single chosen expert"
    if family not in WITH_BIAS:
        return
    if values.get("scoring_func", "sigmoid") != "sigmoid":
        yield "scoring_func", "sigmoid"
    if values.get("topk_method", "noaux_tc") != "noaux_tc":
        yield "topk_method", "noaux_tc"
    groups, chosen = _int(values, "topk_group") or 1, values.get("num_experts_per_tok")
    if _int(values, "n_group") > 1 and chosen != 2 * groups:
        yield (
            "num_experts_per_tok",
            f"2 x topk_group = {2 * groups}: the score of a group is then that of its two best experts in Megatron",
        )
    elif chosen == 1 and values.get("norm_topk_prob") is not False:
        yield "num_experts_per_tok", "> 1 with norm_topk_prob: true: Megatron does not normalise a single score"
    if "n_shared_experts" in values and not values["n_shared_experts"]:
        yield "n_shared_experts", ">= 1"


def rope_arguments(scaling: Any, *, where: str = "model", family: str = "") -> JsonObject:
    """Return Megatron's arguments for a ``rope_scaling``. Raises ConfigRefused for one it computes differently."""
    if not scaling:
        return {}
    rope = scaling if isinstance(scaling, Mapping) else {"type": "?"}
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
    if kind == "default":
        return {}
    if family == "deepseek_v3":
        # Both scales: transformers and mbridge have different defaults for them.
        needed = ("factor", "mscale", "mscale_all_dim", "original_max_position_embeddings")
        if kind == "yarn" and all(rope.get(name) for name in needed):
            return {}  # the bridge reads them
        raise ConfigRefused(f"{where}: rope_scaling", f"none, or yarn with {', '.join(needed)}", scaling)
    if kind == "linear" and factor:
        return {"seq_len_interpolation_factor": factor}
    if kind == "llama3" and factor and all(rope.get(name) == value for name, value in _LLAMA3.items()):
        return {"rope_scaling": True, "rope_scaling_factor": factor}
    raise ConfigRefused(f"{where}: rope_scaling", "none, linear, or llama3 with Llama's own constants", scaling)


PER_PRODUCT = 2  # operations of one multiplication and addition
PASSES = 3  # one forward pass, and a backward pass of twice its work: the gradient of the input and that of the weight


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Operations of the forward and backward pass of one model.

    Matrix products of layers, output layer and attention: without embedding, norms, activations, padding and
    recomputation (model FLOPs utilisation). A causal query has its own and the earlier positions as keys. Of routed
    experts those of a token count. Source: Chowdhery et al. 2022 (PaLM), appendix B, which counts all pairs of
    positions instead of the causal half.
    """

    per_token: int
    """Operations of the weights, per token."""
    per_pair: int
    """Operations of attention, per query and key."""

    @classmethod
    def of(cls, values: JsonMapping, *, value_head: bool = False) -> "StepFlops":
        """Return the operations for a config.json that the learner can train. ``value_head``: one output row."""
        hidden, layers = values["hidden_size"], values["num_hidden_layers"]
        projections, pair = _latent_attention(values) if values.get("kv_lora_rank") else _attention(values)
        mlps = sum(
            _experts(values) if sparse else 3 * hidden * values["intermediate_size"] for sparse in sparse_layers(values)
        )
        weights = layers * projections + mlps + hidden * (1 if value_head else values["vocab_size"])
        return cls(per_token=PASSES * PER_PRODUCT * weights, per_pair=PASSES * PER_PRODUCT * layers * pair)

    @classmethod
    def of_tensors(
        cls, values: JsonMapping, tensors: Mapping[str, tuple[int, ...]], *, value_head: bool = False
    ) -> "StepFlops":
        """Return about the operations for a model of any family: of its matrices, and of softmax attention.

        Of the experts in the files a token counts its own. Linear attention counts by its matrices alone.
        """
        values = language_values(values)
        share = _share_of_experts(values)
        weights = 0.0
        for name, shape in tensors.items():
            if len(shape) > 1 and not any(part in name for part in _NO_PRODUCT):
                weights += math.prod(shape) * (share if ".experts." in name else 1.0)
        heads, hidden = int(values.get("num_attention_heads") or 0), int(values["hidden_size"])
        weights += hidden * (1 if value_head else int(values["vocab_size"]))
        size = int(values.get("head_dim") or (hidden // heads if heads else 0))
        kinds = values.get("layer_types") or [""] * int(values["num_hidden_layers"])
        layers = sum(
            kind in ("", "attention") or kind.endswith(("full_attention", "sliding_attention")) for kind in kinds
        )
        return cls(
            per_token=round(PASSES * PER_PRODUCT * weights),
            per_pair=max(1, PASSES * PER_PRODUCT * layers * 2 * heads * size),
        )

    @classmethod
    def read(cls, model_dir: Path, *, value_head: bool = False) -> "StepFlops":
        """Return the operations for a Hugging Face directory, as ``of`` or, for other families, ``of_tensors``."""
        values = json.loads((model_dir / "config.json").read_text())
        if values.get("model_type") in FAMILIES:
            return cls.of(values, value_head=value_head)
        return cls.of_tensors(values, text_tensors_in(model_dir), value_head=value_head)

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


_SOFTMAX = ("", "attention", "full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers (``layer_types``) with softmax attention; "" = the configuration does not tell layers apart."""
_NO_PRODUCT = ("embed", "wte.", "lm_head.", "visual.", "vision", "audio")
"""In names of tensors that no token of text is multiplied with; the output layer is counted by its sizes."""


def _share_of_experts(values: JsonMapping) -> float:
    """Return the share of the experts that a token passes."""
    totals = (values.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    total = next((total for total in totals if total), 0)
    return int(values.get("num_experts_per_tok") or total) / total if total else 1.0


def _attention(values: JsonMapping) -> tuple[int, int]:
    """Return the weights of a layer's attention, and a query's products with a key and with its value."""
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
