"""A rank's training state in a checkpoint, saved and loaded with Megatron's distributed checkpoints (``torch_dist``).

It consists of model, optimizer, random generators and, where there are any, proximal weights, a changing reference and
a critic. Saving and loading are collective over all ranks; the caller makes the directory durable.

Files are written and read by strategies of our own: Megatron's writer starts helper processes even for a synchronous
save: a spawned manager, which outlives a killed rank, and forks of a process that has threads. The files are the same,
and Megatron's loader reads them.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.learner.backends.megatron.cpu_shim import megatron_device, plain_torch
from tidemill.learner.backends.megatron.layers.lora import is_adapter
from tidemill.learner.backends.megatron.model import MegatronPolicy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.backends.megatron.weights import load_megatron, refuse_another_model
from tidemill.learner.checkpoints.remote_files import CheckpointFiles
from tidemill.learner.checkpoints.staged_files import (
    HostCopies,
    PeerFiles,
    Staged,
    corrupt_files,
    stage_files,
    write_staged,
)
from tidemill.learner.trainer.backups import NO_OTHER_MODELS, OtherModels, WeightBackup
from tidemill.learner.trainer.checkpoint_facts import (
    facts_of,
    refuse_another_run,
    refuse_other_backend,
    refuse_other_beginning,
    restore_rng,
    rng_state,
    torch_reason,
)
from tidemill.learner.trainer.critic import Critic

log = logging.getLogger(__name__)

KIND = "megatron"


class StagedSave(TorchDistSaveShardedStrategy):
    """Save strategy for ``dist_checkpointing.save`` that writes nothing: ``staged`` has the tensors. Collective."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        """``copies``: memory for copies, so that the tensors may change after ``save``; None = no copies."""
        super().__init__("torch_dist", 1)
        self._copies = copies
        self.staged: Staged | None = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Plan the files with all ranks, and copy this rank's shards. Raises CheckpointUnwritten, on every rank."""
        # As Megatron's own strategy does, so that its loader finds the same keys.
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        state = mcore_to_pyt_state_dict(renamed, False)
        self.staged = stage_files(state, planner, Path(checkpoint_dir), self._copies)


