"""The manifest of a set of weights: names, shapes, dtypes, their digest, and their division into flat buckets.

A bucket on the wire is the plain concatenation of its tensors' bytes, SGLang's ``flattened_bucket``. Imports
torch only where tensors are touched.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgpack
import msgspec

from tidemill.weightstore.errors import BadManifest

if TYPE_CHECKING:
    from torch import Tensor

_Count = Annotated[int, msgspec.Meta(ge=0)]
# Names of dtypes in torch and SGLang, and their sizes
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor, without its values."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    dtype: str
    """A key of ``ITEM_BYTES``."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise BadManifest(f"{self.name}: dtype", f"one of {', '.join(ITEM_BYTES)}", repr(self.dtype))

    @property
    def num_bytes(self) -> int:
        """Size of the values, which are contiguous."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors that are sent in one message."""

    specs: tuple[TensorSpec, ...]
    num_bytes: int
    part: int = 0
    """Part of the weights that it belongs to: 0 is sent by rank 0 of the learner, each other one by another rank."""

    def places(self) -> Iterator[tuple[TensorSpec, slice]]:
        """Yield each tensor with the slice of its bytes in the bucket."""
        start = 0
        for spec in self.specs:
            yield spec, slice(start, start + spec.num_bytes)
            start += spec.num_bytes

    @cached_property
    def packed(self) -> bytes:
        """Msgpack of ``[[name, dtype, shape], ...]``, the tensors as a push by handles names them."""
        packed: bytes = msgpack.packb([[spec.name, spec.dtype, spec.shape] for spec in self.specs])
        return packed

    @classmethod
    def unpacked(cls, packed: bytes) -> "Bucket":
        """Return the bucket of ``packed``. Raises BadManifest for anything else."""
        try:
            specs = tuple(
                TensorSpec(name=str(name), dtype=str(dtype), shape=tuple(map(int, shape)))
                for name, dtype, shape in msgpack.unpackb(packed)
            )
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise BadManifest(
                "specs", "msgpack of [name, dtype, shape] for each tensor", f"{packed!r:.100}: {error}"
            ) from None
        return cls(specs=specs, num_bytes=sum(spec.num_bytes for spec in specs))


class Manifest:
    """All tensors of a model, in the order in which they are sent. Raises BadManifest for a name that comes twice."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(specs)
        self.by_name = {spec.name: spec for spec in self.specs}
        if len(self.by_name) != len(self.specs):
            names = [spec.name for spec in self.specs]
            raise BadManifest(
                "manifest", "every name once", next(f"{name} twice" for name in names if names.count(name) > 1)
            )

    @classmethod
    def of(cls, tensors: "Iterable[tuple[str, Tensor]]") -> "Manifest":
        """Return the manifest of these named tensors, in their order."""
        return cls(spec_of(name, tensor) for name, tensor in tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of names, shapes and dtypes; the order of the tensors does not matter."""
        rows = sorted([spec.name, list(spec.shape), spec.dtype] for spec in self.specs)
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    @cached_property
    def num_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(spec.num_bytes for spec in self.specs)

    def buckets(self, bucket_bytes: int, part: int = 0) -> tuple[Bucket, ...]:
        """Return buckets of at most ``bucket_bytes``, in order; a larger tensor has its own, none is split.

        Every tensor starts at a multiple of its item size, so that a receiver can view it in place.
        """
        buckets: list[Bucket] = []
        specs: list[TensorSpec] = []
        size = 0
        for spec in self.specs:
            if specs and (size + spec.num_bytes > bucket_bytes or size % ITEM_BYTES[spec.dtype]):
                buckets.append(Bucket(specs=tuple(specs), num_bytes=size, part=part))
                specs, size = [], 0
            specs.append(spec)
            size += spec.num_bytes
        if specs:
            buckets.append(Bucket(specs=tuple(specs), num_bytes=size, part=part))
        return tuple(buckets)


def joined(parts: Iterable[Manifest]) -> Manifest:
    """Return the manifest of the tensors of all parts, in their order. Raises BadManifest for a name in two of them."""
    return Manifest(spec for part in parts for spec in part.specs)


def spec_of(name: str, tensor: "Tensor") -> TensorSpec:
    """Return the spec of a tensor. Raises BadManifest for a dtype that is not in ``ITEM_BYTES``."""
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def unflatten(bucket: Bucket, flat: "Tensor") -> "Iterator[tuple[str, Tensor]]":
    """Yield (name, tensor), views of a bucket's flat uint8 tensor. Raises BadManifest for another size."""
    import torch

    if flat.dtype != torch.uint8 or flat.numel() != bucket.num_bytes:
        raise BadManifest("flat bucket", f"{bucket.num_bytes} bytes of uint8", f"{flat.numel()} of {flat.dtype}")
    for spec, place in bucket.places():
        yield spec.name, flat[place].view(getattr(torch, spec.dtype)).view(spec.shape)


def count_of(value: object, where: str, want: str = "a number >= 0") -> int:
    """Return a number in a message, 0 or more. Raises BadManifest with ``where`` and ``want``."""
    try:
        return msgspec.convert(value, _Count)
    except msgspec.ValidationError:
        raise BadManifest(where, want, repr(value)) from None


def unconverted_names(
    names: Iterable[str], stored: Collection[str], renamed: Callable[[str], Collection[str]]
) -> frozenset[str]:
    """Return the names in memory that the files have, too (``stored``), and that the library would rename all the same
    (``renamed``). Its renaming of the experts' module, reversed, takes the dense layers of kimi_linear for experts.
    """
    return frozenset(name for name in names if name in stored and not all(other in stored for other in renamed(name)))
