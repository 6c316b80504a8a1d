"""Sizes of the rows of a model that transformers runs, for checks before a run. Only its child loads torch.

The child makes the model on torch's ``meta`` device, which has shapes and no memory, and computes two tokens: the
cache that it leaves has the sizes of every kind of layer, which no formula here repeats.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.blocks import RowSizes
from tidemill.bus.system.functions import FunctionRefused, find_object

execute = subprocess.run
"""Start of the child. (Tests fork it instead: its imports take seconds.)"""
LIMIT_S = 300.0
"""Time limit of the child, which imports torch and transformers, in seconds."""
DTYPES = ("float32", "bfloat16")


class SizesRead(msgspec.Struct):
    """Output of the child: sizes by dtype, or the reason for which there are none."""

    sizes: dict[str, RowSizes] = msgspec.field(default_factory=dict)
    where: str = ""
    reason: str = ""


def read_row_sizes(model_dir: Path, family: str = "") -> Mapping[str, RowSizes]:
    """Return the sizes of rows of a model by dtype (float32, bfloat16). Takes seconds. ``family``: ``learner.family``.

    Raises UnsupportedModel for a model that transformers cannot run here.
    """
    # -P, and the module search path of this process: modules of the working directory come last, or not at all.
    command = [sys.executable, "-P", "-m", __name__, str(model_dir), family, json.dumps(sys.path)]
    try:
        done = execute(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        want = f"want its sizes on torch's meta device within {LIMIT_S:.0f} s, got none"
        raise UnsupportedModel(str(model_dir), want) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UnsupportedModel(str(model_dir), f"transformers cannot make it: {last}")
    # The module of a family may print while it is imported.
    read = msgspec.json.decode(done.stdout.rpartition("\n")[2], type=SizesRead)
    if read.reason:
        raise UnsupportedModel(read.where, read.reason)
    return read.sizes


def sizes_on_meta(model_dir: Path, dtype: str) -> RowSizes:
    """Return the sizes of a model's rows. Raises UnsupportedModel."""
    import torch
    from transformers import AutoModelForCausalLM

    from tidemill.actors.serving.builtin.transformers_cache import probe, row_sizes
    from tidemill.actors.serving.builtin.transformers_runner import facts_of, model_options

    config, options = model_options(model_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **options)
    # The other implementations of experts look at the tokens of each, which ``meta`` does not have.
    model.set_experts_implementation("batched_mm")
    return row_sizes(probe(model), facts_of(model, model_dir).max_positions)


def print_sizes(model_dir: Path, family: str) -> None:
    """Print what ``read_row_sizes`` reads: the work of the child."""
    try:
        if family:
            find_object(family, "learner.family")
        read = SizesRead(sizes={dtype: sizes_on_meta(model_dir, dtype) for dtype in DTYPES})
    except FunctionRefused as error:
        read = SizesRead(where="learner.family", reason=str(error))
    except UnsupportedModel as error:
        read = SizesRead(where=error.where, reason=error.reason)
    sys.stdout.write("\n" + msgspec.json.encode(read).decode())


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[3])
    print_sizes(Path(sys.argv[1]), sys.argv[2])
