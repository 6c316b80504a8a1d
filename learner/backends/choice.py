"""The choice of the backend that trains a model. Loads no torch before a backend is opened."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.learner.layout.sizes import FAMILIES
from tidemill.learner.settings.backends import FSDP, MEGATRON, megatron_settings

if TYPE_CHECKING:
    from tidemill.learner.settings.config import LearnerConfig
    from tidemill.learner.trainer.port import AnyBackend

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """A backend and the reason for it."""

    kind: str
    reason: str


def choose_backend(
    learner: "LearnerConfig", values: JsonMapping, *, megatron_checkpoint: bool = False
) -> BackendChoice:
    """Return the backend for ``learner.backend`` and a model's config.json.

    ``auto``: Megatron for its families, and where a setting needs it; FSDP for all other models.
    """
    if learner.backend != "auto":
        return BackendChoice(kind=learner.backend, reason=f"learner.backend: {learner.backend}")
    needs = [f"learner.{name}" for name in megatron_settings(learner)]
    needs += ["model.megatron_checkpoint"] if megatron_checkpoint else []
    if needs:
        return BackendChoice(kind=MEGATRON, reason=f"{needs[0]} needs it")
    of_fsdp = {
        "family": learner.family,
        "mtp_loss_scaling_factor": learner.mtp_loss_scaling_factor,
        "lora.targets": learner.lora.rank and learner.lora.of_experts,
    }
    if setting := next((name for name, value in of_fsdp.items() if value), ""):
        return BackendChoice(kind=FSDP, reason=f"learner.{setting} needs it")
    family = values.get("model_type")
    if family in FAMILIES:
        return BackendChoice(kind=MEGATRON, reason=f"{family} is one of its families")
    return BackendChoice(kind=FSDP, reason=f"{family} is none of Megatron's families")


def backend_for(learner: "LearnerConfig", model_dir: Path, *, megatron_checkpoint: bool = False) -> "AnyBackend":
    """Return the backend for the model of a directory, and log the reason. Raises OSError."""
    values = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    choice = choose_backend(learner, values, megatron_checkpoint=megatron_checkpoint)
    log.info("backend=%s reason=%s", choice.kind, choice.reason)
    return open_backend(choice.kind)


def open_backend(kind: str) -> "AnyBackend":
    """Return a backend. Its package is imported here, which takes seconds; Megatron's needs what the other does not."""
    if kind == FSDP:
        from tidemill.learner.backends.fsdp.backend import FsdpBackend

        return FsdpBackend()
    from tidemill.learner.backends.megatron.backend import MegatronBackend

    return MegatronBackend()
