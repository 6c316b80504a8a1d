"""Models of transformers in one process on the CPU: from a learner's checkpoint, and into one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tidemill.learner.backends.fsdp import state
from tidemill.learner.backends.fsdp.backend import FsdpBackend
from tidemill.learner.backends.fsdp.lora import Tuning
from tidemill.learner.backends.fsdp.policy import FsdpPolicy, build_policy
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.trainer.checkpoint_facts import adapters_in, read_facts

ERRORS: tuple[type[Exception], ...] = ()
_JOINED_S = 60.0
"""Longest time in which this process joins itself, in seconds."""


@contextmanager
def one_process() -> Iterator[Parallel]:
    """Form the group of this process alone, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    backend = FsdpBackend()
    ranks = backend.join(LearnerConfig(), device=torch.device("cpu"), timeout_s=_JOINED_S)
    try:
        yield ranks
    finally:
        backend.leave()


def read(checkpoint: Path, model_dir: Path, ranks: Parallel, *, code_path: str = "") -> tuple[FsdpPolicy, int]:
    """Return a model with the weights of a checkpoint, and its step. Raises ConfigRefused for another model.

    Weights are float32 in a checkpoint. It records the dtype of the passes, in which they are exported.
    """
    facts = read_facts(checkpoint)
    tuning = Tuning(lora=adapters_in(facts))
    further = bool(facts.get("further"))
    policy = build_policy(
        model_dir, dtype=facts["dtype"], parallel=ranks, tuning=tuning, further=further, family=code_path
    )
    return policy, state.load_model(checkpoint, policy=policy, setting="--model")


def write(directory: Path, model_dir: Path, ranks: Parallel, *, dtype: str, code_path: str = "") -> None:
    """Write the weights of a model directory as a checkpoint without a manifest. Raises ConfigRefused, OSError."""
    state.save_model(directory, policy=build_policy(model_dir, dtype=dtype, parallel=ranks, family=code_path))
