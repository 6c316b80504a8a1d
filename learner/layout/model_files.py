"""Shapes of a model's tensors, from the headers of its files. Loads no weight, and no torch."""

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus.wire.model_values import language_values

INDEX = "model.safetensors.index.json"
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*\.")
"""In names of heads that predict further tokens (MTP); other families number them as layers behind the last one."""
_TOWER = re.compile(r"(?:^|\.)(?:visual|vision|audio|image|multi_modal|embed_vision|embed_audio)\w*\.")
"""In names of the parts of a model that read images and sound."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
HEADER_MOST = 100_000_000  # largest header, in bytes. Source: the safetensors library's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file of safetensors."""

    file: Path
    dtype: str
    """As the header has it: ``BF16``."""
    shape: tuple[int, ...]


def tensors_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, from the headers of the safetensors files. Raises ValueError, OSError."""
    return {name: stored.shape for name, stored in stored_in(path).items()}


def text_tensors_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a model of text is computed with. Raises ValueError, OSError."""
    beside = beside_text_in(path)
    return {name: shape for name, shape in tensors_in(path).items() if name not in beside}


def mtp_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the heads for further tokens (MTP), by the rules of names of all families."""
    layers = _num_layers(path)
    return {name: stored for name, stored in stored_in(path).items() if _is_mtp(name, layers)}


def beside_text_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a model of text is computed without: heads for further tokens, images, sound.

    A directory without weights has none.
    """
    if not any(path.glob("*.safetensors")):
        return {}
    layers = _num_layers(path)
    return {name: stored for name, stored in stored_in(path).items() if _TOWER.search(name) or _is_mtp(name, layers)}


def _is_mtp(name: str, num_layers: float) -> bool:
    if _MTP.search(name):
        return True
    layer = None if _TOWER.search(name) else _LAYER.search(name)
    return layer is not None and int(layer[1]) >= num_layers


def _num_layers(path: Path) -> float:
    values = language_values(json.loads((path / "config.json").read_text(encoding="utf-8")))
    number = values.get("num_hidden_layers")
    return number if isinstance(number, int) else float("inf")


def stored_in(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor's file, dtype and shape, from the headers. Raises ValueError, OSError."""
    if (path / INDEX).is_file():
        files = sorted(set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise ValueError("no such file")
    stored: dict[str, StoredTensor] = {}
    for name in files:
        stored |= _header(path / name)
    return stored


def _header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a header: eight bytes of length, a JSON map (huggingface.co/docs/safetensors, "Format")."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > HEADER_MOST:
            raise ValueError(f"{file}: no safetensors file")
        header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if file.stat().st_size < 8 + length + end:
        raise ValueError(f"{file}: cut off after {file.stat().st_size} of {8 + length + end} bytes")
    return {
        name: StoredTensor(file=file, dtype=entry["dtype"], shape=tuple(entry["shape"]))
        for name, entry in header.items()
    }
