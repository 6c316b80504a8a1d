"""One weight update between begin and end: the tensors announced and received, and its checks. Knows no transfer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tidemill.actors.errors import BadRequest, UpdateRefused
from tidemill.actors.http_api import need
from tidemill.actors.serving.builtin.weights import EMBEDDING, HEAD, Weights
from tidemill.weightstore.errors import WeightstoreError
from tidemill.weightstore.format.manifest import Bucket, TensorSpec


@dataclass(slots=True)
class Update:
    """An open update."""

    epoch: int
    version: int | None
    received: dict[str, None] = field(default_factory=dict)
    """Names of the tensors received, in order of arrival."""
    announced: set[str] = field(default_factory=set)
    """Names of the tensors requested so far."""
    alias: Tensor | None = None
    """Output projection that was sent although it is tied to the embedding; kept to be compared."""
    is_sent: bool = True
    """True when the tensors are sent in messages, not read from a directory."""

    def check_new(self, specs: Sequence[TensorSpec], sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UpdateRefused unless these tensors have the names and shapes of the model (``sizes``), and none was announced before."""
        seen = set(self.announced)
        for spec in specs:
            if spec.name not in sizes:
                raise UpdateRefused(f"{spec.name}: the model has no tensor of this name")
            if spec.shape != sizes[spec.name]:
                raise UpdateRefused(f"{spec.name}: want shape {sizes[spec.name]}, got {spec.shape}")
            if not getattr(torch, spec.dtype).is_floating_point:
                raise UpdateRefused(f"{spec.name}: want floating-point numbers, got {spec.dtype}")
            if spec.name in seen:
                raise UpdateRefused(f"{spec.name}: received twice")
            seen.add(spec.name)

    def check_complete(self, weights: Weights) -> None:
        """Raise UpdateRefused unless every tensor of ``weights`` was received."""
        missing = weights.named.keys() - self.received.keys()
        if missing:
            raise UpdateRefused(f"{len(missing)} of {len(weights.named)} tensors are missing, among them {min(missing)}")
        if self.alias is not None and not torch.equal(self.alias.to(weights.device), weights.named[EMBEDDING]):
            raise UpdateRefused(f"{HEAD}: differs from {EMBEDDING}, to which the model's configuration ties it")

    def check_version(self, served: int) -> None:
        """Raise UpdateRefused unless the version is known and not older than the served one."""
        if self.version is None:
            raise UpdateRefused("weight_version: want the version of these weights, got none")
        if self.version < served:
            raise UpdateRefused(f"weight_version: want >= {served}, which is served, got {self.version}")


def bucket_of(specs: Sequence[TensorSpec]) -> Bucket:
    """Return the flat bucket of these tensors, without gaps between them."""
    return Bucket(specs=tuple(specs), num_bytes=sum(spec.num_bytes for spec in specs))


def specs_in(body: Mapping[str, object]) -> list[TensorSpec]:
    """Return the tensors announced in SGLang's JSON. Raises BadRequest, and UpdateRefused for values that no tensor can have."""
    names, dtypes, shapes = (need(body, name, list) for name in ("names", "dtypes", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest(f"names, dtypes, shapes: want equal lengths, got {len(names)}, {len(dtypes)}, {len(shapes)}")
    try:
        return [
            TensorSpec(name=str(name), shape=tuple(map(int, shape)), dtype=str(dtype).removeprefix("torch."))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
    except (WeightstoreError, TypeError, ValueError) as error:
        raise UpdateRefused(str(error)) from error
