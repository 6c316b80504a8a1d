"""The weights of a model: initial ones from its Hugging Face directory or from a checkpoint of Megatron's own training,
and the choice of the weights that are trained.

Megatron's checkpoint may be of any layout: tensors are found by their names and global shapes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.backends.megatron.cpu_shim import plain_torch
from tidemill.learner.backends.megatron.layers.dense import freeze_linears
from tidemill.learner.backends.megatron.layers.lora import MegatronAdapters, is_adapter
from tidemill.learner.checkpoints import torch_dist
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel, values_of_stages
from tidemill.learner.settings.lora import Tuning
from tidemill.learner.settings.optimizer import is_frozen

OTHER_NAMES = {
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Ends of the keys of norms of mixtures and latent attention: in Megatron's own layers, and in those of Transformer
Engine, with which Megatron trains on CUDA. Source: ``gpt_layer_specs.py`` of megatron-core 0.16.1.
"""
_OF_THE_MODEL = ("embedding.", "decoder.", "output_layer.")
"""Beginnings of the names of all trained tensors; layers for further tokens (``mtp.``) are left out."""


def load_initial(bridge: Any, chunks: Sequence[GPTModel], model_dir: Path, checkpoint: Path | None) -> None:
    """Initial weights of a model, from its directory or a checkpoint of Megatron's own training, of any layout."""
    if checkpoint is None:
        bridge.load(chunks, model_dir)
    else:
        iteration = torch_dist.find(checkpoint)
        seen: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(seen, torch_dist.described(iteration))
        if len(set(seen)) > 1:  # nodes with disks of their own
            raise ConfigRefused(torch_dist.SETTING, "one checkpoint on all nodes", sorted(set(seen)))
        load_megatron(iteration, chunks, setting=torch_dist.SETTING)


def load_megatron(iteration: Path, chunks: Sequence[GPTModel], *, setting: str) -> int:
    """Load the weights of one iteration of Megatron's training, as ``load_initial``. Returns its number."""
    stored = torch_dist.read_index(iteration).shapes
    content: dict[str, JsonObject] = {}
    for number, chunk in enumerate(chunks):
        entries = {name: entry for name, entry in _sharded(chunk, stored).items() if not is_adapter(name)}
        content[str(number)] = {name: entry for name, entry in entries.items() if not isinstance(entry, ShardedObject)}
        _take_other_names(content[str(number)], stored)
        refuse_another_model(iteration, content[str(number)], setting, "a checkpoint of the model in model.path")
    with plain_torch():
        loaded, unused, _ = dist_checkpointing.load(content, str(iteration), strict="return_all")
    if unread := sorted(name for name in unused if name.startswith(_OF_THE_MODEL) and "_extra_state" not in name):
        raise ConfigRefused(
            setting,
            "a checkpoint of the model in model.path, and of no more layers or parts",
            f"{unread[0]} in {iteration}",
        )
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[str(number)] | _without_data(chunk))
    return int(loaded.get("iteration", 0))


def _sharded(chunk: GPTModel, stored: Mapping[str, object]) -> JsonObject:
    """Return the sharded state of a chunk, with layers and experts in one tensor or apart, as in the checkpoint."""
    metadata = {
        "non_homogeneous_layers": torch_dist.layers_apart(stored),
        "singleton_local_shards": torch_dist.parts_apart(stored),
    }
    listed = chunk.config.moe_layer_freq
    if isinstance(listed, list) and all(listed):
        chunk.config.moe_layer_freq = 1  # the same; but with a list Megatron gives each layer tensors of its own
    try:
        entries: JsonObject = chunk.sharded_state_dict(metadata=metadata)
    finally:
        chunk.config.moe_layer_freq = listed
    return entries


def _without_data(chunk: GPTModel) -> JsonObject:
    """Return the entries of a chunk that are in no checkpoint of every kind of layers."""
    return {
        name: value for name, value in chunk.state_dict().items() if name.endswith("_extra_state") or is_adapter(name)
    }


