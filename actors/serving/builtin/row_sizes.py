"""Sizes of the rows of a model that transformers runs, for checks before a run. Loads no torch: a child does.

The child makes the model on torch's ``meta`` device, which has shapes and no memory, and computes two tokens: the
cache that it leaves has the sizes of every kind of layer, which no formula here repeats.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.blocks import RowSizes

CHILD = "tidemill.actors.serving.builtin.row_sizes_child"
execute = subprocess.run
"""Start of the child. (Tests fork it instead: its imports take seconds.)"""
LIMIT_S = 300.0
"""Time limit of the child, which imports torch and transformers, in seconds."""


class SizesRead(msgspec.Struct):
    """Output of the child: sizes by dtype, or the reason for which there are none."""

    sizes: dict[str, RowSizes] = msgspec.field(default_factory=dict)
    where: str = ""
    reason: str = ""


def read_row_sizes(model_dir: Path, family: str = "") -> Mapping[str, RowSizes]:
    """Return the sizes of rows of a model by dtype (float32, bfloat16). Takes seconds. ``family``: ``learner.family``.

    Raises UnsupportedModel for a model that transformers cannot run here.
    """
    command = [sys.executable, "-m", CHILD, str(model_dir), family]
    try:
        done = execute(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        want = f"want its sizes on torch's meta device within {LIMIT_S:.0f} s, got none"
        raise UnsupportedModel(str(model_dir), want) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UnsupportedModel(str(model_dir), f"transformers cannot make it: {last}")
    read = msgspec.json.decode(done.stdout, type=SizesRead)
    if read.reason:
        raise UnsupportedModel(read.where, read.reason)
    return read.sizes
