"""A small configuration of the same class: every kind of layer once or twice, few hidden units.

Sizes on which others depend (heads, ranks of latent attention, states) stay as they are. What makes a model large is
cut: layers, hidden units, heads, experts, vocabulary.
"""

import copy
from typing import Any

from tidemill.learner.backends.fsdp.family import Family

HIDDEN, HEADS, VOCABULARY = 64, 4, 128
_LIMITS = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 8),
    "index_topk": 8,
    "max_window_layers": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    "zero_expert_num": 2,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    "n_group": 2,
    "topk_group": 1,
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_n_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_num_heads", "mamba_n_heads"), HEADS),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    "num_nextn_predict_layers": 0,
}
"""Largest values by the names of transformers' settings."""
_WIDTHS, _WIDTH = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"), 32
"""Ends of the names of sizes within layers that nothing else depends on, and their largest value."""
_INDICES = ("full_attn_idxs", "moe_layers", "mlp_only_layers", "moe_layer_indices")
"""Settings that list the numbers of layers."""
_MOST_LAYERS = 8
Settings = dict[str, Any]


def small_config(config: Any, family: Family) -> Any:
    """Return a configuration of the same class with 2 to 8 small layers: the kinds of layers of the model, in order.

    ``family``: its rules. Windows, chunks, scales and caps stay; windows and chunks become shorter than the sequences
    of the self-test.
    """
    return type(config).from_dict(_small(config.to_dict(), config, family))


def _small(settings: Settings, config: Any, family: Family) -> Settings:
    """Return the settings of a small model of the same class as ``config``, whose settings they are."""
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    inner = {name: _small(settings[name], part, family) for name, part in parts.items() if part is not None}
    own = {native: name for name, native in config.attribute_map.items()}  # transformers' common name of a setting
    common = {own.get(name, name): value for name, value in copy.deepcopy(settings).items() if name not in inner}
    for name in ("_name_or_path", "dtype", "quantization_config"):
        common.pop(name, None)
    if hasattr(config, "num_hidden_layers"):
        if "num_attention_heads" in common:
            _cut_sizes(common)
        else:  # states alone: falcon_mamba
            _limit(common, 0)
        _cut_layers(common, config.num_hidden_layers)
        family.fit(common)
    if common.get("pad_token_id") is not None:
        common["pad_token_id"] = 0
    return {**{config.attribute_map.get(name, name): value for name, value in common.items()}, **inner}


def _cut_sizes(settings: Settings) -> None:
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    own_size = settings.get("head_dim") or settings.get("v_head_dim")
    head_size = own_size or hidden // heads
    kept_heads = min(heads, HEADS)
    for part in (settings, *(settings.get("per_layer_config") or {}).values()):
        _limit(part, heads)
    # Some layers take the hidden size for that of all heads together.
    bound = hidden == heads * head_size or not own_size
    settings["hidden_size"] = kept_heads * head_size if bound else min(hidden, HIDDEN)
    if "mamba_expand" in settings and "mamba_n_heads" in settings:
        settings["mamba_d_head"] = settings["mamba_expand"] * settings["hidden_size"] // settings["mamba_n_heads"]


def _limit(settings: Settings, heads: int) -> None:
    """Cut sizes that stand for themselves. ``heads``: of the whole model."""
    for name, value in settings.items():
        limit = _LIMITS.get(name, _WIDTH if name.endswith(_WIDTHS) else None)
        settings[name] = value if limit is None else _limited(value, limit)
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if isinstance(groups := settings.get(name), int):
            of_layer = settings.get("num_attention_heads", heads)
            settings[name] = min(of_layer, HEADS) if groups == of_layer else min(groups, HEADS // 2)
    if "num_attention_heads" in settings:
        settings["num_attention_heads"] = min(settings["num_attention_heads"], HEADS)


def _limited(value: Any, largest: int) -> Any:
    if isinstance(value, list):
        return [_limited(item, largest) for item in value]
    return min(value, largest) if isinstance(value, int) and not isinstance(value, bool) else value


def _cut_layers(settings: Settings, layers: int) -> None:
    """Keep the first layer of each kind, and as many again where later layers share what earlier ones computed."""
    special = {int(number): values for number, values in (settings.get("per_layer_config") or {}).items()}
    lists = {name: value for name, value in settings.items() if isinstance(value, list) and len(value) == layers}
    kinds = [
        (*(repr(value[number]) for value in lists.values()), repr(special.get(number))) for number in range(layers)
    ]
    kept = sorted({kinds.index(kind) for kind in kinds})[:_MOST_LAYERS]
    kept = kept if len(kept) > 1 else list(range(min(layers, 2)))
    if settings.get("num_kv_shared_layers"):
        settings["num_kv_shared_layers"] = len(kept)
        kept = [*kept, *kept]
    settings.update({name: [value[number] for number in kept] for name, value in lists.items()})
    if "num_hidden_layers" in settings:  # nemotron_h counts its list
        settings["num_hidden_layers"] = len(kept)
    if special:
        settings["per_layer_config"] = {
            place: special[number] for place, number in enumerate(kept) if number in special
        }
    for name in _INDICES:
        if isinstance(listed := settings.get(name), list):
            settings[name] = [place for place, number in enumerate(kept) if number in listed]
