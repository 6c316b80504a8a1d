"""A world of one rank inside the test process."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bus.server.ports import KeptPort
from learner.megatron import parallel
from tests.learner_steps import rank_environment


@contextmanager
def one_rank(wanted: str = "cpu") -> Iterator[parallel.Parallel]:
    """Create Megatron's groups for this process alone, on the CPU or (``cuda``) on the first GPU that it sees.

    Environment and settings are as before afterwards.
    """
    before = dict(os.environ)
    torch.use_deterministic_algorithms(True)
    with KeptPort() as port:
        environment = rank_environment(0, 1, port.number)
        if wanted == "cuda":
            del environment["CUDA_VISIBLE_DEVICES"]
        os.environ.update(environment)
        joined = parallel.join(tensor_parallel_size=1, device=parallel.choose_device(wanted), seed=0)
    try:
        yield joined
    finally:
        parallel.leave()
        gc.collect()  # models and optimizers are in cycles that keep their groups, and with them dozens of threads of gloo
        torch.use_deterministic_algorithms(False)
        os.environ.clear()
        os.environ.update(before)
