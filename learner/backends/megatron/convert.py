"""A learner's or Megatron's checkpoint as a Hugging Face directory, and back, in one process on the CPU.

Tensors are found by their names and global shapes, so the layout that saved them does not matter. A checkpoint made of
a model directory has weights alone; it begins a run (``learner.from_checkpoint``), and resumes none.
"""

import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException

from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.subjects import nonce
from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.tuning import Tuning
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.manifest import MANIFEST
from tidemill.learner.errors import CheckpointCorrupt, ConfigRefused, LearnerError
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.trainer.adapter_files import ADAPTER, write_adapter
from tidemill.learner.trainer.backend import DTYPES
from tidemill.weightstore.store import snapshot_files

_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def to_model(checkpoint: Path, out: Path, model_dir: Path, ranks: Parallel, *, bridge_class: str = "") -> int:
    """Write the model of a checkpoint to ``out``, with configuration and tokenizer of ``model_dir``. Returns its step.

    Adapters are merged into the weights, and written to ``out/adapter`` as well. ``ranks``: those of ``one_process``.
    Raises ConfigRefused for a checkpoint of another model, CheckpointCorrupt, OSError.
    """
    policy, step = _loaded(checkpoint, model_dir, ranks, bridge_class)
    snapshot_files.write(out, dict(policy.export()), version=-1, step=step, model_dir=model_dir)
    if policy.adapters is not None:
        write_adapter(out / ADAPTER, dict(policy.export_adapters()), policy.adapters.config, model_dir)
    return step


def weights_of(
    checkpoint: Path, model_dir: Path, ranks: Parallel, *, bridge_class: str = ""
) -> dict[str, torch.Tensor]:
    """Return the weights that ``to_model`` writes, with adapters merged into them. Raises as it does."""
    return dict(_loaded(checkpoint, model_dir, ranks, bridge_class)[0].export())


def to_checkpoint(model_dir: Path, out: Path, ranks: Parallel, *, bridge_class: str = "") -> None:
    """Write the weights of a model directory as a checkpoint. Raises ConfigRefused, FileExistsError, OSError."""
    if out.exists():
        raise FileExistsError(f"{out}: want a new directory, got one that exists")
    tuning = Tuning(trains=False)
    policy = build_policy(
        model_dir, dtype=_dtype_of_model(model_dir), parallel=ranks, tuning=tuning, bridge_class=bridge_class
    )
    # Renamed at the end: a directory with its final name is complete.
    aside = out.with_name(f"{out.name}-{nonce()}.tmp")
    aside.mkdir(parents=True)
    try:
        state.save_model(aside, policy=policy)
        disk.commit(aside, b"", extra={"step": 0, "world": 1}).rename(out)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _loaded(checkpoint: Path, model_dir: Path, ranks: Parallel, bridge_class: str) -> tuple[MegatronPolicy, int]:
    """Return a policy with the weights of a checkpoint, and its step. Raises as ``to_model``."""
    if (checkpoint / MANIFEST).exists():
        disk.verify(checkpoint)
    with _readable(checkpoint):
        lora = load_common_state_dict(str(checkpoint)).get("facts", {}).get("lora")
        tuning = Tuning(lora=_lora(lora), trains=False)
        policy = build_policy(
            model_dir, dtype=_dtype(checkpoint), parallel=ranks, tuning=tuning, bridge_class=bridge_class
        )
        return policy, state.load_model(checkpoint, policy=policy, setting="--model")


@contextmanager
def one_process() -> Iterator[Parallel]:
    """Form Megatron's groups of this process alone, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    ranks = groups.join(tensor_parallel_size=1, device=torch.device("cpu"), seed=0)
    try:
        yield ranks
    finally:
        groups.leave()


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    """Translate the errors of damaged files. Raises CheckpointCorrupt."""
    try:
        yield
    except LearnerError:
        raise
    except (
        CheckpointingException,
        CheckpointException,
        pickle.UnpicklingError,
        EOFError,
        RuntimeError,
        KeyError,
        ValueError,
    ) as error:
        reason = str(error).strip().splitlines()
        raise CheckpointCorrupt(
            str(checkpoint), "common.pt, .metadata, *.distcp", "a readable torch_dist checkpoint", reason[:1]
        ) from error


def _dtype(checkpoint: Path) -> str:
    """Return the dtype of the weights in a checkpoint. Raises ConfigRefused for another than those of the learner."""
    tensors = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    other_prefixes = ("optimizer", "chained_", "proximal.", "reference.", "critic.")
    weights = {name: part.dtype for name, part in tensors.items() if not name.startswith(other_prefixes)}
    return _named(next(iter(weights.values()), None), str(checkpoint))


def _dtype_of_model(model_dir: Path) -> str:
    """Return the dtype of the weights of a model directory. Raises ConfigRefused for one that the learner lacks."""
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                return _named(getattr(torch, _TYPES.get(file.get_slice(name).get_dtype(), ""), None), str(path))
    raise ConfigRefused(str(model_dir), "a model with its weights in *.safetensors", "none")


def _named(dtype: Any, where: str) -> str:
    name = next((name for name, choice in DTYPES.items() if choice == dtype), "")
    if not name:
        raise ConfigRefused(where, f"weights in {' or '.join(DTYPES)}", str(dtype))
    return name


def _lora(facts: JsonObject | None) -> LoraConfig:
    if facts is None:
        return LoraConfig()
    return LoraConfig(rank=facts["rank"], alpha=facts["alpha"], rslora=facts["rslora"], targets=tuple(facts["targets"]))
