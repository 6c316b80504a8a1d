"""Models of Megatron in one process on the CPU: from a learner's or Megatron's checkpoint, and into one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import load_common_state_dict

from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.tuning import Tuning
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.backend import named_dtype
from tidemill.learner.trainer.checkpoint_facts import adapters_in

ERRORS: tuple[type[Exception], ...] = (CheckpointingException,)


@contextmanager
def one_process() -> Iterator[Parallel]:
    """Form Megatron's groups of this process alone, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    ranks = groups.join(tensor_parallel_size=1, device=torch.device("cpu"), seed=0)
    try:
        yield ranks
    finally:
        groups.leave()


def read(checkpoint: Path, model_dir: Path, ranks: Parallel, *, code_path: str = "") -> tuple[MegatronPolicy, int]:
    """Return a model with the weights of a checkpoint, and its step. Raises ConfigRefused for another model."""
    lora = adapters_in(load_common_state_dict(str(checkpoint)).get("facts", {}))
    policy = build_policy(
        model_dir,
        dtype=_dtype(checkpoint),
        parallel=ranks,
        tuning=Tuning(lora=lora, trains=False),
        bridge_class=code_path,
    )
    return policy, state.load_model(checkpoint, policy=policy, setting="--model")


def write(directory: Path, model_dir: Path, ranks: Parallel, *, dtype: str, code_path: str = "") -> None:
    """Write the weights of a model directory as a checkpoint without a manifest. Raises ConfigRefused, OSError."""
    tuning = Tuning(trains=False)
    policy = build_policy(model_dir, dtype=dtype, parallel=ranks, tuning=tuning, bridge_class=code_path)
    state.save_model(directory, policy=policy)


def _dtype(checkpoint: Path) -> str:
    """Return the dtype of the weights in a checkpoint. Raises ConfigRefused for another than those of the learner."""
    tensors = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    other_prefixes = ("optimizer", "chained_", "proximal.", "reference.", "critic.")
    weights = {name: part.dtype for name, part in tensors.items() if not name.startswith(other_prefixes)}
    return named_dtype(next(iter(weights.values()), None), str(checkpoint))
