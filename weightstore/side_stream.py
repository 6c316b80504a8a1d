"""Work on the tensors of a GPU beside what other threads have queued there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def beside(tensor: Tensor) -> Iterator[None]:
    """Queue the context's work on the GPU of ``tensor`` on a stream of its own, and wait for it; nothing on the CPU.

    All threads share the default stream: work there waits for the trainer's steps, for a collective among them that
    waits for another rank, or for an engine's tokens. What the context reads must be complete before.
    """
    if not tensor.is_cuda:
        yield
        return
    stream = torch.cuda.Stream(tensor.device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()
