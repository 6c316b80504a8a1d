"""The process groups of the learner's ranks. Knows torch.distributed and Megatron's parallel state; no model."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from learner.config import LearnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Ranks, sizes and process groups of this rank, and its device."""

    rank: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How the data-parallel replicas of the model share gradients, optimizer state and weights."""

    distributed_optimizer: bool = False
    """Each replica has the optimizer state of its share of the weights, and gets the others' weights after a step."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced bucket by bucket during the last backward pass."""
    overlap_param_gather: bool = False
    """Weights are gathered bucket by bucket during the next forward pass of the same batch."""
    bucket_elements: int | None = None
    """Weights of a bucket, with overlap; None = Megatron's choice, 40 million."""


def choose_replicas(learner: LearnerConfig, here: Parallel) -> Replicas:
    """Return what the settings mean for this world: nothing with one replica, and overlap only on CUDA unless it is demanded.

    Gloo has no stream of its own: an overlapped collective gives the same bits there, and takes cores from the backward pass.
    """
    if here.dp_size == 1:
        return Replicas()
    on = {"auto": here.device.type == "cuda", "always": True, "never": False}
    return Replicas(
        distributed_optimizer=learner.distributed_optimizer,
        overlap_grad_reduce=on[learner.overlap_grad_reduce],
        overlap_param_gather=learner.distributed_optimizer and on[learner.overlap_param_gather],
    )


def choose_device(wanted: str) -> torch.device:
    """Return the device of this process for ``auto | cpu | cuda``. LOCAL_RANK selects one of several GPUs."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def choose_dtype(wanted: str, device: torch.device) -> str:
    """Return ``float32`` or ``bfloat16`` for ``auto | float32 | bfloat16`` on ``device``."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device.type == "cuda" else "float32"


def join(
    *, tensor_parallel_size: int, expert_parallel_size: int = 1, device: torch.device, seed: int, timeout_s: float = 1800.0
) -> Parallel:
    """Join the other ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT of the environment) and form Megatron's groups.

    Returns this rank's place in them. Raises ValueError when the world size is not a multiple of the tensor-parallel size, and for the
    CPU on a machine with CUDA.
    """
    # Where CUDA is present ``cpu_shim`` does nothing, and Megatron would use the GPU.
    if device.type == "cpu" and torch.cuda.is_available():
        raise ValueError("learner.device: want cuda or auto where CUDA is present (hide it with CUDA_VISIBLE_DEVICES= to train on the CPU)")
    world = int(os.environ["WORLD_SIZE"])
    if world % tensor_parallel_size:
        raise ValueError(f"WORLD_SIZE: want a multiple of tensor_parallel={tensor_parallel_size}, got {world}")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel_size,
        expert_model_parallel_size=expert_parallel_size,
        expert_tensor_parallel_size=1,  # experts are spread, not split
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:
        # The tracker for training saves and restores the generator of a CUDA device; this one does nothing. No random number is drawn in
        # a step: these models have no dropout.
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    return Parallel(
        rank=dist.get_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        dp_group=parallel_state.get_data_parallel_group(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        device=device,
    )


def leave() -> None:
    """Destroy the process groups, without waiting for the other ranks."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
