"""The port between weight updates and a model: the tensors of one set of weights, by the names of the model's files.

Two kinds keep it: of the decoder (``weights.py``) and of a model of the library transformers
(``transformers_weights.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.weightstore.format.manifest import Bucket


class WeightSet(Protocol):
    """The tensors of one model; undefined until every tensor in ``named`` is filled and ``finalize`` was called."""

    dtype: torch.dtype
    device: torch.device
    order: tuple[str, ...]
    """Names in their order in memory, as far as the set can have it: a push in it may need no copy."""
    named: dict[str, Tensor]
    """Tensors to write, by the names of the model's files. Names of tied tensors are in ``aliases``."""
    writes: int
    """Counter, increased whenever some of the tensors are about to be written."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Name of a tensor in files -> the name in ``named`` of the tensor to which the configuration ties it."""

    @property
    def unused(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors in the model's files that the engine does not need. They may be sent and are not kept."""

    @property
    def adapter_shape(self) -> ModelShape | None:
        """Sizes of the modules that adapters may have; None = the runner of these weights takes no adapter."""

    @property
    def empty_copy(self) -> "Callable[[Sequence[str]], WeightSet]":
        """Function that makes an undefined set of the same model for an order of names. Refers to no weights."""

    @property
    def final(self) -> bool:
        """True when nothing was written since ``finalize``."""

    def finalize(self) -> None:
        """Compute what is derived from the named tensors, which are complete."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the named tensors."""

    def with_alias(self) -> dict[str, Tensor]:
        """Return the named tensors, and the tied ones under their own names too."""

    def place(self, bucket: Bucket) -> Tensor | None:
        """Return the memory of a bucket's tensors, flat uint8, if it has the layout of the bucket; else None."""