def _take_other_names(part: JsonMapping, stored: Collection[str]) -> None:
    """Change the keys that are missing in a checkpoint to the names of Megatron's layers of Transformer Engine."""
    for tensor in part.values():
        for ours, theirs in OTHER_NAMES.items():
            if isinstance(tensor, ShardedTensor) and tensor.key not in stored and tensor.key.endswith(ours):
                stored_name = tensor.key.removesuffix(ours) + theirs
                tensor.key = stored_name if stored_name in stored else tensor.key


def refuse_another_model(
    directory: Path, model: JsonMapping, setting: str, want: str, *, exactly: bool = False
) -> None:
    """Raise ConfigRefused when a tensor of the model is missing in the checkpoint, or has another shape there.

    It may have more rows of the vocabulary, which Megatron pads by a setting of its command line, unless ``exactly``.
    """
    stored = {
        name: tuple(part.global_shape)
        for name, part in dist_checkpointing.load_tensors_metadata(str(directory)).items()
    }
    for part in _tensors(model):
        shape, stored_shape = tuple(part.global_shape), stored.get(part.key)
        if (
            stored_shape is not None
            and part.allow_shape_mismatch
            and not exactly
            and stored_shape[1:] == shape[1:]
            and stored_shape[0] > shape[0]
        ):
            continue
        if stored_shape != shape:
            got = f"has the shape {stored_shape}" if stored_shape is not None else "is missing"
            raise ConfigRefused(setting, f"{want}: {part.key} {got} in {directory}", shape)


def _tensors(model: JsonMapping) -> Iterator[ShardedTensor]:
    """Yield the sharded tensors of a model, also the tensors that factories make of the halves of a gated layer."""
    for entry in model.values():
        parts = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        yield from (part for part in parts if isinstance(part, ShardedTensor))


def tune(chunks: Sequence[GPTModel], bridge: Any, parallel: Parallel, tuning: Tuning) -> MegatronAdapters | None:
    """Freeze weights and add adapters, before the chunks are wrapped for data parallelism. Returns the adapters. Raises
    ConfigRefused.
    """
    adapters = None
    if tuning.lora.rank:
        adapters = MegatronAdapters(chunks, bridge, parallel, tuning.lora, seed=tuning.seed)
    elif tuning.freeze:
        _freeze(chunks, bridge, parallel, tuning.freeze)
    for chunk in chunks:
        if not tuning.trains:
            chunk.requires_grad_(False)
        freeze_linears(chunk)
        needed = chunk.config.recompute_granularity or len(chunks) > 1
        embedding = getattr(chunk, "embedding", None) if needed else None
        if embedding is not None and not any(parameter.requires_grad for parameter in embedding.parameters()):
            # A recomputed layer that gets an input without gradient returns an output that has none, and nothing in it
            # would be trained. Of several chunks one may have nothing to train, and Megatron's schedule goes back
            # through it. Elsewhere the backward pass ends at the lowest weight that is trained.
            embedding.register_forward_hook(_with_gradient)
    return adapters


def _with_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_(True)


def _freeze(chunks: Sequence[GPTModel], bridge: Any, parallel: Parallel, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters every part of which the patterns name."""
    for chunk in chunks:
        for name, whole_name in bridge.names(chunk):
            parameter = dict(chunk.named_parameters()).get(name)
            if parameter is None:
                continue
            names = bridge._weight_name_mapping_mcore_to_hf(whole_name)
            parameter.requires_grad_(not is_frozen(patterns, names, "Megatron"))
    trains = values_of_stages(
        any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()), parallel
    )
    if not any(trains):
        raise ConfigRefused("learner.optimizer.freeze", "patterns that leave weights to train", list(patterns))
    if not all(trains):
        want = "patterns that leave weights to train in every stage, or a lower learner.pipeline_parallel"
        raise ConfigRefused(
            "learner.optimizer.freeze", want, f"{list(patterns)}, which leave none in stage {trains.index(False)}"
        )
