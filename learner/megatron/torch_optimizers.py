"""Megatron with torch's Adam and SGD, also where Transformer Engine or Apex is installed.

Megatron-core 0.16 takes the fused optimizers of either package if it can be imported. Their state has other entries (the step is in the
group), which checkpoints in pieces do not have, and they round otherwise: a run would depend on what else is installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer

NAMES: tuple[tuple[ModuleType, str, object], ...] = (
    (optimizer, "Adam", torch.optim.AdamW),
    (optimizer, "SGD", torch.optim.SGD),
    (optimizer, "USING_PYTORCH_OPTIMIZER", True),
    (distrib_optimizer, "Adam", torch.optim.Adam),
)
"""Modules, names in them, and the values that they have where neither package is installed."""


@contextmanager
def torch_optimizers() -> Iterator[None]:
    """Let Megatron make optimizers of torch inside the context."""
    before = [(module, name, getattr(module, name)) for module, name, _ in NAMES]
    for module, name, value in NAMES:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
