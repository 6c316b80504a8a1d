"""Check of ``model.megatron_checkpoint``: files, names and shapes, from the checkpoint's index. Reads no tensor, loads no torch."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tidemill.launch.checks.findings import Report
from tidemill.launch.devices.trained import Shapes
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.checkpoints import torch_dist
from tidemill.learner.checkpoints.torch_dist import SETTING
from tidemill.learner.errors import ConfigRefused

_DIRECT = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_NORM_OF_ATTENTION = ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
_NORM_OF_MLP = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
_QUERY_NORM = ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight")
_IN_LAYER: Mapping[str, tuple[str, ...]] = {
    **{f"self_attn.{name}_proj.weight": ("self_attention.linear_qkv.weight",) for name in "qkv"},
    **{f"self_attn.{name}_proj.bias": ("self_attention.linear_qkv.bias",) for name in "qkv"},
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "self_attn.q_a_proj.weight": ("self_attention.linear_q_down_proj.weight",),
    "self_attn.q_b_proj.weight": ("self_attention.linear_q_up_proj.weight",),
    "self_attn.q_a_layernorm.weight": _QUERY_NORM,
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attention.linear_kv_down_proj.weight",),
    "self_attn.kv_b_proj.weight": ("self_attention.linear_kv_up_proj.weight",),
    "self_attn.kv_a_layernorm.weight": tuple(name.replace("q_", "kv_") for name in _QUERY_NORM),
    "input_layernorm.weight": _NORM_OF_ATTENTION,
    "post_attention_layernorm.weight": _NORM_OF_MLP,
    "post_self_attn_layernorm.weight": ("self_attention.post_norm.weight",),
    "post_mlp_layernorm.weight": ("mlp.post_norm.weight",),
    **{f"mlp.{name}_proj.weight": ("mlp.linear_fc1.weight",) for name in ("gate", "up", "gate_up")},
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
    "mlp.gate.weight": ("mlp.router.weight",),
    "mlp.gate.e_score_correction_bias": ("mlp.router.expert_bias",),
    **{f"mlp.experts.{name}_proj.weight": ("mlp.experts.experts.linear_fc1.weight",) for name in ("gate", "up")},
    "mlp.experts.down_proj.weight": ("mlp.experts.experts.linear_fc2.weight",),
    **{f"mlp.shared_experts.{name}_proj.weight": ("mlp.shared_experts.linear_fc1.weight",) for name in ("gate", "up")},
    "mlp.shared_experts.down_proj.weight": ("mlp.shared_experts.linear_fc2.weight",),
    "mlp.shared_expert_gate.weight": ("mlp.shared_experts.gate_weight",),
}
"""Ends of Hugging Face names in a layer, after ``_alike``, and of Megatron's: several where layers of Transformer Engine have another.
Source: mbridge 0.15.1 and ``sharded_state_dict`` of megatron-core 0.16.1."""
_MIXTRALS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_OF_LAYER = re.compile(r"decoder\.layers\.(.+)")
_PARTS = re.compile(r"(.+\.experts\.)(?:\d+\.)?(.+?)(?:_[wv])?|(.+?)(?:_[wv])?")


def check_megatron(report: Report, config: RunConfig, tensors: Shapes, *, num_layers: int) -> None:
    """Report a checkpoint that cannot be read, or that is one of another model. ``tensors``: those of the model's directory.

    Those of layers from ``num_layers`` on are for further tokens, which the learner does not train. With a bridge of the user's own, only
    the ranks can compare.
    """
    if not config.model.megatron_checkpoint:
        return
    where, directory = report.at(SETTING), Path(config.model.megatron_checkpoint)
    try:
        iteration = torch_dist.find(directory)
        there = torch_dist.read_index(iteration).shapes
    except (ConfigRefused, OSError) as error:
        refused = error if isinstance(error, ConfigRefused) else ConfigRefused(SETTING, torch_dist.WANTED, str(error))
        got = str(refused.got) if refused.field == SETTING else f"{refused.field}: {refused.got}"
        cure = "give a complete checkpoint, or remove the setting for the weights of model.path"
        report.error("model", where, want=refused.want, got=got, cure=cure)
        return
    own = {name: shape for name, shape in tensors.items() if not (layer := _LAYER.fullmatch(name)) or int(layer[1]) < num_layers}
    if difference := None if config.learner.bridge else differing(there, own):
        cure = "give a checkpoint of the model in model.path, or that model's directory"
        report.error("model", where, want=difference[0], got=f"{difference[1]} in {iteration}", cure=cure)
    else:
        report.good("model", f"{SETTING}: {iteration}, {len(there)} tensors in its index; the run begins with the model's")


def differing(there: Shapes, tensors: Shapes) -> tuple[str, str] | None:
    """Return the first difference between the index of a checkpoint and a model, as (wanted, got); None if there is none."""
    found = _whole(there)
    used = set()
    for names, shape in expected(tensors):
        name = next((name for name in names if name in found), "")
        used.add(name)
        if not name or not _fits(name, found[name], shape):
            want = f"a tensor {' or '.join(names)} of {shape}, as the model in model.path has it"
            return want, "none" if not name else f"one of {found[name]}"
    more = sorted(name for name in found if name not in used and not name.startswith("mtp."))
    return ("no tensor that the model in model.path does not have", more[0]) if more else None


def _fits(name: str, got: tuple[int, ...], want: tuple[int, ...]) -> bool:
    """Return whether a shape is the wanted one. Megatron pads the vocabulary."""
    padded = name in (_DIRECT["model.embed_tokens.weight"], _DIRECT["lm_head.weight"])
    return got == want or (padded and got[1:] == want[1:] and got[0] >= want[0])


def expected(tensors: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield the possible names of each tensor of Megatron's model, with each layer apart and all experts in one, and its shape."""
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    experts: dict[tuple[str, ...], int] = {}
    for name, shape in tensors.items():
        if (layer := _LAYER.fullmatch(name)) is None:
            names: tuple[str, ...] = (_DIRECT[name],) if name in _DIRECT else ()
        else:
            end = _alike(layer[2])
            if expert := _EXPERT.fullmatch(end):
                end = f"mlp.experts.{expert[2]}"
            latent = end == "self_attn.q_proj.weight" and f"model.layers.{layer[1]}.self_attn.kv_b_proj.weight" in tensors
            ends = ("self_attention.linear_q_proj.weight",) if latent else _IN_LAYER.get(end, ())
            names = tuple(f"decoder.layers.{layer[1]}.{one}" for one in ends)
            if expert:
                experts[names] = max(experts.get(names, 0), int(expert[1]) + 1)
                if expert[1] != "0":
                    continue
        if not names:  # no weight of a family that the learner has a bridge for
            continue
        before = found.get(names)
        found[names] = shape if before is None else (before[0] + shape[0], *shape[1:])
    yield from ((names, (experts[names], *shape) if names in experts else shape) for names, shape in found.items())


