"""A rank's training state in a checkpoint, saved and loaded with Megatron's distributed checkpoints (``torch_dist``).

It consists of model, optimizer, random generators and, where there is one, the proximal weights. The caller provides a directory that no
other process uses, makes it durable afterwards, and stores position and data state. Saving and loading are collective over all ranks.
"""

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint.storage import WriteResult

from learner.checkpoints.peers import CheckpointFiles
from learner.errors import CheckpointCorrupt, ConfigRefused
from learner.megatron.checkpoint_writer import HostCopies, Staged, StagedSave
from learner.megatron.cpu_shim import megatron_device, plain_torch
from learner.megatron.model import Policy, WeightBackup
from learner.megatron.optimizer import PolicyOptimizer
from learner.megatron.peer_reader import PeerLoad

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the content of a checkpoint."""


def stage(
    directory: Path,
    *,
    step: int,
    policy: Policy,
    optimizer: PolicyOptimizer,
    proximal: WeightBackup | None = None,
    numbers: Mapping[str, float] | None = None,
    copies: HostCopies | None = None,
) -> Staged:
    """Plan this rank's part of the state after ``step`` for ``directory`` (existing and empty; on each node its own, or one for all).

    With ``copies`` the state may change afterwards; without, not before it is written. Rank 0 has written the common part then.
    ``numbers``: scalars of the algorithm, equal on all ranks; ``load`` returns them. Raises CheckpointUnwritten, MemoryReleased.
    """
    policy.memory.want("a checkpoint")
    strategy = StagedSave(copies)
    with megatron_device():
        content = _sharded(policy, optimizer, proximal, is_loading=False)
        content["rng"] = _rng_object(_rng_state())
        content["facts"] = _facts(step, proximal) | {"numbers": dict(numbers or {})}
        dist_checkpointing.save(content, str(directory), strategy)
    assert strategy.staged is not None
    return strategy.staged


def save(
    directory: Path,
    *,
    step: int,
    policy: Policy,
    optimizer: PolicyOptimizer,
    proximal: WeightBackup | None = None,
    numbers: Mapping[str, float] | None = None,
) -> None:
    """Write the state after ``step`` into a directory that all ranks share, without a manifest. Raises as ``stage``, and OSError."""
    staged = stage(directory, step=step, policy=policy, optimizer=optimizer, proximal=proximal, numbers=numbers)
    results: list[list[WriteResult] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(results, staged.write())
    if dist.get_rank() == 0:
        staged.finish([one for one in results if one is not None])
    dist.barrier()


def load(
    directory: Path,
    *,
    policy: Policy,
    optimizer: PolicyOptimizer,
    proximal: WeightBackup | None = None,
    files: CheckpointFiles | None = None,
) -> tuple[int, dict[str, float]]:
    """Load the state of ``directory``, which may have been saved by another number of ranks.

    With ``files``, which may be on other nodes, the directory needs only Megatron's metadata files. Returns the step and the numbers of
    the checkpoint. Raises CheckpointCorrupt when it has another format or lacks proximal weights that are needed, or no node has a range
    intact, and ConfigRefused when it is one of another model.
    """
    facts = load_common_state_dict(str(directory))["facts"]
    if facts["format"] != FORMAT:
        raise CheckpointCorrupt(str(directory), "common.pt", f"format {FORMAT}", facts["format"])
    if proximal is not None and not facts["proximal"]:
        raise CheckpointCorrupt(str(directory), "common.pt", "proximal weights (push_every > 1)", "none")
    with megatron_device(), policy.memory.region():
        content = _sharded(policy, optimizer, proximal, is_loading=True)
        for key in _keys(policy, "model"):
            _refuse_another_model(directory, content[key], "model.path", "the model this run began with (another one needs another run)")
        same_world = facts["world"] == dist.get_world_size()
        if same_world:
            # The object has one part for each rank that saved, so another number of ranks cannot load it.
            content["rng"] = _rng_object(None)
        # Loading calls torch for every tensor and names no CUDA device.
        with plain_torch():
            loaded = dist_checkpointing.load(content, str(directory), None if files is None else PeerLoad(files))
        _load_chunks(policy, loaded)
        optimizer.restore(loaded)
    if proximal is not None:
        proximal.restore({name: tensor for key in _keys(policy, "proximal") for name, tensor in loaded[key].items()})
    if same_world:
        _restore_rng(loaded["rng"])
    else:
        log.warning("random generators are not restored saved_by_ranks=%d loaded_by_ranks=%d", facts["world"], dist.get_world_size())
    return int(facts["step"]), dict(facts.get("numbers", {}))


def load_weights(directory: Path, *, policy: Policy, optimizer: PolicyOptimizer) -> int:
    """Load only the weights of a checkpoint, saved with any parallel layout; the optimizer starts without state.

    Returns the step of the checkpoint. Raises ConfigRefused for a checkpoint of another model.
    """
    facts = load_common_state_dict(str(directory))["facts"]
    with megatron_device(), policy.memory.region():
        model = _model(policy)
        for part in model.values():
            _refuse_another_model(directory, part, "learner.from_checkpoint", "a checkpoint of the model in model.path", exactly=True)
        with plain_torch():
            loaded = dist_checkpointing.load(model, str(directory))
        _load_chunks(policy, loaded)
        optimizer.inner.reload_model_params()  # in bfloat16, the optimizer has float32 copies of the weights
    return int(facts["step"])


def _refuse_another_model(directory: Path, model: Mapping[str, Any], setting: str, want: str, *, exactly: bool = False) -> None:
    """Raise ConfigRefused when a tensor of the model is missing in the checkpoint, or has another shape there.

    Padding of the vocabulary may differ, as between layouts, unless ``exactly``.
    """
    there = {name: tuple(part.global_shape) for name, part in dist_checkpointing.load_tensors_metadata(str(directory)).items()}
    for part in model.values():
        if not isinstance(part, ShardedTensor) or (part.allow_shape_mismatch and part.key in there and not exactly):
            continue
        if there.get(part.key) != (shape := tuple(part.global_shape)):
            found = f"has the shape {there[part.key]}" if part.key in there else "is missing"
            raise ConfigRefused(setting, f"{want}: {part.key} {found} in {directory}", shape)


def _sharded(policy: Policy, optimizer: PolicyOptimizer, proximal: WeightBackup | None, *, is_loading: bool) -> dict[str, Any]:
    model = _model(policy)
    content = {**model, **optimizer.sharded(model, is_loading=is_loading)}
    if proximal is not None:
        # The layout of the model's own shards, with the copies as their data and under other names.
        for number, (key, part) in enumerate(zip(_keys(policy, "proximal"), _model(policy).values(), strict=True)):
            before = f"{number}." if len(policy.chunks) > 1 else ""
            copies = {before + name: entry for name, entry in part.items() if before + name in proximal.tensors}
            for name, entry in copies.items():
                entry.data = proximal.tensors[name]
            add_prefix_for_sharding(copies, "proximal.")
            content[key] = copies
    return content


def _keys(policy: Policy, name: str) -> list[str]:
    """Return the places of the chunks in the content of a checkpoint. The files do not have them."""
    return [name] if len(policy.chunks) == 1 else [f"{name}{number}" for number in range(len(policy.chunks))]


def _model(policy: Policy) -> dict[str, Any]:
    """Return the sharded state of each chunk at its place."""
    return {key: chunk.sharded_state_dict() for key, chunk in zip(_keys(policy, "model"), policy.chunks, strict=True)}


def _load_chunks(policy: Policy, loaded: Mapping[str, Any]) -> None:
    for key, chunk in zip(_keys(policy, "model"), policy.chunks, strict=True):
        chunk.load_state_dict(loaded[key])


def _facts(step: int, proximal: WeightBackup | None) -> dict[str, Any]:
    return {"format": FORMAT, "step": step, "world": dist.get_world_size(), "proximal": proximal is not None}


def _rng_object(state: Any) -> ShardedObject:
    return ShardedObject("rng", state, (dist.get_world_size(),), (dist.get_rank(),))


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "python": random.getstate()}


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
