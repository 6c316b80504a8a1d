"""Checks of the weights that a run begins with and trains: checkpoints (Megatron's, too), frozen names, adapters.

A checkpoint of Megatron is compared with the model by the names and shapes in its index; no tensor is read.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tidemill.launch.checks.findings import Report
from tidemill.launch.devices.shapes import Shapes, adapter_tensors, stages_of, trained_tensors
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.checkpoints import torch_dist
from tidemill.learner.checkpoints.manifest import MANIFEST
from tidemill.learner.checkpoints.torch_dist import SETTING, TRACKER
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.backends import FSDP, MEGATRON
from tidemill.learner.settings.lora import OF_EXPERTS, TARGETS, adapter_refusals
from tidemill.learner.settings.optimizer import unmatched

_DIRECT = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_NORM_OF_ATTENTION = ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
_NORM_OF_MLP = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
_QUERY_NORM = ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight")
# Ends of Hugging Face names in a layer, after `_alike`, and of Megatron's: several where layers of Transformer Engine
# have another. Source: mbridge 0.15.1 and `sharded_state_dict` of megatron-core 0.16.1.
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
_MIXTRALS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_OF_LAYER = re.compile(r"decoder\.layers\.(.+)")
_PARTS = re.compile(r"(.+\.experts\.)(?:\d+\.)?(.+?)(?:_[wv])?|(.+?)(?:_[wv])?")

FREEZE = "learner.optimizer.freeze"
BEGINS = "learner.from_checkpoint"


def check_megatron(report: Report, config: RunConfig, tensors: Shapes, *, num_layers: int) -> None:
    """Report a checkpoint that cannot be read, or is of another model. ``tensors``: of the model's directory.

    Those of layers from ``num_layers`` on are for further tokens, which the learner does not train. With a bridge of
    the user's own, only the ranks can compare.
    """
    if not config.model.megatron_checkpoint:
        return
    where, directory = SETTING, Path(config.model.megatron_checkpoint)
    try:
        iteration = torch_dist.find(directory)
        index = torch_dist.read_index(iteration).shapes
    except (ConfigRefused, OSError) as error:
        refused = error if isinstance(error, ConfigRefused) else ConfigRefused(SETTING, torch_dist.WANTED, str(error))
        got = str(refused.got) if refused.field == SETTING else f"{refused.field}: {refused.got}"
        cure = "give a complete checkpoint, or remove the setting for the weights of model.path"
        report.error("model", where, want=refused.want, got=got, cure=cure)
        return
    layers = {name: _LAYER.fullmatch(name) for name in tensors}
    names = [name for name, layer in layers.items() if not layer or int(layer[1]) < num_layers]
    model_tensors = {name: tensors[name] for name in names}
    if difference := None if config.learner.bridge else differing(index, model_tensors):
        cure = "give a checkpoint of the model in model.path, or that model's directory"
        report.error("model", where, want=difference[0], got=f"{difference[1]} in {iteration}", cure=cure)
    else:
        text = f"{iteration}, {len(index)} tensors in its index; the run begins with the model's"
        report.good("model", f"{SETTING}: {text}")


def differing(index: Shapes, tensors: Shapes) -> tuple[str, str] | None:
    """Return the first difference between a checkpoint's index and a model, as (wanted, got); None without one."""
    in_checkpoint = _whole(index)
    used = set()
    for names, shape in expected(tensors):
        name = next((name for name in names if name in in_checkpoint), "")
        used.add(name)
        if not name or not _fits(name, in_checkpoint[name], shape):
            want = f"a tensor {' or '.join(names)} of {shape}, as the model in model.path has it"
            return want, "none" if not name else f"one of {in_checkpoint[name]}"
    surplus = sorted(name for name in in_checkpoint if name not in used and not name.startswith("mtp."))
    return ("no tensor that the model in model.path does not have", surplus[0]) if surplus else None


def _fits(name: str, got: tuple[int, ...], want: tuple[int, ...]) -> bool:
    """Return whether a shape is the wanted one. Megatron pads the vocabulary."""
    padded = name in (_DIRECT["model.embed_tokens.weight"], _DIRECT["lm_head.weight"])
    return got == want or (padded and got[1:] == want[1:] and got[0] >= want[0])


