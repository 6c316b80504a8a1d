"""A rank's training state in a checkpoint, saved and loaded with Megatron's distributed checkpoints (``torch_dist``).

It consists of model, optimizer, random generators and, where there are any, proximal weights, a changing reference and
a critic. Saving and loading are collective over all ranks; the caller makes the directory durable.
"""

import logging
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.checkpoints.remote_files import CheckpointFiles
from tidemill.learner.errors import CheckpointCorrupt, CheckpointUnwritten, ConfigRefused
from tidemill.learner.megatron.backups import NO_OTHER_MODELS, OtherModels, WeightBackup
from tidemill.learner.megatron.checkpoint_files import HostCopies, PeerLoad, Staged, StagedSave
from tidemill.learner.megatron.cpu_shim import megatron_device, plain_torch
from tidemill.learner.megatron.initial_weights import load_megatron, refuse_another_model
from tidemill.learner.megatron.layers.lora import is_adapter
from tidemill.learner.megatron.model import Policy
from tidemill.learner.megatron.optimizer import PolicyOptimizer

log = logging.getLogger(__name__)


FORMAT = 1  # version of the content of a checkpoint


def stage(
    directory: Path,
    *,
    step: int,
    policy: Policy,
    optimizer: PolicyOptimizer,
    others: OtherModels = NO_OTHER_MODELS,
    numbers: Mapping[str, float] | None = None,
    copies: HostCopies | None = None,
) -> Staged:
    """Plan this rank's part of the state after ``step`` for ``directory`` (existing and empty).

    With ``copies`` the state may change afterwards; without, not before it is written. ``numbers``: scalars of the
    algorithm, equal on all ranks; ``load`` returns them. Raises CheckpointUnwritten, MemoryReleased.
    """
    policy.memory.want("a checkpoint")
    strategy = StagedSave(copies)
    with megatron_device():
        content = _sharded(policy, optimizer, others, is_loading=False)
        content["rng"] = _rng_object(_rng_state())
        content["facts"] = _facts(step, policy, others) | {
            "optimizer": optimizer.kind,
            "numbers": dict(numbers or {}),
        }
        # Rank 0 writes the common part here already; the strategy writes no tensors.
        with _torch_reason(directory):
            dist_checkpointing.save(content, str(directory), strategy)
    assert strategy.staged is not None
    return strategy.staged


@contextmanager
def _torch_reason(directory: Path) -> Iterator[None]:
    """Raise CheckpointUnwritten where torch could not write: its own error names neither file nor reason."""
    try:
        yield
    except RuntimeError as error:
        if "iostream" not in str(error):
            raise
        free_mb = shutil.disk_usage(directory).free / 1e6
        reason = (
            f"rank {dist.get_rank()}: torch could not write its part ({error}), and {free_mb:.0f} MB are free on "
            "the disk"
        )
        raise CheckpointUnwritten(str(directory), reason) from error


def save(
    directory: Path,
    *,
    step: int,
    policy: Policy,
    optimizer: PolicyOptimizer,
    others: OtherModels = NO_OTHER_MODELS,
    numbers: Mapping[str, float] | None = None,
) -> None:
    """Write the state into a directory that all ranks share, without a manifest. Raises as ``stage``, and OSError."""
    _write_all(stage(directory, step=step, policy=policy, optimizer=optimizer, others=others, numbers=numbers))


