"""A rank's training state in a checkpoint of torch.distributed.checkpoint, which any number of ranks loads.

It consists of weights, the optimizer's state, random generators and, where there are any, proximal weights, a changing
reference and a critic. Each rank writes its part of every tensor as a rectangle of the whole. Saving and loading are
collective over all ranks; the caller makes the directory durable.
"""

import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.backends.fsdp.lora import is_adapter
from tidemill.learner.backends.fsdp.optimizer import FsdpOptimizer
from tidemill.learner.backends.fsdp.policy import FsdpPolicy
from tidemill.learner.checkpoints.disk import BACKEND
from tidemill.learner.checkpoints.remote_files import CheckpointFiles
from tidemill.learner.checkpoints.staged_files import (
    HostCopies,
    PeerFiles,
    Staged,
    corrupt_files,
    stage_files,
    write_staged,
)
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.model_files import HEADS_SETTING
from tidemill.learner.trainer.backups import NO_OTHER_MODELS, OtherModels, WeightBackup
from tidemill.learner.trainer.checkpoint_facts import (
    COMMON,
    facts_of,
    read_facts,
    refuse_another_run,
    refuse_other_backend,
    refuse_other_beginning,
    restore_rng,
    rng_state,
    torch_reason,
)
from tidemill.learner.trainer.critic import Critic

log = logging.getLogger(__name__)

KIND = "fsdp"
"""Name of this backend in a checkpoint."""
FORMAT_FILE = "metadata.json"
"""File of the format and the backend, beside the facts, torch's index and the files of the ranks."""
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
    BACKEND: KIND,
}
Content = dict[str, Any]
"""What a checkpoint stores by name: a ``Part`` of a tensor, or an object of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's part of a tensor: a rectangle, in the protocol of torch's planners."""

    tensor: Tensor
    shape: torch.Size
    """Of the whole tensor."""
    offsets: torch.Size
    """Of the part in it."""

    @classmethod
    def of(cls, whole: Tensor, tensor: Tensor | None = None) -> "Part":
        """Return the part of a weight, or another ``tensor`` in its place. A plain tensor is whole on every rank."""
        if not isinstance(whole, DTensor):
            shape = whole.shape
            return cls(
                tensor=whole.detach() if tensor is None else tensor, shape=shape, offsets=torch.Size([0] * len(shape))
            )
        local = whole.to_local().detach() if tensor is None else tensor
        [chunk] = whole.__create_chunk_list__()
        return cls(tensor=local, shape=whole.shape, offsets=chunk.offsets)

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.tensor.shape)] if self.tensor.numel() else []

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self.tensor), size=self.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]


class PartsSave(DefaultSavePlanner):
    """Planner of a checkpoint made of parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor of a part, or an object, which has no place in a tensor."""
        value = self.state_dict[index.fqn]
        return value if index.offset is None else value.tensor


class PartsLoad(DefaultLoadPlanner):
    """Planner that reads a checkpoint into parts; objects replace what stands at their names."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Content, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the content as it is: torch's own looks for tensors without memory, and knows no parts."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor of a part."""
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor


def stage(
    directory: Path,
    *,
    step: int,
    policy: FsdpPolicy,
    optimizer: FsdpOptimizer,
    others: OtherModels = NO_OTHER_MODELS,
    numbers: Mapping[str, float] | None = None,
    copies: HostCopies | None = None,
) -> Staged:
    """``Backend.stage``. Rank 0 writes facts and format here already."""
    policy.memory.want("a checkpoint")
    content = _content(policy, optimizer, others) | {_rng_name(): rng_state()}
    facts = _facts(step, policy, others) | {
        "optimizer": optimizer.kind,
        "optimizer_steps": optimizer.steps,
        "critic_steps": 0 if others.critic is None else _parts(others.critic)[1].steps,
        "numbers": dict(numbers or {}),
    }
    return _staged(directory, content, facts, copies)


def _facts(step: int, policy: FsdpPolicy, others: OtherModels) -> JsonObject:
    # The weights are float32 whatever the dtype of the passes, in which engines and files have them.
    further = {"further": policy.root.num_further} if policy.root.num_further else {}
    return facts_of(step, policy, others) | {"dtype": policy.dtype} | further


def _staged(directory: Path, content: Content, facts: JsonObject, copies: HostCopies | None = None) -> Staged:
    with torch_reason(directory):
        staged = stage_files(content, PartsSave(), directory, copies)
        if dist.get_rank() == 0:
            torch.save({"facts": facts}, directory / COMMON)
            (directory / FORMAT_FILE).write_text(json.dumps(FORMAT), encoding="utf-8")
    return staged


def load(
    directory: Path,
    *,
    policy: FsdpPolicy,
    optimizer: FsdpOptimizer,
    others: OtherModels = NO_OTHER_MODELS,
    files: CheckpointFiles | None = None,
) -> tuple[int, dict[str, float]]:
    """``Backend.load``. Random generators are restored where as many ranks have saved."""
    refuse_other_backend(directory, KIND)
    facts = read_facts(directory)
    refuse_another_run(directory, facts, policy, optimizer, others)
    _refuse_other_heads(directory, facts, policy)
    content, world = _content(policy, optimizer, others), dist.get_world_size()
    want = "the model this run began with (another one needs another run)"
    _refuse_another_model(directory, content, "model.", "model.path", want)
    _refuse_another_model(directory, content, "critic.", "learner.critic.path", "the critic this run began with")
    same_world = facts["world"] == world
    if same_world:  # each rank that saved has generators of its own
        content[_rng_name()] = None
    _read(directory, content, files)
    optimizer.set_steps(int(facts["optimizer_steps"]))
    policy.weights_changed()
    if others.critic is not None:
        value_model, critic_optimizer = _parts(others.critic)
        critic_optimizer.set_steps(int(facts["critic_steps"]))
        value_model.weights_changed()
    if same_world:
        restore_rng(content[_rng_name()])
    else:
        log.warning("random generators are not restored saved_by_ranks=%d loaded_by_ranks=%d", facts["world"], world)
    return int(facts["step"]), dict(facts["numbers"])


