"""Checksums of the bytes of tensors, equal on CPU and CUDA, and the comparison of an engine's weights with the sent
weights.

``sum64``: the bytes as little-endian int32 lanes, with zeros at the end. Each lane is multiplied by an odd 64-bit
number that is drawn from its position (mixed as by SplitMix64), and the products are added up modulo 2^64, with the
number of bytes times another such number. One changed bit always shows; several changes, or lanes that changed places,
are missed with probability 2^-33 at most. All of it is whole numbers, so no device and no order of adding changes it.
Source: multilinear hashing (Lemire, Kaser: Strongly universal string hashing is fast, 2014).

``sha256``: the first 16 hexadecimal digits of the SHA-256, the format of SGLang's /weights_checker on CPU.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.weightstore.format.manifest import ITEM_BYTES


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


LANES = 1 << 18  # Lanes summed at a time: their factors (2 MB) stay in the cache
_MOD = 1 << 64
# 2^64 / golden ratio: the increment of SplitMix64 (Steele, Lea, Flood 2014), as the two multipliers and the shifts of
# ``_mixed``.
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChecksum:
    """One tensor as an engine keeps it: it may hold several of the learner's, one after the other (query, key and
    value; gate and up)."""

    names: tuple[str, ...]
    dtype: str
    """A key of ``ITEM_BYTES``: the dtype of the engine, which may differ from that in which the tensors were sent."""
    sum: str
    """16 hexadecimal digits."""
    zeros: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Elements of padding after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumReport:
    """The checksums of an engine's weights."""

    scheme: str
    """A key of ``SCHEMES``."""
    parts: tuple[TensorChecksum, ...]

    def to_json(self) -> JsonObject:
        """Return the report as the map that ``parse`` reads."""
        report: JsonObject = msgspec.to_builtins(self)
        return report

    @classmethod
    def parse(cls, answer: JsonMapping) -> "ChecksumReport":
        """Return the report in an engine's answer. Raises ValueError naming the wrong part."""
        try:
            report = msgspec.convert(answer, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"checksums: want scheme and parts of names, dtype and sum, got {error}") from None
        if report.scheme not in SCHEMES or any(part.dtype not in ITEM_BYTES for part in report.parts):
            raise ValueError(
                f"checksums: want a scheme of {', '.join(SCHEMES)} and known dtypes, got {report.scheme!r}"
            )
        return report


def sum64(tensors: Sequence[Tensor]) -> str:
    """Return the checksum of the bytes of the tensors, one after the other."""
    flats = [flat for flat in map(_bytes_of, tensors) if flat.numel()] or [torch.empty(0, dtype=torch.uint8)]
    flat = flats[0] if len(flats) == 1 else torch.cat(flats)
    num_bytes = flat.numel()
    if tail := num_bytes % 4:
        flat = torch.cat([flat, flat.new_zeros(4 - tail)])
    # A tensor can be viewed as int32 only from a multiple of 4 bytes of its storage; a bucket may hold it at any other.
    if flat.storage_offset() % 4:
        flat = flat.clone()
    lanes, factors = flat.view(torch.int32), lane_factors(flat.device)
    # Products and sums of int64 wrap modulo 2^64 on every device, which is the modulus of the scheme. The factor of a
    # lane is the factor of its place in the block times the factor of the block, so one table of LANES factors serves
    # tensors of any size.
    blocks = [(part.to(torch.int64) * factors[: part.numel()]).sum() for part in lanes.split(LANES)]
    # Read together: on a GPU each reading waits for all that was queued before.
    sums = torch.stack(blocks).tolist()
    total = num_bytes * _mixed(-1) + sum(block_sum * _mixed(block) for block, block_sum in enumerate(sums))
    return f"{total % _MOD:016x}"


def sha256(tensors: Sequence[Tensor]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the bytes of the tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_bytes_of(tensor).cpu().numpy().data)
    return digest.hexdigest()[:16]


# Functions by the name of the scheme in a report
SCHEMES: dict[str, Callable[[Sequence[Tensor]], str]] = {"sum64": sum64, "sha256": sha256}


def sum_of(scheme: str, part: TensorChecksum, tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum that a part must have if it holds these tensors, which are on one device and complete."""
    dtype, sent = getattr(torch, part.dtype), [tensors[name] for name in part.names]
    first = sent[0] if sent else torch.empty(0)
    with beside(first):
        return SCHEMES[scheme](
            [*(tensor.to(dtype) for tensor in sent), torch.zeros(part.zeros, dtype=dtype, device=first.device)]
        )


def report_checksums(tensors: Mapping[str, Tensor]) -> ChecksumReport:
    """Return the report of an engine that keeps these tensors one by one. They are complete."""
    parts = []
    for name, tensor in tensors.items():
        with beside(tensor):
            parts.append(
                TensorChecksum(names=(name,), dtype=str(tensor.dtype).removeprefix("torch."), sum=sum64([tensor]))
            )
    return ChecksumReport(scheme="sum64", parts=tuple(parts))


def differences(
    report: ChecksumReport, sent: Mapping[str, Tensor], sum_of: Callable[[TensorChecksum], str]
) -> list[str]:
    """Return a line for each sent tensor that differs or is missing in the report; ``sum_of``: a part's right sum."""
    reported = {name for part in report.parts for name in part.names}
    lines = [f"{name}: missing from the engine's report" for name in sent if name not in reported]
    for part in report.parts:
        if not all(name in sent for name in part.names):  # the alias of a tied embedding, or no weight
            continue
        want = sum_of(part)
        if part.sum != want:
            lines.append(f"{' + '.join(part.names)} ({part.dtype}): want {report.scheme} {want}, got {part.sum}")
    return lines


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _mixed(position: int) -> int:
    """Return an odd number of 64 bits."""
    # + 2: the smallest position is -1 (the length), and the mixing maps 0 to 0.
    mixed = (position + 2) * _GOLDEN % _MOD
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % _MOD
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % _MOD
    return (mixed ^ (mixed >> 31)) | 1  # odd, so that the product of two different lanes with it differs modulo 2^64


@functools.cache
def lane_factors(device: torch.device) -> Tensor:
    """Return int64 [LANES]: the odd numbers of positions 0, 1, ..."""
    import numpy as np  # torch has no shift of unsigned 64-bit integers

    mixed = (np.arange(LANES, dtype=np.uint64) + np.uint64(2)) * np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
