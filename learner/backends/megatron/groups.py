"""Megatron's process groups, and how the replicas of a model share gradients, optimizer state and weights."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tidemill.learner.layout.parallel import Parallel, join_world
from tidemill.learner.settings.config import LearnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Sharing of gradients, optimizer state and weights among the data-parallel replicas of the model."""

    distributed_optimizer: bool = False
    """Each replica has the optimizer state of its share of the weights, and gets the others' weights after a step."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced bucket by bucket during the last backward pass."""
    overlap_param_gather: bool = False
    """Weights are gathered bucket by bucket during the next forward pass of the same batch."""
    bucket_elements: int | None = None
    """Weights of a bucket, with overlap; None = Megatron's choice, 40 million."""


def choose_replicas(learner: LearnerConfig, ranks: Parallel) -> Replicas:
    """Return the sharing for the settings and this world: overlap only on CUDA unless it is demanded.

    Gloo has no stream of its own: an overlapped collective takes cores from the backward pass. Megatron's interleaved
    schedule (virtual stages) ends with an error where one of its chunks has been reduced early.
    """
    if ranks.dp_size * ranks.cp_size == 1:
        return Replicas()
    on = {"auto": ranks.device.type == "cuda" and ranks.vp_size == 1, "always": True, "never": False}
    return Replicas(
        distributed_optimizer=learner.distributed_optimizer,
        overlap_grad_reduce=on[learner.overlap_grad_reduce],
        overlap_param_gather=learner.distributed_optimizer and on[learner.overlap_param_gather],
    )


def join(
    *,
    tensor_parallel_size: int,
    device: torch.device,
    seed: int,
    timeout_s: float = 1800.0,
    pipeline_parallel_size: int = 1,
    virtual_pipeline_size: int = 1,
    edge_layers: tuple[int, int] = (0, 0),
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    sequence_parallel: bool = False,
) -> Parallel:
    """Join the other ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT of the environment) and form Megatron's groups.

    Returns this rank's place in them. Raises ValueError for a world size that is no multiple of the ranks of one
    replica, and for the CPU on a machine with CUDA.
    """
    # Where CUDA is present ``cpu_shim`` does nothing, and Megatron would use the GPU.
    if device.type == "cpu" and torch.cuda.is_available():
        raise ValueError(
            "learner.device: want cuda or auto where CUDA is present (hide it with CUDA_VISIBLE_DEVICES= to "
            "train on the CPU)"
        )
    world = int(os.environ["WORLD_SIZE"])
    if world % (model := tensor_parallel_size * pipeline_parallel_size * context_parallel_size):
        sizes = f"{tensor_parallel_size} x {pipeline_parallel_size} x {context_parallel_size}"
        raise ValueError(
            f"WORLD_SIZE: want a multiple of {model}, tensor x pipeline x context parallel = {sizes}, got {world}"
        )
    join_world(device, timeout_s=timeout_s)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel_size,
        pipeline_model_parallel_size=pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size if virtual_pipeline_size > 1 else None,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_parallel_size,
        expert_tensor_parallel_size=1,  # experts are spread, not split
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:
        # The tracker for training saves and restores the generator of a CUDA device; this one does nothing. No random
        # number is drawn in a step: these models have no dropout.
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    return _place_here(device, virtual_pipeline_size, edge_layers, sequence_parallel=sequence_parallel)


def _place_here(
    device: torch.device, virtual_pipeline_size: int, edge_layers: tuple[int, int], *, sequence_parallel: bool
) -> Parallel:
    return Parallel(
        rank=dist.get_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        dp_group=parallel_state.get_data_parallel_group(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        device=device,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        vp_size=virtual_pipeline_size,
        edge_layers=edge_layers,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_group=parallel_state.get_context_parallel_group(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
    )


def leave() -> None:
    """Destroy the process groups, without waiting for the other ranks."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
