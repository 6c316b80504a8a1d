"""The experts that an engine chose for a sample's tokens: their sizes by the model, their bytes and their checks.

Token-aligned: row t has the experts of token t when it was the input of a forward pass, [L, layers with experts,
top_k]. A row is known, or unknown as a whole: then every id in it is the largest number of the dtype. The last token of
a sequence is never an input. L = tokens of the sample, E = layers with experts, K = experts of a token.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.model_values import routing_sizes

RoutedExperts = NDArray[np.uint8 | np.uint16]  # [L, E, K]
_DTYPES: Mapping[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}
_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
_MAX_SIZE = 1 << 12  # Maximum number of layers, and of experts of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedShape:
    """Sizes of the routing of a model."""

    num_layers: _Size
    layers: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]
    """Those with routed experts, in order, from 0."""
    top_k: _Size
    num_experts: _Size

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest dtype that holds every id and the number for unknown."""
        return np.dtype(np.uint8 if self.num_experts <= np.iinfo(np.uint8).max else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token of a sample needs."""
        return len(self.layers) * self.top_k * self.dtype.itemsize

    def unknown(self, num_tokens: int) -> RoutedExperts:
        return np.full((num_tokens, len(self.layers), self.top_k), np.iinfo(self.dtype).max, self.dtype)

    def described(self) -> JsonObject:
        """Return the sizes as an engine reports them in its /server_info."""
        return asdict(self) | {"layers": list(self.layers)}

    @classmethod
    def read(cls, fields: object) -> "RoutedShape":
        """Return the sizes that an engine reports. Raises ValueError for anything else."""
        try:
            shape = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            want = "a map with num_layers, layers, top_k and num_experts"
            raise ValueError(f"want {want}, got {str(fields)[:80]}: {error}") from None
        if shape.top_k > shape.num_experts:
            raise ValueError(f"want top_k at most num_experts, got {shape.top_k} of {shape.num_experts}")
        if tuple(sorted({*shape.layers})) != shape.layers or shape.layers[-1] >= shape.num_layers:
            want = f"numbers of layers in order, from 0 to {shape.num_layers - 1}"
            raise ValueError(f"layers: want {want}, got {str(list(shape.layers))[:80]}")
        return shape

    @classmethod
    def of(cls, values: JsonMapping) -> "RoutedShape | None":
        """Return the sizes in a config.json; None for a dense model, or a family whose layers with experts are not
        known here. Raises KeyError, TypeError, ValueError.
        """
        sizes = routing_sizes(values)
        if sizes is None or not sizes[-1]:
            return None
        num_layers, count, top_k, layers = sizes
        return cls(num_layers=num_layers, layers=tuple(layers), top_k=top_k, num_experts=count)


def unknown_rows(ids_LEK: RoutedExperts) -> NDArray[np.bool_]:
    """Return where the experts are unknown, [L]; the array must have been checked."""
    unknown_L: NDArray[np.bool_] = ids_LEK[:, 0, 0] == np.iinfo(ids_LEK.dtype).max
    return unknown_L


def check_routed_experts(ids_LEK: RoutedExperts, num_tokens: int, shape: RoutedShape | None = None) -> None:
    """Check the experts of ``num_tokens`` tokens; ``shape``: sizes of the model, None = not known. Raises WireError.

    Zeros everywhere are refused, because an engine that has captured nothing may send them.
    """
    if ids_LEK.ndim != 3 or len(ids_LEK) != num_tokens or not ids_LEK[:1].size == np.prod(ids_LEK.shape[1:]) > 0:
        got = f"an array of shape {ids_LEK.shape}"
        raise WireError("routed_experts", f"{num_tokens} tokens x layers x experts", got)
    if shape is not None and ids_LEK.shape[1:] != (len(shape.layers), shape.top_k):
        want = f"{len(shape.layers)} layers and {shape.top_k} experts of a token, as the model has"
        raise WireError("routed_experts", want, f"{ids_LEK.shape[1]} and {ids_LEK.shape[2]}")
    missing = ids_LEK.reshape(num_tokens, -1) == np.iinfo(ids_LEK.dtype).max
    unknown_L = missing.all(axis=1)
    if (mixed_L := missing.any(axis=1) & ~unknown_L).any():
        where = f"routed_experts[{int(np.argmax(mixed_L))}]"
        raise WireError(where, "experts in all of its layers, or in none", "experts in some")
    known_XEK = ids_LEK[~unknown_L]
    if not len(known_XEK):
        return
    if shape is not None and known_XEK.max() >= shape.num_experts:
        raise WireError("routed_experts", f"ids < {shape.num_experts}", int(known_XEK.max()))
    if not known_XEK.any():
        raise WireError("routed_experts", "the experts that the engine has chosen", "0 everywhere")
    ordered = np.sort(known_XEK, axis=-1)
    if (twice := (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))).any():
        token = int(np.flatnonzero(~unknown_L)[np.argmax(twice)])
        raise WireError(f"routed_experts[{token}]", "different experts in each layer", "one of them twice")


_WANT = "a map of layers, top_k, dtype (uint8 or uint16) and ids, raw little-endian bytes"


class _Packed(msgspec.Struct, forbid_unknown_fields=True):
    layers: Annotated[int, msgspec.Meta(ge=1, le=_MAX_SIZE)]
    top_k: Annotated[int, msgspec.Meta(ge=1, le=_MAX_SIZE)]
    dtype: Literal["uint8", "uint16"]
    ids: bytes


def pack_experts(value: object) -> JsonObject:
    """Return the array as a map. Raises ValueError."""
    if not isinstance(value, np.ndarray) or value.ndim != 3 or value.dtype.name not in _DTYPES:
        raise ValueError(_WANT)
    wire = _DTYPES[value.dtype.name]
    return {
        "layers": value.shape[1],
        "top_k": value.shape[2],
        "dtype": value.dtype.name,
        "ids": value.astype(wire, copy=False).tobytes(),
    }


def unpack_experts(value: object) -> RoutedExperts:
    """Return the array of a map. Raises ValueError."""
    try:
        packed = msgspec.convert(value, _Packed)
        ids = np.frombuffer(packed.ids, _DTYPES[packed.dtype]).reshape(-1, packed.layers, packed.top_k)
    except (msgspec.ValidationError, ValueError):
        raise ValueError(_WANT) from None
    return ids.astype(ids.dtype.newbyteorder("="), copy=False)
