"""Values of a model's config.json, read without numpy: processes that only check settings start sooner.

Their keys are the names of transformers 4, which most released files and mbridge have. Version 5 writes rotary
positions into ``rope_parameters``, and the number of experts of Qwen3-MoE as ``num_local_experts``.
"""

from collections.abc import Mapping

from tidemill.bus.wire.json_object import JsonMapping, JsonObject

ROPE, BASE, SCALING, SHARE = "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"
ROPE_KEYS = (BASE, SCALING, SHARE)
MTP_LAYERS = "num_nextn_predict_layers"
EXPERTS, LOCAL_EXPERTS = "num_experts", "num_local_experts"
RENAMED = ("qwen3_moe",)  # Families for which transformers 5 has another key for the number of experts
MISTRAL_WINDOW = 4096  # The window that transformers takes for mistral where a config.json has no ``sliding_window``

# The key of config.json with the number of routed experts, by family
EXPERTS_OF = {
    "deepseek_v3": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
}


# The same of other families of transformers
_OTHER_EXPERTS_OF = {
    "deepseek_v32": "n_routed_experts",
    "glm4_moe_lite": "n_routed_experts",
    "glm_moe_dsa": "n_routed_experts",
    "gpt_oss": "num_local_experts",
    "granitemoehybrid": "num_local_experts",
    "kimi_linear": "num_experts",
    "lfm2_moe": "num_experts",
    "llama4_text": "num_local_experts",
    "minimax_m2": "num_local_experts",
    "nemotron_h": "n_routed_experts",
    "qwen3_5_moe_text": "num_experts",
    "qwen3_next": "num_experts",
}


def language_values(values: JsonMapping) -> JsonMapping:
    """Return the settings of the language model in a config.json: those of its text, where it has images, too."""
    of_text: JsonMapping = values.get("text_config") or values
    return of_text


def in_older_keys(values: JsonMapping) -> JsonObject:
    """Return the values of a config.json that transformers 4 has under other keys, under these; none for its own files.

    ``rope_scaling`` is None for plain positions. Raises ValueError for rotary positions by kind of layer, which no
    family here has.
    """
    # transformers reads nothing of rope_parameters where a file has both.
    renamed = {} if values.get(SCALING) else _rope(values.get(ROPE))
    if values.get("model_type") in RENAMED and EXPERTS not in values and LOCAL_EXPERTS in values:
        renamed[EXPERTS] = values[LOCAL_EXPERTS]
    return renamed


def as_older(values: JsonMapping) -> JsonObject:
    """Return all values, and the values of ``in_older_keys``. Raises ValueError."""
    return {**values, **in_older_keys(values)}


def _rope(settings: object) -> JsonObject:
    if not isinstance(settings, Mapping) or not settings:
        return {}
    if by_layer := [str(name) for name, value in settings.items() if isinstance(value, Mapping)]:
        raise ValueError(f"{ROPE}: want one set for all layers, got some for {', '.join(by_layer)}")
    scaling = {name: value for name, value in settings.items() if name not in (BASE, SHARE)}
    is_plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    alone = {name: settings[name] for name in (BASE, SHARE) if name in settings}
    return {**alone, SCALING: None if is_plain else scaling}


def num_experts(values: JsonMapping) -> int:
    """Return the number of routed experts of a layer, by config.json; 0 for a dense model."""
    family = str(values.get("model_type"))
    count = values.get(EXPERTS_OF.get(family, ""))
    if count is None and family in RENAMED:
        count = values.get(LOCAL_EXPERTS)
    return count if isinstance(count, int) else 0


def sparse_layers(values: JsonMapping) -> list[bool]:
    """Return for each layer whether it has routed experts instead of one MLP, by config.json."""
    layers = range(values["num_hidden_layers"])
    if not num_experts(values):
        return [False for _ in layers]
    dense, every = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step") or 1
    first = values.get("first_k_dense_replace") or 0
    return [at not in dense and (at + 1) % every == 0 and at >= first for at in layers]


def routing_sizes(values: JsonMapping) -> tuple[int, int, int, list[int]] | None:
    """Return numbers of layers, of experts and of the experts of a token, and the layers with routed experts, by
    config.json; None for a dense model, or a family whose layers are not known here. Raises KeyError, TypeError.
    """
    family = str(values.get("model_type"))
    count = num_experts(values) or values.get(_OTHER_EXPERTS_OF.get(family, ""))
    if not count:
        return None
    kinds = _kinds_of_layers(values)
    sparse = sparse_layers(values) if family in EXPERTS_OF else [kind in ("sparse", "moe", "E") for kind in kinds]
    of_token = values.get("num_experts_per_tok") or values["num_experts_per_token"]  # the latter of kimi_linear
    return len(sparse), int(count), int(of_token), [at for at, has_experts in enumerate(sparse) if has_experts]


def _kinds_of_layers(values: JsonMapping) -> list[str]:
    """Return a name for each layer: ``sparse``, ``moe`` and ``E`` are those with experts."""
    for name in ("mlp_layer_types", "layers_block_type", "hybrid_override_pattern"):  # the last two of nemotron_h
        if values.get(name):
            return list(values[name])
    layers = range(values["num_hidden_layers"])
    if step := values.get("interleave_moe_layer_step"):  # llama4
        listed = values.get("moe_layers") or range(step - 1, len(layers), step)
        return ["sparse" if at in listed else "dense" for at in layers]
    first = values.get("first_k_dense_replace") or values.get("num_dense_layers") or 0
    return ["sparse" if at >= first else "dense" for at in layers]
