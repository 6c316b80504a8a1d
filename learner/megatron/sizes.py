"""Check whether the learner can train a Hugging Face model, by config.json: family, sizes, rotary embedding. No torch."""

from collections.abc import Mapping
from typing import Any

from learner.errors import ConfigRefused

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of ``model_type`` that have a bridge."""
LOGITS_AT_ONCE = 1 << 23
"""Number of logits in memory at once (32 MB in float32); see ``learner/logprobs.py``."""
OFFLOADED_AT_ONCE = 1 << 26
"""Weights whose offloaded optimizer state is on the device at a time. A power of two, to which pinned allocations are rounded up."""
SPLIT = ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes that tensor parallelism divides."""


def refusals(
    values: Mapping[str, Any],
    *,
    where: str,
    tensor_parallel: int,
    pipeline_parallel: int = 1,
    virtual_pipeline: int = 1,
    context_parallel: int = 1,
) -> list[ConfigRefused]:
    """Return an error for each value of a model's configuration that the learner cannot train."""
    family = values.get("model_type")
    if family not in FAMILIES:
        return [ConfigRefused(f"{where}: model_type", f"one of {', '.join(FAMILIES)}", family)]
    found = [
        ConfigRefused(f"{where}: {name}", f"a multiple of learner.tensor_parallel = {tensor_parallel}", values[name])
        for name in SPLIT
        if isinstance(values.get(name), int) and values[name] % tensor_parallel
    ]
    layers, heads = values.get("num_hidden_layers"), values.get("num_attention_heads")
    chunks, parts = pipeline_parallel * virtual_pipeline, tensor_parallel * context_parallel
    if isinstance(layers, int) and layers % chunks:
        factors = "learner.pipeline_parallel" + (" x learner.virtual_pipeline" if virtual_pipeline > 1 else "")
        found.append(ConfigRefused(f"{where}: num_hidden_layers", f"a multiple of {factors} = {chunks}", layers))
    if isinstance(heads, int) and heads % parts and context_parallel > 1:
        wanted = f"a multiple of learner.tensor_parallel x learner.context_parallel = {parts}, whose ranks divide the heads for attention"
        found.append(ConfigRefused(f"{where}: num_attention_heads", wanted, heads))
    try:
        rope_arguments(values.get("rope_scaling"), where=where)
    except ConfigRefused as refused:
        found.append(refused)
    return found


def rope_arguments(scaling: Any, *, where: str = "model") -> dict[str, Any]:
    """Return Megatron's arguments for a Hugging Face ``rope_scaling``. Raises ConfigRefused for one that Megatron computes differently."""
    if not scaling:
        return {}
    given = scaling if isinstance(scaling, Mapping) else {"type": "?"}
    kind, factor = given.get("rope_type", given.get("type", "default")), given.get("factor")
    if kind == "default":
        return {}
    if kind == "linear" and factor:
        return {"seq_len_interpolation_factor": factor}
    # Megatron takes the factor as an argument and has the other three built in.
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and factor and all(given.get(name) == value for name, value in llama3.items()):
        return {"rope_scaling": True, "rope_scaling_factor": factor}
    raise ConfigRefused(f"{where}: rope_scaling", "none, linear, or llama3 with Llama's own constants", scaling)