def expected(tensors: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield the possible names of each tensor of Megatron's model, layers apart, experts in one, and its shape."""
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
    experts: dict[tuple[str, ...], int] = {}
    for name, shape in tensors.items():
        if (layer := _LAYER.fullmatch(name)) is None:
            names: tuple[str, ...] = (_DIRECT[name],) if name in _DIRECT else ()
        else:
            end = _alike(layer[2])
            if expert := _EXPERT.fullmatch(end):
                end = f"mlp.experts.{expert[2]}"
            ends = _IN_LAYER.get(end, ())
            if end == "self_attn.q_proj.weight" and f"model.layers.{layer[1]}.self_attn.kv_b_proj.weight" in tensors:
                ends = ("self_attention.linear_q_proj.weight",)  # of latent attention
            names = tuple(f"decoder.layers.{layer[1]}.{ending}" for ending in ends)
            if expert:
                experts[names] = max(experts.get(names, 0), int(expert[1]) + 1)
                if expert[1] != "0":
                    continue
        if not names:  # no weight of a family that the learner has a bridge for
            continue
        before = shapes.get(names)
        shapes[names] = shape if before is None else (before[0] + shape[0], *shape[1:])
    yield from ((names, (experts[names], *shape) if names in experts else shape) for names, shape in shapes.items())


def _alike(end: str) -> str:
    """Return the end of a name in the words of most families: Mixtral and Qwen2-MoE have others."""
    end = end.replace("block_sparse_moe.", "mlp.").replace("mlp.shared_expert.", "mlp.shared_experts.")
    before, dot, last = end.removesuffix(".weight").rpartition(".")
    return f"{before}{dot}{_MIXTRALS[last]}.weight" if last in _MIXTRALS else end


def _whole(index: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the tensors in an index, with each layer apart, and experts and halves of gated layers in one."""
    of_model = {
        name: shape
        for name, shape in index.items()
        if name.startswith(("embedding.", "decoder.", "output_layer.")) and "_extra_state" not in name
    }
    apart, by_layer = torch_dist.layers_apart(of_model), dict[str, tuple[int, ...]]()
    for name, shape in of_model.items():
        layer = _OF_LAYER.fullmatch(name)
        if layer is not None and not apart:
            by_layer |= {f"decoder.layers.{number}.{layer[1]}": shape[1:] for number in range(shape[0])}
        else:
            by_layer[name] = shape
    return by_layer if not torch_dist.parts_apart(of_model) else _merged(by_layer)


def _merged(apart: Shapes) -> dict[str, tuple[int, ...]]:
    merged: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, int] = {}
    for name, shape in apart.items():
        parts = _PARTS.fullmatch(name)
        assert parts is not None
        merged_name = parts[1] + parts[2] if parts[1] else parts[3]
        shape = (2 * shape[0], *shape[1:]) if name.endswith(("weight_w", "weight_v")) else shape
        numbers[merged_name] = numbers.get(merged_name, 0) + (not name.endswith("weight_v"))
        merged[merged_name] = shape
    return {name: (numbers[name], *shape) if ".experts." in name else shape for name, shape in merged.items()}


def check_tuning(report: Report, config: RunConfig, tensors: Shapes, *, backend: str = MEGATRON) -> None:
    """Report patterns that name no weight or all of them, and adapters that do not fit. ``tensors``: the model's."""
    learner = config.learner
    names = list(tensors)
    for pattern in unmatched(learner.optimizer.freeze, names):
        cure = "use the names of the model's safetensors, such as ^model.embed_tokens or layers.[0-3][.]"
        want = "patterns that are found in names of the model's weights"
        report.error("model", FREEZE, want=want, got=repr(pattern), cure=cure)
    if learner.lora.rank:
        _check_targets(report, config, tensors, backend)
    setting, choice = FREEZE, learner.optimizer.freeze
    if learner.lora.rank:
        setting, choice = "learner.lora.targets", learner.lora.targets
    stages = stages_of(tensors, learner.pipeline_parallel, learner.virtual_pipeline, edge_layers=learner.edge_layers)
    idle = [number for number, stage in enumerate(stages) if not trained_tensors(stage, learner, backend=backend)]
    if len(idle) == len(stages):
        cure = "leave weights to train"
        got = repr(list(learner.optimizer.freeze))
        report.error("model", FREEZE, want="weights that are trained", got=got, cure=cure)
    elif idle:
        got = f"{list(choice)}: stage {idle[0]} would train nothing"
        want = "weights that are trained in every stage of the pipeline"
        cure = "lower learner.pipeline_parallel, or choose other layers"
        report.error("model", setting, want=want, got=got, cure=cure)
    if learner.from_checkpoint:
        _check_beginning(report, Path(learner.from_checkpoint))
    for refused in adapter_refusals(learner.lora):
        cure = "give the settings of the adapters, or another directory"
        report.error("model", refused.field, want=refused.want, got=repr(refused.got), cure=cure)


def _check_targets(report: Report, config: RunConfig, tensors: Shapes, backend: str) -> None:
    """Report targets of adapters that the model lacks, or that this backend does not adapt."""
    every = replace(config.learner.lora, targets=(*TARGETS, *OF_EXPERTS))
    present = {_target_of(name) for name in adapter_tensors(tensors, every, backend=backend)}
    missing = set(config.learner.lora.targets) - present
    if backend == FSDP and not present & set(OF_EXPERTS) and any("expert" in name or "moe" in name for name in tensors):
        missing -= set(OF_EXPERTS)  # experts with names in files that are not known here: the ranks find them
    if missing:
        layers = f"layers of this model that can have adapters ({', '.join(sorted(present)) or 'none'})"
        want = layers if backend == FSDP else f"{layers}; experts have none"
        cure = "leave them out"
        if backend == MEGATRON and missing & set(OF_EXPERTS):
            cure += ", or set learner.backend=fsdp, which adapts experts"
        report.error("model", "learner.lora.targets", want=want, got=", ".join(sorted(missing)), cure=cure)


def _target_of(name: str) -> str:
    """Return the target that a matrix of an adapter belongs to."""
    layer, _, letter = name.partition(".lora_")
    return f"experts.{letter[2:]}" if letter[1:] else layer.rpartition(".")[2]


def _check_beginning(report: Report, directory: Path) -> None:
    """Report a directory that is no checkpoint of Tidemill; its content is verified when the run starts."""
    if (directory / MANIFEST).is_file() and (directory / "common.pt").is_file():
        return
    got, cure = f"{directory}: no {MANIFEST}", "give a directory below checkpoints/ of a run"
    if not directory.is_dir():
        got = f"{directory}: no such directory"
    elif (directory / "config.json").is_file():
        got = f"{directory}: a model directory"
        cure = "make it model.path, or convert it: tidemill convert MODEL CHECKPOINT"
    elif (directory / "common.pt").is_file() or (directory / TRACKER).is_file():
        got += ", as in checkpoints of Megatron itself"
        cure = "make it model.megatron_checkpoint"
    report.error("model", BEGINS, want="a checkpoint of Tidemill", got=got, cure=cure)
