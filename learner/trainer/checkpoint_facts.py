"""What a checkpoint records beside its tensors, and the refusals of a checkpoint that belongs to another run."""

import pickle
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.checkpoints.disk import written_by
from tidemill.learner.errors import CheckpointCorrupt, CheckpointUnwritten, ConfigRefused
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.trainer.backups import OtherModels
from tidemill.learner.trainer.optimizer import Optimizer
from tidemill.learner.trainer.port import Weights

FORMAT = 1  # version of the content of a checkpoint
COMMON = "common.pt"
"""File of the facts, beside the index and the files of the ranks. The name is that of the format ``torch_dist``."""


def facts_of(step: int, policy: Weights, others: OtherModels) -> JsonObject:
    """Return the facts of a state after ``step``, equal on all ranks, by which ``refuse_...`` tell runs apart."""
    roles = {"proximal": others.proximal, "reference": others.reference, "critic": others.critic}
    facts: JsonObject = {
        "format": FORMAT,
        "step": step,
        "world": dist.get_world_size(),
        **{name: role is not None for name, role in roles.items()},
    }
    facts |= {} if policy.adapters is None else {"lora": policy.adapters.facts()}
    # By reference: they are up to a tenth of a model, and a checkpoint would have them again every few steps.
    return facts | ({"kept": policy.kept} if policy.kept else {})


def read_facts(directory: Path) -> JsonMapping:
    """Return the facts of a checkpoint that are plain values. Raises CheckpointCorrupt for any others: no code of the
    pickle is run.
    """
    try:
        facts: JsonMapping = torch.load(directory / COMMON, map_location="cpu", weights_only=True)["facts"]
    except (pickle.UnpicklingError, LookupError) as error:
        reason = str(error).splitlines()[:1]
        raise CheckpointCorrupt(str(directory), COMMON, "facts made of plain values", reason) from error
    return facts


def adapters_in(facts: JsonMapping) -> LoraConfig:
    """Return the settings of the adapters in a checkpoint; of none, without them."""
    lora: JsonMapping | None = facts.get("lora")
    if lora is None:
        return LoraConfig()
    return LoraConfig(rank=lora["rank"], alpha=lora["alpha"], rslora=lora["rslora"], targets=tuple(lora["targets"]))


def refuse_other_backend(directory: Path, kind: str) -> None:
    """Raise ConfigRefused for a checkpoint of another backend."""
    if (stored := written_by(directory)) != kind:
        raise ConfigRefused("learner.backend", f"{stored}, which has written {directory}", kind)


def refuse_another_run(
    directory: Path, facts: JsonMapping, policy: Weights, optimizer: Optimizer, others: OtherModels
) -> None:
    """Raise CheckpointCorrupt or ConfigRefused when a run with these models cannot continue from the checkpoint."""
    _refuse_missing_state(directory, facts, optimizer, others)
    want = "the settings of learner.lora and the model that this run began with"
    _refuse_other_adapters(directory, facts, policy, want)
    _refuse_other_roles(directory, facts, others)
    _refuse_other_kept(directory, facts, policy, "model.path")


def refuse_other_beginning(directory: Path, facts: JsonMapping, policy: Weights, *, setting: str) -> None:
    """Raise ConfigRefused when a new run with this policy cannot begin with the weights of the checkpoint.

    ``setting``: that names the checkpoint, or its model.
    """
    want = f"{directory} with the same, or a model directory of it (tidemill convert)"
    _refuse_other_adapters(directory, facts, policy, want)
    _refuse_other_kept(directory, facts, policy, setting)


def _refuse_missing_state(directory: Path, facts: JsonMapping, optimizer: Optimizer, others: OtherModels) -> None:
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


def _refuse_other_adapters(directory: Path, facts: JsonMapping, policy: Weights, want: str) -> None:
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


def _refuse_other_kept(directory: Path, facts: JsonMapping, policy: Weights, setting: str) -> None:
    """Raise ConfigRefused where the tensors that are not trained are others than when the checkpoint was saved.

    Checkpoints from before they were recorded are taken.
    """
    stored, current = facts.get("kept"), policy.kept
    if stored is not None and stored != current:
        want = f"a model whose tensors beside the trained ones (MTP, images) are those of the run of {directory}"
        raise ConfigRefused(setting, f"{want}: SHA-256 {stored:.12}", f"{current:.12}" or "none")


def _rank_of(facts: JsonMapping | None) -> int:
    return 0 if facts is None else int(facts["rank"])


def rng_state() -> dict[str, Any]:
    """Return the states of this process' random generators."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "python": random.getstate()}


def restore_rng(state: dict[str, Any]) -> None:
    """Set the random generators to a state of ``rng_state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


@contextmanager
def torch_reason(directory: Path) -> Iterator[None]:
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
