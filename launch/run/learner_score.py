"""Scores of prompts by the learner's implementation of a model, as a world of one rank in this process."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.server.ports import KeptPort


def score_by_learner(directory: Path, prompts: Sequence[Sequence[int]], names: str, *, dtype: str) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules, as ``tidemill.learner.megatron.activations.module_outputs``. Raises ConfigRefused."""
    import torch

    from tidemill.learner.layout import parallel
    from tidemill.learner.megatron.activations import module_outputs
    from tidemill.learner.megatron.model import build_policy

    with KeptPort() as port:
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}
        os.environ.update(place)
        torch.use_deterministic_algorithms(True)
        here = parallel.join(tensor_parallel_size=1, device=parallel.choose_device("auto"), seed=0)
    try:
        return module_outputs(build_policy(directory, dtype=dtype, parallel=here), prompts, names)
    finally:
        parallel.leave()