def load_weights(directory: Path, *, policy: FsdpPolicy, optimizer: FsdpOptimizer) -> int:
    """Load the weights of a checkpoint alone; the optimizer starts without state. Returns its step. ConfigRefused."""
    return load_model(directory, policy=policy, setting="learner.from_checkpoint")


def load_model(directory: Path, *, policy: FsdpPolicy, setting: str) -> int:
    """Load the weights alone of a checkpoint of this backend. Returns its step. Raises ConfigRefused."""
    refuse_other_backend(directory, KIND)
    facts = read_facts(directory)
    refuse_other_beginning(directory, facts, policy, setting=setting)
    _refuse_other_heads(directory, facts, policy)
    content = model(policy)
    _refuse_another_model(directory, content, "model.", setting, "a checkpoint of the model in model.path")
    _read(directory, content)
    policy.weights_changed()
    return int(facts["step"])


def save_model(directory: Path, *, policy: FsdpPolicy) -> None:
    """Write the weights alone as a checkpoint of step 0, without a manifest. Raises OSError."""
    facts = _facts(0, policy, NO_OTHER_MODELS) | {"weights_only": True}
    write_staged(_staged(directory, model(policy), facts))


def _read(directory: Path, content: Content, files: CheckpointFiles | None = None) -> None:
    """Read the content of a checkpoint in place. Collective. Raises CheckpointCorrupt, on every rank."""
    reader = torch_checkpoint.FileSystemReader(directory)
    if files is not None:
        reader.fs = PeerFiles(files, directory)
    with warnings.catch_warnings(), corrupt_files():
        # ``load`` wants the same names on all ranks, which have random generators of their own.
        warnings.filterwarnings("ignore", message=".*load_state_dict.*", category=FutureWarning)
        torch_checkpoint.load_state_dict(content, reader, planner=PartsLoad())


def _refuse_another_model(directory: Path, content: Content, prefix: str, setting: str, want: str) -> None:
    """Raise ConfigRefused when a tensor of the content is missing in the checkpoint, or has another shape there."""
    stored = torch_checkpoint.FileSystemReader(directory).read_metadata().state_dict_metadata
    for name, part in content.items():
        if not name.startswith(prefix):
            continue
        entry = stored.get(name)
        shape = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if shape != tuple(part.shape):
            got = "is missing" if shape is None else f"has the shape {shape}"
            raise ConfigRefused(setting, f"{want}: {name} {got} in {directory}", tuple(part.shape))


def _refuse_other_heads(directory: Path, facts: JsonMapping, policy: FsdpPolicy) -> None:
    """Raise ConfigRefused where heads for further tokens are trained here, and were not in the checkpoint, or the
    reverse.
    """
    if bool(facts.get("further")) is not bool(policy.root.num_further):
        want = "> 0, as in the run that saved" if facts.get("further") else "0, as in the run that saved"
        raise ConfigRefused(HEADS_SETTING, f"{want} {directory}", "> 0" if policy.root.num_further else 0)


def _rng_name() -> str:
    return f"rng.{dist.get_rank()}"


def _content(policy: FsdpPolicy, optimizer: FsdpOptimizer, others: OtherModels) -> Content:
    content = _trained(policy, optimizer)
    for role, backup in (("proximal", others.proximal), ("reference", others.reference)):
        if backup is not None:
            content |= _of_copies(policy, backup, role)
    if others.critic is not None:
        content |= {f"critic.{name}": part for name, part in _trained(*_parts(others.critic)).items()}
    return content


def _parts(critic: Critic) -> tuple[FsdpPolicy, FsdpOptimizer]:
    """Return model and optimizer of a critic, which are of the policy's backend."""
    return cast(FsdpPolicy, critic.model), cast(FsdpOptimizer, critic.optimizer)


def _trained(policy: FsdpPolicy, optimizer: FsdpOptimizer) -> Content:
    """Return the parts of a model that is trained, and of its optimizer's state."""
    moments = {
        f"optimizer.{moment}.{name}": Part.of(optimizer.parameters[name], tensor)
        for name, moment, tensor in optimizer.moments()
    }
    return model(policy) | moments


def model(policy: FsdpPolicy) -> Content:
    """Return the parts of the weights as ``model.<name>``; with adapters theirs alone."""
    return {
        f"model.{name}": Part.of(weight)
        for name, weight in policy.named_tensors()
        if policy.adapters is None or is_adapter(name)
    }


def _of_copies(policy: FsdpPolicy, backup: WeightBackup, role: str) -> Content:
    return {
        f"{role}.{name}": Part.of(weight, backup.tensors[name])
        for name, weight in policy.named_tensors()
        if name in backup.tensors
    }
