"""Shapes of a model's tensors, from the headers of its files. Loads no weight, and no torch."""

import json
import struct
from pathlib import Path

INDEX = "model.safetensors.index.json"
HEADER_MOST = 100_000_000  # largest header, in bytes. Source: the safetensors library's own limit


def tensors_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, from the headers of the safetensors files. Raises ValueError, OSError."""
    if (path / INDEX).is_file():
        files = sorted(set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise ValueError("no such file")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        shapes |= _header(path / name)
    return shapes


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a header: eight bytes of length, a JSON map (huggingface.co/docs/safetensors, "Format")."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > HEADER_MOST:
            raise ValueError(f"{file}: no safetensors file")
        header = json.loads(opened.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if file.stat().st_size < 8 + length + end:
        raise ValueError(f"{file}: cut off after {file.stat().st_size} of {8 + length + end} bytes")
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
