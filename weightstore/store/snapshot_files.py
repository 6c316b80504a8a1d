"""A version as an ordinary Hugging Face model directory, with checksums: written whole or not at all, verified before
use.

config.json, tokenizer files, ...     copied from the model directory
model.safetensors                     or model-00001-of-0000N.safetensors with model.safetensors.index.json
manifest.json                         version, step, digest of names/shapes/dtypes, size and SHA-256 of the files; last
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tidemill.bus.system.files import sync
from tidemill.weightstore.errors import SnapshotBroken
from tidemill.weightstore.format import adapters
from tidemill.weightstore.format.checksums import beside
from tidemill.weightstore.format.manifest import ITEM_BYTES, Manifest, TensorSpec
from tidemill.weightstore.transport.staging import StagedAdapter

MANIFEST = "manifest.json"
FORMAT = 1  # Version of manifest.json
SHARD_BYTES = 4_000_000_000  # Largest weight file, unless a single tensor is larger
ASIDE = ".part"  # Suffix of a directory that is being written

# Suffixes of weights in Hugging Face formats, which are not copied: a snapshot has weights of its own
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt"}
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of dtypes in safetensors. Source: huggingface.co/docs/safetensors, "Format"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """The contents of manifest.json."""

    version: int
    step: int
    digest: str
    """Digest of the manifest of the tensors."""
    files: Mapping[str, tuple[int, str]]
    """name -> (bytes, SHA-256 in hexadecimal)"""

    def to_json(self) -> str:
        """Return the text of manifest.json, which ``parse`` reads."""
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(self.files.items())}
        return json.dumps(
            {"format": FORMAT, "version": self.version, "step": self.step, "digest": self.digest, "files": files},
            indent=1,
        )

    @classmethod
    def parse(cls, where: str, text: str | bytes) -> "SnapshotInfo":
        """Return the contents of a manifest.json; ``where`` names it in errors. Raises SnapshotBroken."""
        try:
            row = json.loads(text)
            if row["format"] != FORMAT:
                raise SnapshotBroken(where, f"format {FORMAT}", row["format"])
            files = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in row["files"].items()}
            info = cls(version=int(row["version"]), step=int(row["step"]), digest=str(row["digest"]), files=files)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SnapshotBroken(where, "a snapshot's manifest", repr(error)) from None
        for name in files:
            # The manifest may come from another machine, and a file is written under each name: it must not lead out of
            # the directory.
            if Path(name).name != name or name in (".", "..") or "\0" in name:
                raise SnapshotBroken(where, "plain file names", repr(name))
        return info


def write(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    version: int,
    step: int,
    model_dir: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    durable: bool = True,
    manifest: Manifest | None = None,
) -> SnapshotInfo:
    """Write to a temporary directory and rename it to ``directory``, which is replaced. Returns the manifest's
    contents.

    Each tensor is taken from ``tensors`` once, and not kept. Configuration and tokenizer are copied from ``model_dir``,
    with the tensors' dtype and without an encoding in config.json. With ``durable`` all is synced to the disk; without,
    a loss of power may leave a directory that ``verify`` refuses.
    """
    aside = directory.with_name(directory.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    manifest = manifest or Manifest.of(tensors.items())
    if model_dir is not None:
        copy_companions(model_dir, aside)
        _describe_tensors(aside / "config.json", manifest)
    files = _write_shards(aside, tensors, manifest, shard_bytes)
    for path in sorted(aside.iterdir()):
        if path.name not in files:
            files[path.name] = _hash_file(path)
    info = SnapshotInfo(version=version, step=step, digest=manifest.digest, files=files)
    (aside / MANIFEST).write_text(info.to_json(), encoding="utf-8")
    rename_into_place(aside, directory, durable=durable)
    return info


def write_adapter(directory: Path, copy: StagedAdapter) -> SnapshotInfo:
    """Write the adapter of a version in PEFT's format, with the digest of its base, and rename it to ``directory``."""
    aside = directory.with_name(directory.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = copy.adapter_tensors
    manifest = Manifest.of(tensors.items())
    files = {adapters.WEIGHTS: _write_safetensors(aside / adapters.WEIGHTS, list(manifest.specs), tensors)}
    config = copy.base.settings.peft | {adapters.BASE: copy.base.digest}
    (aside / adapters.CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    files[adapters.CONFIG] = _hash_file(aside / adapters.CONFIG)
    info = SnapshotInfo(version=copy.version, step=copy.step, digest=manifest.digest, files=files)
    (aside / MANIFEST).write_text(info.to_json(), encoding="utf-8")
    rename_into_place(aside, directory, durable=False)
    return info


def adopt(model_dir: Path, directory: Path, *, version: int, step: int, digest: str) -> SnapshotInfo:
    """Make a snapshot of a model directory, with links if the file system has them. Returns the manifest's contents.

    ``digest``: of the manifest of its tensors, which are not read.
    """
    aside = directory.with_name(directory.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and path.name != MANIFEST and not path.name.startswith("."):
            try:
                os.link(
                    path.resolve(), aside / path.name
                )  # the file itself: a Hugging Face cache consists of symbolic links
            except OSError:
                shutil.copyfile(path, aside / path.name)
    files = {path.name: _hash_file(path) for path in aside.iterdir()}
    info = SnapshotInfo(version=version, step=step, digest=digest, files=files)
    (aside / MANIFEST).write_text(info.to_json(), encoding="utf-8")
    rename_into_place(aside, directory, durable=False)
    return info


def _describe_tensors(file: Path, manifest: Manifest) -> None:
    """Set the dtype of most bytes of the tensors in config.json, because a loader casts to it, and leave out the
    encoding of the files that were trained: the tensors are plain.
    """
    sizes: dict[str, int] = {}
    for spec in manifest.specs:
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.num_bytes
    if not sizes or not file.is_file():
        return
    dtype = max(sizes, key=sizes.__getitem__)
    config = json.loads(file.read_text(encoding="utf-8"))
    # A configuration of a model with several parts has one of its own for each; transformers 5 calls the field dtype.
    parts = [part for part in (config, *config.values()) if isinstance(part, dict)]
    named = [(part, field) for part in parts for field in ("torch_dtype", "dtype") if part.get(field)]
    encoded = [part for part in parts if "quantization_config" in part]
    if all(part[field] == dtype for part, field in named) and not encoded:
        return
    for part, field in named:
        part[field] = dtype
    for part in encoded:
        del part["quantization_config"]
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def rename_into_place(aside: Path, directory: Path, *, durable: bool) -> None:
    """Rename a finished directory to its final name."""
    if durable:
        # Files and names before the rename, and the parent after it: a final name means complete, also after a loss
        # of power.
        for path in [*aside.iterdir(), aside]:
            sync(path)
    if directory.exists():
        shutil.rmtree(directory)
    aside.rename(directory)
    if durable:
        sync(directory.parent)


def read_info(directory: Path) -> SnapshotInfo:
    """Return the contents of a snapshot's manifest.json. Raises SnapshotBroken."""
    path = directory / MANIFEST
    try:
        return SnapshotInfo.parse(str(path), path.read_bytes())
    except OSError as error:
        raise SnapshotBroken(str(path), "a readable file", error.strerror) from None


def verify(directory: Path) -> SnapshotInfo:
    """Read and hash every file. Returns the manifest's contents. Raises SnapshotBroken for a missing or other file."""
    info = read_info(directory)
    for name, (size, digest) in info.files.items():
        path = directory / name
        if not path.is_file():
            raise SnapshotBroken(str(path), f"{size} bytes", "no such file")
        if path.stat().st_size != size:
            raise SnapshotBroken(str(path), f"{size} bytes", f"{path.stat().st_size}")
        sha256 = _hash_file(path)[1]
        if sha256 != digest:
            raise SnapshotBroken(str(path), f"SHA-256 {digest}", sha256)
    return info


def copy_companions(model_dir: Path, directory: Path) -> None:
    """Copy the files of a model other than its weights: configuration, tokenizer, code."""
    for path in sorted(model_dir.iterdir()):
        weights = path.suffix in _WEIGHT_FILES or path.name.endswith(".index.json") or path.name == MANIFEST
        if path.is_file() and not weights and not path.name.startswith("."):
            shutil.copyfile(path, directory / path.name)


def _write_shards(
    directory: Path, tensors: Mapping[str, Tensor], manifest: Manifest, shard_bytes: int
) -> dict[str, tuple[int, str]]:
    shards = _shards(manifest, shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
        weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        index = {"metadata": {"total_size": manifest.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return {
        name: _write_safetensors(directory / name, shard, tensors) for name, shard in zip(names, shards, strict=True)
    }


def _shards(manifest: Manifest, shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in manifest.specs:
        if shards[-1] and size + spec.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    # As the safetensors library orders a file: tensors with larger items first, so that each begins at a multiple of
    # its item size.
    return [sorted(shard, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name)) for shard in shards]


def _write_safetensors(path: Path, specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format allows spaces here, and the data then begins at a multiple of 8
    with path.open("wb") as file:
        out = HashingFile(file)
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for spec in specs:
            tensor = tensors[spec.name].detach()
            with beside(tensor):
                flat = tensor.to("cpu").contiguous().reshape(-1)
            out.write(flat.view(torch.uint8).numpy().data)
    return out.size, out.digest.hexdigest()


class HashingFile:
    """A file that counts and hashes the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size, self.digest = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)


def _hash_file(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
