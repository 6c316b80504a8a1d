"""Child of ``row_sizes.py``: print the sizes of rows of the model directory in the first argument, as JSON. The
second argument is ``learner.family``, or empty.
"""

import sys
from pathlib import Path

import msgspec
import torch
from transformers import AutoModelForCausalLM

from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.blocks import RowSizes
from tidemill.actors.serving.builtin.row_sizes import SizesRead
from tidemill.actors.serving.builtin.transformers_cache import probe, row_sizes
from tidemill.actors.serving.builtin.transformers_runner import facts_of, model_options
from tidemill.bus.system.functions import FunctionRefused, find_object

DTYPES = ("float32", "bfloat16")


def sizes_on_meta(model_dir: Path, dtype: str) -> RowSizes:
    """Return the sizes of a model's rows. Raises UnsupportedModel."""
    config, options = model_options(model_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **options)
    # The other implementations of experts look at the tokens of each, which ``meta`` does not have.
    model.set_experts_implementation("batched_mm")
    return row_sizes(probe(model), facts_of(model, model_dir).max_positions)


def main() -> None:
    """Print the sizes, or why there are none."""
    model_dir, family = Path(sys.argv[1]), sys.argv[2]
    try:
        if family:
            find_object(family, "learner.family")
        read = SizesRead(sizes={dtype: sizes_on_meta(model_dir, dtype) for dtype in DTYPES})
    except FunctionRefused as error:
        read = SizesRead(where="learner.family", reason=str(error))
    except UnsupportedModel as error:
        read = SizesRead(where=error.where, reason=error.reason)
    sys.stdout.write(msgspec.json.encode(read).decode())


if __name__ == "__main__":
    main()