def _alike(end: str) -> str:
    """Return the end of a name in the words of most families: Mixtral and Qwen2-MoE have others."""
    end = end.replace("block_sparse_moe.", "mlp.").replace("mlp.shared_expert.", "mlp.shared_experts.")
    before, dot, last = end.removesuffix(".weight").rpartition(".")
    return f"{before}{dot}{_MIXTRALS[last]}.weight" if last in _MIXTRALS else end


def _whole(there: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the model in an index, with each layer apart, and experts and halves of gated layers in one."""
    of_model = {
        name: shape
        for name, shape in there.items()
        if name.startswith(("embedding.", "decoder.", "output_layer.")) and "_extra_state" not in name
    }
    apart, found = torch_dist.layers_apart(of_model), dict[str, tuple[int, ...]]()
    for name, shape in of_model.items():
        layer = _OF_LAYER.fullmatch(name)
        if layer is not None and not apart:
            found |= {f"decoder.layers.{number}.{layer[1]}": shape[1:] for number in range(shape[0])}
        else:
            found[name] = shape
    return found if not torch_dist.parts_apart(of_model) else _merged(found)


def _merged(found: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the tensors with experts, and the halves of gated layers, in one."""
    merged: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, int] = {}
    for name, shape in found.items():
        parts = _PARTS.fullmatch(name)
        assert parts is not None
        whole = parts[1] + parts[2] if parts[1] else parts[3]
        shape = (2 * shape[0], *shape[1:]) if name.endswith(("weight_w", "weight_v")) else shape
        numbers[whole] = numbers.get(whole, 0) + (not name.endswith("weight_v"))
        merged[whole] = shape
    return {name: (numbers[name], *shape) if ".experts." in name else shape for name, shape in merged.items()}
