"""Checkpoints of either backend as Hugging Face directories, and back, in one process on the CPU.

Tensors are found by their names and global shapes, so the layout that saved them does not matter. A checkpoint made of
a model directory has weights alone; it begins a run (``learner.from_checkpoint``), and resumes none.
"""

import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tidemill.bus.wire.subjects import nonce
from tidemill.learner.backends.choice import open_backend
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.manifest import MANIFEST
from tidemill.learner.errors import CheckpointCorrupt, ConfigRefused, LearnerError
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.trainer import exports
from tidemill.learner.trainer.exports import ADAPTER, write_adapter
from tidemill.learner.trainer.port import AnyBackend, Policy, named_dtype
from tidemill.weightstore.format.manifest import Manifest

_ERRORS: tuple[type[BaseException], ...] = (
    *(CheckpointException, pickle.UnpicklingError),
    *(EOFError, RuntimeError, KeyError, ValueError),
)
"""Errors of torch for damaged files."""
_JOINED_S = 60.0
"""Longest time in which this process joins itself, in seconds."""
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by their names in the headers of safetensors."""


class Conversion:
    """Models and checkpoints of one backend, with the groups of this process."""

    def __init__(self, backend: AnyBackend, ranks: Parallel, *, code_path: str = "") -> None:
        """``ranks``: of this process alone. ``code_path``: of the user's bridge or family."""
        self._backend, self._ranks, self._code_path = backend, ranks, code_path

    def to_model(self, checkpoint: Path, out: Path, model_dir: Path) -> int:
        """Write the model of a checkpoint to ``out``, with configuration and tokenizer of ``model_dir``. Returns its
        step.

        Adapters are merged into the weights, and written to ``out/adapter`` as well. Tensors that are not trained are
        copied from ``model_dir``. Raises ConfigRefused for a checkpoint of another model, CheckpointCorrupt, OSError.
        """
        policy, step = self._read(checkpoint, model_dir)
        tensors = dict(policy.export())
        manifest = Manifest.of(tensors.items())
        exports.write_model(out, tensors, version=-1, step=step, model_dir=model_dir, manifest=manifest)
        if policy.adapters is not None:
            write_adapter(out / ADAPTER, dict(policy.export_adapters()), policy.adapters.config, model_dir)
        return step

    def weights_of(self, checkpoint: Path, model_dir: Path) -> dict[str, Tensor]:
        """Return the weights that ``to_model`` writes, with adapters merged into them. Raises as it does."""
        return dict(self._read(checkpoint, model_dir)[0].export())

    def to_checkpoint(self, model_dir: Path, out: Path) -> None:
        """Write the weights of a model directory as a checkpoint. Raises ConfigRefused, FileExistsError, OSError."""
        if out.exists():
            raise FileExistsError(f"{out}: want a new directory, got one that exists")
        dtype = _dtype_of(model_dir)
        # Renamed at the end: a directory with its final name is complete.
        aside = out.with_name(f"{out.name}-{nonce()}.tmp")
        aside.mkdir(parents=True)
        try:
            self._backend.write_checkpoint(aside, model_dir, self._ranks, dtype=dtype, code_path=self._code_path)
            disk.commit(aside, b"", extra={"step": 0, "world": 1}).rename(out)
        except (LearnerError, OSError):
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def _read(self, checkpoint: Path, model_dir: Path) -> tuple[Policy, int]:
        _verify(checkpoint)
        with _readable(checkpoint, *self._backend.damaged):
            return self._backend.read_model(checkpoint, model_dir, self._ranks, code_path=self._code_path)


@contextmanager
def one_process(kind: str, *, code_path: str = "") -> Iterator[Conversion]:
    """Open the conversion of a backend's files, with the groups of this process alone, by RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT. Raises ConfigRefused.
    """
    backend = open_backend(kind)
    ranks = backend.join(LearnerConfig(), device=torch.device("cpu"), timeout_s=_JOINED_S)
    try:
        yield Conversion(backend, ranks, code_path=code_path)
    finally:
        backend.leave()


def kind_of(checkpoint: Path) -> str:
    """Return the backend that has written a checkpoint. Raises CheckpointCorrupt."""
    _verify(checkpoint)
    with _readable(checkpoint):
        return disk.written_by(checkpoint)


def _verify(checkpoint: Path) -> None:
    """Compare the files with the manifest, if there is one: Megatron's own checkpoints have none."""
    if (checkpoint / MANIFEST).exists():
        disk.verify(checkpoint)


@contextmanager
def _readable(checkpoint: Path, *errors: type[Exception]) -> Iterator[None]:
    """Translate the errors of damaged files. Raises CheckpointCorrupt."""
    try:
        yield
    except LearnerError:
        raise
    except _ERRORS + errors as error:
        reason = str(error).strip().splitlines()
        raise CheckpointCorrupt(
            str(checkpoint), "common.pt, .metadata, *.distcp", "a readable torch_dist checkpoint", reason[:1]
        ) from error


def _dtype_of(model_dir: Path) -> str:
    """Return the dtype of most weights of a model directory. Raises ConfigRefused for one that the learner lacks."""
    sizes: Counter[Any] = Counter()
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                entry = file.get_slice(name)
                sizes[_TYPES.get(entry.get_dtype(), entry.get_dtype())] += torch.Size(entry.get_shape()).numel()
    if not sizes:
        raise ConfigRefused(str(model_dir), "a model with its weights in *.safetensors", "none")
    [(dtype, _)] = sizes.most_common(1)
    return named_dtype(dtype, str(model_dir))
