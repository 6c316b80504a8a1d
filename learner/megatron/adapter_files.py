"""A directory with the adapters of a policy in PEFT's format, which PEFT, vLLM and SGLang load on top of the model."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from learner.lora import CONFIG, WEIGHTS
from learner.megatron.model import Policy
from weightstore.store.snapshot import ASIDE, rename_into_place

ADAPTER = "adapter"
"""Directory of the adapters inside that of the merged model: beside the model's files, libraries would load them on top of it."""


def write_adapter(directory: Path, policy: Policy, model_dir: Path, *, leads: bool = True) -> None:
    """Write the adapters on the model of ``model_dir``; the directory is replaced whole. Collective over the tensor-parallel ranks.

    ``leads``: this rank writes; the others only help to gather.
    """
    assert policy.adapters is not None
    tensors = {name: tensor.to("cpu").contiguous() for name, tensor in policy.adapters.export()}
    if not leads:
        return
    aside = directory.with_name(directory.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
    (aside / CONFIG).write_text(json.dumps(policy.adapters.config.peft(str(model_dir.resolve())), indent=2), encoding="utf-8")
    rename_into_place(aside, directory, durable=True)
