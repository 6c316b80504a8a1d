"""The files of trained adapters, in PEFT's format."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tidemill.learner.settings.optimizer import LoraConfig
from tidemill.weightstore.format.adapters import CONFIG, WEIGHTS
from tidemill.weightstore.store.snapshot_files import ASIDE, rename_into_place

ADAPTER = "adapter"
"""Directory of the adapters inside that of the merged model: beside the model's files, libraries would load them on top
of it.
"""


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], config: LoraConfig, model_dir: Path) -> None:
    """Write exported adapters on the model of ``model_dir``; the directory is replaced whole. Raises OSError."""
    aside = directory.with_name(directory.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(
        {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()},
        aside / WEIGHTS,
        metadata={"format": "pt"},
    )
    (aside / CONFIG).write_text(json.dumps(config.peft(str(model_dir.resolve())), indent=2), encoding="utf-8")
    rename_into_place(aside, directory, durable=True)
