"""The backend of a run."""

import json
import logging
from pathlib import Path

from tidemill.learner.layout.backends import choose_backend
from tidemill.learner.settings.backends import FSDP
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.trainer.backend import AnyBackend

log = logging.getLogger(__name__)


def open_backend(learner: LearnerConfig, model_dir: Path, *, megatron_checkpoint: bool = False) -> AnyBackend:
    """Return the backend for the model of a directory, and log the reason. Raises OSError.

    Its package is imported here: each takes seconds, and Megatron's needs what the other does not.
    """
    values = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    choice = choose_backend(learner, values, megatron_checkpoint=megatron_checkpoint)
    log.info("backend=%s reason=%s", choice.kind, choice.reason)
    if choice.kind == FSDP:
        from tidemill.learner.backends.fsdp.backend import FsdpBackend

        return FsdpBackend()
    from tidemill.learner.backends.megatron.backend import MegatronBackend

    return MegatronBackend()