def _write_all(staged: Staged) -> None:
    results: list[list[WriteResult] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(results, staged.write())
    if dist.get_rank() == 0:
        staged.finish([result for result in results if result is not None])
    dist.barrier()


def load(
    directory: Path,
    *,
    policy: Policy,
    optimizer: PolicyOptimizer,
    others: OtherModels = NO_OTHER_MODELS,
    files: CheckpointFiles | None = None,
) -> tuple[int, dict[str, float]]:
    """Load the state of ``directory``, which may have been saved by another number of ranks.

    With ``files``, which may be on other nodes, the directory needs only Megatron's metadata. Returns the step and the
    numbers of the checkpoint. Raises CheckpointCorrupt for another format, missing proximal weights or a range that is
    intact nowhere, and ConfigRefused for a checkpoint of another model.
    """
    facts = load_common_state_dict(str(directory))["facts"]
    _refuse_missing_state(directory, facts, optimizer, others)
    _refuse_other_adapters(
        directory, facts, policy, "the settings of learner.lora and the model that this run began with"
    )
    _refuse_other_roles(directory, facts, others)
    with megatron_device(), policy.memory.region():
        content = _sharded(policy, optimizer, others, is_loading=True)
        want = "the model this run began with (another one needs another run)"
        _refuse_other_chunks(directory, content, policy, "model.path", want)
        if others.critic is not None:
            want = "the critic this run began with"
            _refuse_other_chunks(directory, content["critic"], others.critic.model, "learner.critic.path", want)
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
            _load_chunks(others.critic.model, loaded["critic"])
            others.critic.optimizer.restore(loaded["critic"])
    for name, copies in (("proximal", others.proximal), ("reference", others.reference)):
        if copies is not None:
            copies.restore({each: tensor for key in _keys(policy, name) for each, tensor in loaded[key].items()})
    if same_world:
        _restore_rng(loaded["rng"])
    else:
        world = dist.get_world_size()
        log.warning("random generators are not restored saved_by_ranks=%d loaded_by_ranks=%d", facts["world"], world)
    return int(facts["step"]), dict(facts.get("numbers", {}))


def _refuse_other_chunks(directory: Path, content: JsonMapping, policy: Policy, setting: str, want: str) -> None:
    for key in _keys(policy, "model"):
        refuse_another_model(directory, content[key], setting, want)


def load_weights(directory: Path, *, policy: Policy, optimizer: PolicyOptimizer) -> int:
    """Load the weights of a checkpoint alone; the optimizer starts without state. Returns its step. ConfigRefused."""
    step = load_model(directory, policy=policy, setting="learner.from_checkpoint")
    optimizer.inner.reload_model_params()  # in bfloat16, the optimizer has float32 copies of the weights
    return step


def load_model(directory: Path, *, policy: Policy, setting: str) -> int:
    """Load the weights alone of a checkpoint of Tidemill or Megatron. Returns its step. Raises ConfigRefused."""
    common = load_common_state_dict(str(directory))
    facts = common.get("facts", {})  # Megatron's have none, and no adapters
    _refuse_other_adapters(
        directory, facts, policy, f"{directory} with the same, or a model directory of it (tidemill convert)"
    )
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


def save_model(directory: Path, *, policy: Policy) -> None:
    """Write the weights alone as a checkpoint of step 0, without a manifest. Raises OSError."""
    strategy = StagedSave()
    with megatron_device():
        facts = _facts(0, policy, NO_OTHER_MODELS) | {"weights_only": True}
        dist_checkpointing.save({**_model(policy), "facts": facts}, str(directory), strategy)
    assert strategy.staged is not None
    _write_all(strategy.staged)


def _refuse_missing_state(directory: Path, facts: JsonMapping, optimizer: PolicyOptimizer, others: OtherModels) -> None:
    """Raise CheckpointCorrupt or ConfigRefused when the checkpoint lacks state that this rank needs."""
    if facts["format"] != FORMAT:
        raise CheckpointCorrupt(str(directory), "common.pt", f"format {FORMAT}", facts["format"])
    if others.proximal is not None and not facts["proximal"]:
        raise CheckpointCorrupt(str(directory), "common.pt", "proximal weights (push_every > 1)", "none")
    if facts.get("weights_only"):
        want = "a checkpoint with the optimizer's state, or a new run with learner.from_checkpoint"
        raise ConfigRefused(str(directory), want, "weights alone (tidemill convert)")
    if (kind := facts.get("optimizer", "adam")) != optimizer.kind:
        raise ConfigRefused("learner.optimizer.name", f"{kind}, whose state is in {directory}", optimizer.kind)


def _refuse_other_roles(directory: Path, facts: JsonMapping, others: OtherModels) -> None:
    """Raise ConfigRefused for a critic or a changing reference where the run that saved had none, or the reverse."""
    roles = {
        "critic": (
            "learner.algorithm.advantage",
            "one with a critic (gae, vtrace)",
            "one without a critic",
            others.critic,
        ),
        "reference": (
            "learner.algorithm.kl",
            "reference_every or reference_ema > 0",
            "neither reference_every nor reference_ema",
            others.reference,
        ),
    }
    for name, (setting, stored, absent, now) in roles.items():
        saved = bool(facts.get(name, False))
        if saved is not (now is not None):
            want = (
                f"{stored if saved else absent}, as in the run that saved {directory}; undo the change, or start "
                "another run"
            )
            raise ConfigRefused(setting, want, absent if saved else stored)


def _refuse_other_adapters(directory: Path, facts: JsonMapping, policy: Policy, want: str) -> None:
    """Raise ConfigRefused when checkpoint and policy have different adapters, or ones on different models."""
    stored: JsonMapping | None = facts.get("lora")
    current = None if policy.adapters is None else policy.adapters.facts()
    if stored == current:
        return
    if stored is None or current is None:
        raise ConfigRefused(
            "learner.lora.rank",
            f"{want}: {directory} has {'no' if stored is None else 'only'} adapters",
            _rank_of(current),
        )
    name = next(name for name, value in stored.items() if current.get(name) != value)
    field = "model.path" if name == "base" else f"learner.lora.{name}"
    raise ConfigRefused(field, f"{want}: {stored[name]!r} in {directory}", current.get(name))


def _rank_of(facts: JsonMapping | None) -> int:
    return 0 if facts is None else int(facts["rank"])


def _sharded(policy: Policy, optimizer: PolicyOptimizer, others: OtherModels, *, is_loading: bool) -> dict[str, Any]:
    content = _trained(policy, optimizer, is_loading=is_loading)
    for name, copies in (("proximal", others.proximal), ("reference", others.reference)):
        if copies is not None:
            content |= _of_copies(policy, copies, name)
    if others.critic is not None:
        content["critic"] = _trained(others.critic.model, others.critic.optimizer, is_loading=is_loading)
        add_prefix_for_sharding(content["critic"], "critic.")
    return content


def _trained(policy: Policy, optimizer: PolicyOptimizer, *, is_loading: bool) -> dict[str, Any]:
    model = _model(policy)
    return {**model, **optimizer.sharded(model, is_loading=is_loading)}


def _of_copies(policy: Policy, copies: WeightBackup, name: str) -> dict[str, Any]:
    # Shards as the model's own, with the copies as data, under other names.
    content: dict[str, Any] = {}
    for number, (key, part) in enumerate(zip(_keys(policy, name), _model(policy).values(), strict=True)):
        before = f"{number}." if len(policy.chunks) > 1 else ""
        entries = {before + each: entry for each, entry in part.items() if before + each in copies.tensors}
        for each, entry in entries.items():
            entry.data = copies.tensors[each]
            if isinstance(entry, ShardedTensor):  # copies may have another dtype
                entry.dtype = entry.data.dtype
        add_prefix_for_sharding(entries, f"{name}.")
        content[key] = entries
    return content


def _keys(policy: Policy, name: str) -> list[str]:
    # Places in the content that is saved; the files do not have them.
    return [name] if len(policy.chunks) == 1 else [f"{name}{number}" for number in range(len(policy.chunks))]


def _model(policy: Policy) -> dict[str, Any]:
    """Return the sharded state of each chunk at its place; with adapters theirs alone."""
    return {key: _entries(policy, chunk) for key, chunk in zip(_keys(policy, "model"), policy.chunks, strict=True)}


def _entries(policy: Policy, chunk: Any) -> dict[str, Any]:
    entries: dict[str, Any] = chunk.sharded_state_dict()
    return entries if policy.adapters is None else {name: part for name, part in entries.items() if is_adapter(name)}


def _load_chunks(policy: Policy, loaded: Mapping[str, Any]) -> None:
    for key, chunk in zip(_keys(policy, "model"), policy.chunks, strict=True):
        chunk.load_state_dict(loaded[key], strict=policy.adapters is None)


def _facts(step: int, policy: Policy, others: OtherModels) -> JsonObject:
    roles = {"proximal": others.proximal, "reference": others.reference, "critic": others.critic}
    facts = {
        "format": FORMAT,
        "step": step,
        "world": dist.get_world_size(),
        **{name: role is not None for name, role in roles.items()},
    }
    return facts if policy.adapters is None else facts | {"lora": policy.adapters.facts()}


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
