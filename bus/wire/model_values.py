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


# That key of further families, which Megatron's backend does not have
OTHER_EXPERTS_OF = {
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
_WITH_STEP = ("qwen2_moe", "qwen3_moe", "qwen3_next")  # Families with mlp_only_layers and decoder_sparse_step
_WITH_MLP_TYPES = ("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear")  # with a list mlp_layer_types
_LISTED, _LISTED_DEFAULT = "nemotron_h", "ME*-"  # The family whose files list all layers, and transformers' default

# Layers before the first one with experts, by family: the key of config.json, and transformers' default
_FIRST_DENSE = {
    "deepseek_v3": ("first_k_dense_replace", 3),
    "deepseek_v32": ("first_k_dense_replace", 3),
    "glm4_moe": ("first_k_dense_replace", 1),
    "glm4_moe_lite": ("", 1),  # no key
    "glm_moe_dsa": ("first_k_dense_replace", 3),
    "kimi_linear": ("first_k_dense_replace", 1),
    "lfm2_moe": ("num_dense_layers", 2),
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
    return _sparse_layers(values) if num_experts(values) else [False for _ in range(values["num_hidden_layers"])]


def routing_sizes(values: JsonMapping) -> tuple[int, int, int, list[int]] | None:
    """Return numbers of layers, of experts and of the experts of a token, and the layers with routed experts, by
    config.json; None for a dense model, a family whose layers are not known here, or a file without these numbers.
    """
    count = num_experts(values) or values.get(OTHER_EXPERTS_OF.get(str(values.get("model_type")), ""))
    of_token = values.get("num_experts_per_tok") or values.get("num_experts_per_token")  # the latter of kimi_linear
    has_layers = isinstance(values.get("num_hidden_layers"), int) or values.get("model_type") == _LISTED
    if not (has_layers and isinstance(count, int) and count and isinstance(of_token, int)):
        return None
    sparse = _sparse_layers(values)
    return len(sparse), count, of_token, [at for at, has_experts in enumerate(sparse) if has_experts]


def _sparse_layers(values: JsonMapping) -> list[bool]:
    """Return for each layer of a model with experts whether it has some. A key that is missing has the value that
    transformers gives it; a test compares it with transformers' classes.
    """
    family = str(values.get("model_type"))
    if family == _LISTED:
        listed = (values.get(key) for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"))
        return [kind in ("moe", "E") for kind in next((kinds for kinds in listed if kinds), _LISTED_DEFAULT)]
    if family in _WITH_MLP_TYPES and (kinds := values.get("mlp_layer_types")):
        return [kind == "sparse" for kind in kinds]
    layers = range(values["num_hidden_layers"])
    if family == "llama4_text":
        step, chosen = values.get("interleave_moe_layer_step") or 1, values.get("moe_layers")
        return [at in (range(step - 1, len(layers), step) if chosen is None else chosen) for at in layers]
    dense, every = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step") or 1
    if family not in _WITH_STEP:
        dense, every = (), 1
    key, default = _FIRST_DENSE.get(family, ("", 0))
    first = values.get(key, default) or 0
    return [at not in dense and (at + 1) % every == 0 and at >= first for at in layers]
