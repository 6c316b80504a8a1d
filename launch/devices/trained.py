"""The tensors that a learner trains, by Hugging Face names: all of a model, the tensors that are not frozen, or
adapters. No torch.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate

from tidemill.learner.layout.sizes import stage_layers
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.schedule import frozen_names

ROW_SPLIT = ("o_proj", "down_proj")
"""Layers with their input split over tensor-parallel ranks; of the others the output is."""

Shapes = Mapping[str, tuple[int, ...]]


def stages_of(
    tensors: Shapes, pipeline_parallel: int, virtual_pipeline: int = 1, *, edge_layers: tuple[int, int] = (0, 0)
) -> Sequence[Shapes]:
    """Return the tensors of each stage: its layers, the embedding in the first, head and final norm in the last.

    A tied embedding is in both. ``edge_layers``: of the first and of the last stage; 0 = as many as each other stage.
    """
    numbers = {name: int(name.split(".layers.")[1].split(".")[0]) for name in tensors if ".layers." in name}
    num_layers, chunks = max(numbers.values(), default=0) + 1, pipeline_parallel * virtual_pipeline
    ends = list(accumulate(stage_layers(num_layers, chunks, *edge_layers)))
    tied = not any("lm_head" in name for name in tensors)
    stages: list[dict[str, tuple[int, ...]]] = [{} for _ in range(pipeline_parallel)]
    for name, tensor in tensors.items():
        if name in numbers:
            places = {bisect(ends, numbers[name]) % pipeline_parallel}
        elif "embed" in name:
            places = {0, pipeline_parallel - 1} if tied else {0}
        else:
            places = {pipeline_parallel - 1}
        for place in places:
            stages[place][name] = tensor
    return stages


def trained_tensors(tensors: Shapes, learner: LearnerConfig) -> Shapes:
    """Return name -> shape of the tensors that have gradients and optimizer state. ``tensors``: the model's tensors."""
    if learner.lora.rank:
        return adapter_tensors(tensors, learner)
    frozen = frozen_names(learner.optimizer.freeze, list(tensors))
    return {name: tensor for name, tensor in tensors.items() if name not in frozen}


def adapter_tensors(tensors: Shapes, learner: LearnerConfig) -> Shapes:
    """Return name -> shape of the matrices of all adapters."""
    adapters: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        at, _, target = layer.rpartition(".")
        # Experts have none, neither routed nor shared ones, nor have the queries of latent attention.
        latent = target == "q_proj" and f"{at}.kv_b_proj.weight" in tensors
        if name.endswith(".weight") and "expert" not in name and not latent and target in learner.lora.targets:
            adapters[f"{layer}.lora_A"] = (learner.lora.rank, tensor[1])
            adapters[f"{layer}.lora_B"] = (tensor[0], learner.lora.rank)
    return adapters


def is_whole(name: str) -> bool:
    """Return whether every tensor-parallel rank has a whole adapter matrix: A of output-split layers, else B."""
    layer, _, letter = name.rpartition(".lora_")
    return bool(layer) and (letter == "B") is layer.endswith(ROW_SPLIT)