class PeerLoad(TorchDistLoadShardedStrategy):
    """Megatron's load strategy with files from this node or another, for which it has no parameter."""

    def __init__(self, files: CheckpointFiles) -> None:
        super().__init__()
        self._files = files

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Return the loaded content of the sharded state. Collective. Raises CheckpointCorrupt, on every rank."""
        tensors = [part for part in nested_values(sharded_state_dict) if isinstance(part, ShardedTensor)]
        renamed, flat, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        content = mcore_to_pyt_state_dict(renamed, True)
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[part for part in tensors if not part.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={part.key: part for part in tensors if part.allow_shape_mismatch},
        )
        reader = CachedMetadataFileSystemReader(Path(checkpoint_dir))
        reader.fs = PeerFiles(self._files, Path(checkpoint_dir))
        with warnings.catch_warnings(), corrupt_files():
            # Megatron uses this function, too: it loads in place, and ranks may have different keys.
            warnings.filterwarnings("ignore", message=".*load_state_dict.*", category=FutureWarning)
            torch_checkpoint.load_state_dict(content, reader, planner=planner)
        plain = {key: _unwrap_pyt_sharded_tensor(value) for key, value in content.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(plain, flat, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


def stage(
    directory: Path,
    *,
    step: int,
    policy: MegatronPolicy,
    optimizer: MegatronOptimizer,
    others: OtherModels = NO_OTHER_MODELS,
    numbers: Mapping[str, float] | None = None,
    copies: HostCopies | None = None,
) -> Staged:
    """``Backend.stage``. Rank 0 writes the common part here already; the strategy writes no tensors."""
    policy.memory.want("a checkpoint")
    strategy = StagedSave(copies)
    with megatron_device():
        content = _sharded(policy, optimizer, others, is_loading=False)
        content["rng"] = _rng_object(rng_state())
        content["facts"] = facts_of(step, policy, others) | {
            "optimizer": optimizer.kind,
            "numbers": dict(numbers or {}),
        }
        with torch_reason(directory):
            dist_checkpointing.save(content, str(directory), strategy)
    assert strategy.staged is not None
    return strategy.staged


def load(
    directory: Path,
    *,
    policy: MegatronPolicy,
    optimizer: MegatronOptimizer,
    others: OtherModels = NO_OTHER_MODELS,
    files: CheckpointFiles | None = None,
) -> tuple[int, dict[str, float]]:
    """``Backend.load``. Random generators are restored where as many ranks have saved."""
    refuse_other_backend(directory, KIND)
    facts = load_common_state_dict(str(directory))["facts"]
    refuse_another_run(directory, facts, policy, optimizer, others)
    with megatron_device(), policy.memory.region():
        content = _sharded(policy, optimizer, others, is_loading=True)
        want = "the model this run began with (another one needs another run)"
        _refuse_other_chunks(directory, content, policy, "model.path", want)
        if others.critic is not None:
            want = "the critic this run began with"
            _refuse_other_chunks(directory, content["critic"], _parts(others.critic)[0], "learner.critic.path", want)
        same_world = facts["world"] == dist.get_world_size()
        if same_world:
            # The object has one part for each rank that saved, so another number of ranks cannot load it.
            content["rng"] = _rng_object(None)
        # Loading calls torch for every tensor and names no CUDA device.
        with plain_torch():
            loaded = dist_checkpointing.load(content, str(directory), None if files is None else PeerLoad(files))
        _load_chunks(policy, loaded)
        optimizer.restore(loaded)
        if others.critic is not None:
            model, critic_optimizer = _parts(others.critic)
            _load_chunks(model, loaded["critic"])
            critic_optimizer.restore(loaded["critic"])
    for name, copies in (("proximal", others.proximal), ("reference", others.reference)):
        if copies is not None:
            copies.restore(
                {parameter: tensor for key in _keys(policy, name) for parameter, tensor in loaded[key].items()}
            )
    if same_world:
        restore_rng(loaded["rng"])
    else:
        world = dist.get_world_size()
        log.warning("random generators are not restored saved_by_ranks=%d loaded_by_ranks=%d", facts["world"], world)
    return int(facts["step"]), dict(facts.get("numbers", {}))


def _refuse_other_chunks(
    directory: Path, content: JsonMapping, policy: MegatronPolicy, setting: str, want: str
) -> None:
    for key in _keys(policy, "model"):
        refuse_another_model(directory, content[key], setting, want)


def load_weights(directory: Path, *, policy: MegatronPolicy, optimizer: MegatronOptimizer) -> int:
    """Load the weights of a checkpoint alone; the optimizer starts without state. Returns its step. ConfigRefused."""
    step = load_model(directory, policy=policy, setting="learner.from_checkpoint")
    optimizer.inner.reload_model_params()  # in bfloat16, the optimizer has float32 copies of the weights
    return step


def load_model(directory: Path, *, policy: MegatronPolicy, setting: str) -> int:
    """Load the weights alone of a checkpoint of Tidemill or Megatron. Returns its step. Raises ConfigRefused."""
    refuse_other_backend(directory, KIND)
    facts = load_common_state_dict(str(directory)).get("facts", {})  # Megatron's have none, and no adapters
    refuse_other_beginning(directory, facts, policy, setting=setting)
    with megatron_device(), policy.memory.region():
        if not facts:
            return load_megatron(directory, policy.chunks, setting=setting)
        model = _model(policy)
        for part in model.values():
            refuse_another_model(directory, part, setting, "a checkpoint of the model in model.path", exactly=True)
        with plain_torch():
            loaded = dist_checkpointing.load(model, str(directory))
        _load_chunks(policy, loaded)
    return int(facts["step"])


def save_model(directory: Path, *, policy: MegatronPolicy) -> None:
    """Write the weights alone as a checkpoint of step 0, without a manifest. Raises OSError."""
    strategy = StagedSave()
    with megatron_device():
        facts = facts_of(0, policy, NO_OTHER_MODELS) | {"weights_only": True}
        dist_checkpointing.save({**_model(policy), "facts": facts}, str(directory), strategy)
    assert strategy.staged is not None
    write_staged(strategy.staged)


def _sharded(
    policy: MegatronPolicy, optimizer: MegatronOptimizer, others: OtherModels, *, is_loading: bool
) -> dict[str, Any]:
    content = _trained(policy, optimizer, is_loading=is_loading)
    for name, copies in (("proximal", others.proximal), ("reference", others.reference)):
        if copies is not None:
            content |= _of_copies(policy, copies, name)
    if others.critic is not None:
        content["critic"] = _trained(*_parts(others.critic), is_loading=is_loading)
        add_prefix_for_sharding(content["critic"], "critic.")
    return content


def _parts(critic: Critic) -> tuple[MegatronPolicy, MegatronOptimizer]:
    """Return model and optimizer of a critic, which are of the policy's backend."""
    return cast(MegatronPolicy, critic.model), cast(MegatronOptimizer, critic.optimizer)


def _trained(policy: MegatronPolicy, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    model = _model(policy)
    return {**model, **optimizer.sharded(model, is_loading=is_loading)}


def _of_copies(policy: MegatronPolicy, copies: WeightBackup, name: str) -> dict[str, Any]:
    # Shards as the model's own, with the copies as data, under other names.
    content: dict[str, Any] = {}
    for number, (key, part) in enumerate(zip(_keys(policy, name), _model(policy).values(), strict=True)):
        before = f"{number}." if len(policy.chunks) > 1 else ""
        entries = {before + key: entry for key, entry in part.items() if before + key in copies.tensors}
        for full_name, entry in entries.items():
            entry.data = copies.tensors[full_name]
            if isinstance(entry, ShardedTensor):  # copies may have another dtype
                entry.dtype = entry.data.dtype
        add_prefix_for_sharding(entries, f"{name}.")
        content[key] = entries
    return content


def _keys(policy: MegatronPolicy, name: str) -> list[str]:
    # Places in the content that is saved; the files do not have them.
    return [name] if len(policy.chunks) == 1 else [f"{name}{number}" for number in range(len(policy.chunks))]


def _model(policy: MegatronPolicy) -> dict[str, Any]:
    """Return the sharded state of each chunk at its place; with adapters theirs alone."""
    return {key: _entries(policy, chunk) for key, chunk in zip(_keys(policy, "model"), policy.chunks, strict=True)}


def _entries(policy: MegatronPolicy, chunk: Any) -> dict[str, Any]:
    entries: dict[str, Any] = chunk.sharded_state_dict()
    return entries if policy.adapters is None else {name: part for name, part in entries.items() if is_adapter(name)}


def _load_chunks(policy: MegatronPolicy, loaded: Mapping[str, Any]) -> None:
    for key, chunk in zip(_keys(policy, "model"), policy.chunks, strict=True):
        chunk.load_state_dict(loaded[key], strict=policy.adapters is None)


def _rng_object(state: Any) -> ShardedObject:
    return ShardedObject("rng", state, (dist.get_world_size(),), (dist.get_rank(),))
