"""A version as what has changed since another one, its base: a directory, checksummed, much smaller where most elements stay as they are.

delta.bin       of every tensor that changed: the XOR of its elements' bits with the base's, compressed with zstd
manifest.json   as of a snapshot, and ``base``, and for every tensor its checksums before and after, and where in delta.bin it is

A tensor is ``same``, ``sparse`` (distances between changed elements, then their XORs) or ``dense`` (the XORs of all); numbers are laid out
byte by byte of equal weight, which compresses best. Whoever applies it must have the base bit for bit, in the types it was written in.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

from weightstore.checksums import sum64
from weightstore.errors import BadManifest, SnapshotBroken
from weightstore.manifest import ITEM_BYTES, Manifest, TensorSpec, spec_of
from weightstore.snapshot import ASIDE, MANIFEST, HashingFile, SnapshotInfo, settle, verify

FILE = "delta.bin"
LEVEL = 1
"""Higher ones take longer and gain next to nothing (docs/benchmarks.md)."""
SPARSE_BELOW = 0.25
"""Share of changed elements below which their places are written down."""

_NOT_STATED = -1
"""Content size of a zstd frame that names none."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of one tensor."""

    spec: TensorSpec
    before: str
    """``sum64`` of the base's tensor."""
    after: str
    kind: str
    """same | sparse | dense."""
    changed: int
    """Elements."""
    at: tuple[int, ...]
    """Offset in delta.bin, then the sizes of the compressed pieces there: distances and XORs, or XORs."""

    def to_json(self) -> dict[str, Any]:
        spec = {"name": self.spec.name, "shape": list(self.spec.shape), "dtype": self.spec.dtype}
        return {**spec, "before": self.before, "after": self.after, "kind": self.kind, "changed": self.changed, "at": list(self.at)}

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> "Change":
        spec = TensorSpec(name=str(row["name"]), shape=tuple(map(int, row["shape"])), dtype=str(row["dtype"]))
        before, after, kind, at = str(row["before"]), str(row["after"]), str(row["kind"]), tuple(map(int, row["at"]))
        if kind not in ("same", "sparse", "dense") or len(at) != {"same": 0, "dense": 2, "sparse": 3}[kind]:
            raise ValueError(f"{spec.name}: want a change, got {kind!r} at {at}")
        return cls(spec=spec, before=before, after=after, kind=kind, changed=int(row["changed"]), at=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInfo:
    """What manifest.json of a delta says."""

    snapshot: SnapshotInfo
    base: int
    """Version."""
    changes: tuple[Change, ...]

    @property
    def versions(self) -> tuple[int, int]:
        """Its own and the base's."""
        return self.snapshot.version, self.base

    @property
    def num_bytes(self) -> int:
        return self.snapshot.files[FILE][0]


def write(
    directory: Path, base: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, base_version: int, version: int, step: int
) -> DeltaInfo:
    """Write the directory aside and rename it into place. Both maps have the same names, shapes and types, on the CPU; else BadManifest."""
    manifest, base_manifest = Manifest.of(tensors.items()), Manifest.of(base.items())
    if manifest.digest != base_manifest.digest:
        raise BadManifest(f"delta of version {version} on {base_version}", f"tensors of digest {base_manifest.digest}", manifest.digest)
    aside = directory.with_name(directory.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with (aside / FILE).open("wb") as file:
        out = HashingFile(file)
        changes = tuple(_write_change(out, spec, base[spec.name], tensors[spec.name]) for spec in manifest.specs)
    files = {FILE: (out.size, out.digest.hexdigest())}
    info = SnapshotInfo(version=version, step=step, digest=manifest.digest, files=files)
    row = {**json.loads(info.to_json()), "base": base_version, "tensors": [change.to_json() for change in changes]}
    (aside / MANIFEST).write_text(json.dumps(row), encoding="utf-8")
    settle(aside, directory, durable=False)
    return DeltaInfo(snapshot=info, base=base_version, changes=changes)


def read(directory: Path) -> DeltaInfo | None:
    """Read and verify every byte; None for a directory that is a whole model. Raises SnapshotBroken."""
    path = directory / MANIFEST
    if not path.exists() or not (directory / FILE).exists():
        return None
    info = verify(directory)
    try:
        row = json.loads(path.read_bytes())
        changes = tuple(Change.parse(change) for change in row["tensors"])
        return DeltaInfo(snapshot=info, base=int(row["base"]), changes=changes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SnapshotBroken(str(path), "a delta's manifest", repr(error)) from None


def apply(directory: Path, info: DeltaInfo, tensors: Mapping[str, Tensor]) -> None:
    """Turn the base's tensors, on any device, into the version's, in place. Tensors of the delta that are not among them are left out.

    Raises BadManifest naming the first tensor that is not the base's (nothing is changed then), is not what it should be afterwards, or is
    not in the delta.
    """
    changes = {change.spec.name: change for change in info.changes}
    for name, tensor in tensors.items():
        if name not in changes:
            raise BadManifest(name, f"a tensor of the delta of version {info.snapshot.version}", "none of this name")
        _check(changes[name].spec, spec_of(name, tensor))
        _compare(name, f"base version {info.base}", changes[name].before, tensor)
    with (directory / FILE).open("rb") as file:
        for name, tensor in tensors.items():
            change = changes[name]
            if change.kind != "same":
                file.seek(change.at[0])
                _patch(tensor, change, [file.read(size) for size in change.at[1:]])
            _compare(name, f"version {info.snapshot.version}", change.after, tensor)


def _write_change(out: HashingFile, spec: TensorSpec, old: Tensor, new: Tensor) -> Change:
    before, after = sum64([old]), sum64([new])
    xor = (_whole(old.contiguous()) ^ _whole(new.contiguous())).cpu().numpy()
    places = np.flatnonzero(xor)
    pieces: list[_Array] = []
    kind = "same" if not places.size else "sparse" if places.size < SPARSE_BELOW * xor.size else "dense"
    if kind == "sparse":
        pieces = [np.diff(places, prepend=-1).astype("<u8" if xor.size >> 32 else "<u4"), xor[places]]
    elif kind == "dense":
        pieces = [xor]
    at = [out.size]
    for piece in pieces:
        packed = zstandard.ZstdCompressor(level=LEVEL).compress(_by_weight(piece))
        out.write(packed)
        at.append(len(packed))
    return Change(spec=spec, before=before, after=after, kind=kind, changed=int(places.size), at=tuple(at) if pieces else ())


def _patch(tensor: Tensor, change: Change, packed: list[bytes]) -> None:
    flat = _whole(tensor)
    wide = np.dtype(f"<i{flat.element_size()}" if flat.dtype != torch.uint8 else "u1")
    if change.kind == "dense":
        flat ^= torch.from_numpy(_unpacked(packed[0], flat.numel(), wide)).to(flat.device)
        return
    if not 0 <= change.changed <= flat.numel():
        raise BadManifest(change.spec.name, f"at most {flat.numel()} changed elements", change.changed)
    gaps = _unpacked(packed[0], change.changed, np.dtype("<u8" if flat.numel() >> 32 else "<u4"))
    reached = np.cumsum(gaps, dtype=np.int64) - 1
    if len(reached) and (reached.min() < 0 or reached.max() >= flat.numel()):
        raise BadManifest(change.spec.name, f"changes of elements 0 to {flat.numel() - 1}", f"{reached.min()} to {reached.max()}")
    places = torch.from_numpy(reached).to(flat.device)
    flat[places] ^= torch.from_numpy(_unpacked(packed[1], change.changed, wide)).to(flat.device)


def _whole(tensor: Tensor) -> Tensor:
    """A flat view of the elements as whole numbers."""
    return tensor.detach().view(-1).view(_WHOLE[ITEM_BYTES[str(tensor.dtype).removeprefix("torch.")]])


def _by_weight(numbers: _Array) -> bytes:
    """First the lowest bytes of all numbers, then the next ones, ..."""
    return numbers.view(np.uint8).reshape(numbers.size, -1).T.tobytes()


def _unpacked(packed: bytes, count: int, dtype: "np.dtype[Any]") -> _Array:
    size = count * dtype.itemsize
    try:
        stated = zstandard.frame_content_size(packed)
        if stated not in (size, _NOT_STATED):  # it would be allocated before a byte is looked at, whatever ``max_output_size`` says
            raise BadManifest(FILE, f"{count} numbers of {dtype.itemsize} bytes", f"a frame of {stated} bytes")
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
    except zstandard.ZstdError as error:
        raise BadManifest(FILE, f"{count} numbers of {dtype.itemsize} bytes", str(error)) from None
    if len(raw) != size:
        raise BadManifest(FILE, f"{count} numbers of {dtype.itemsize} bytes", f"{len(raw)} bytes")
    return np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, count).T.copy().view(dtype).reshape(count)


def _check(want: TensorSpec, got: TensorSpec) -> None:
    if want != got:
        raise BadManifest(want.name, f"{want.dtype}{list(want.shape)}", f"{got.dtype}{list(got.shape)}")


def _compare(name: str, of: str, want: str, tensor: Tensor) -> None:
    if (got := sum64([tensor])) != want:
        raise BadManifest(name, f"sum64 {want} of {of}", got)
