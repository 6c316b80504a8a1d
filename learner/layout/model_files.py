"""Shapes of a model's tensors, from the headers of its files. Loads no weight, and no torch."""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus.wire.model_values import language_values
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.optimizer import frozen_names

INDEX = "model.safetensors.index.json"
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*\.")
"""In names of heads that predict further tokens (MTP); other families number them as layers behind the last one."""
NUMBERED_HEADS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families whose heads are trained, and are layers behind the last one."""
NAMED_HEADS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families whose only head is trained, and is ``mtp``."""
HEADS_SETTING = "learner.mtp_loss_scaling_factor"
_SHARED = (".embed_tokens.weight", ".shared_head.head.weight")
"""Ends of the names of a head's copies of tensors of the model, which are not trained."""
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
    offset: int
    """Of its first byte in the file."""
    num_bytes: int


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


def trained_heads_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of heads that are trained, without a head's copies of tensors of the model."""
    return {name: stored.shape for name, stored in mtp_in(path).items() if not name.endswith(_SHARED)}


def has_named_head(model_type: str) -> bool:
    """Return whether a family's only head is ``mtp``; ``model_type``: of the model, or transformers' of its text."""
    return model_type.removesuffix("_text") in NAMED_HEADS


def count_heads(model_type: str, path: Path, *, freeze: Sequence[str] = ()) -> int:
    """Return the number of heads in the files of a model.

    Raises ConfigRefused for ones whose structure is not known here, for none, and where ``freeze`` (patterns of names)
    leaves nothing of them to train.
    """
    names = sorted(trained_heads_in(path))
    if not names:
        raise ConfigRefused(HEADS_SETTING, f"0 for a model without heads for further tokens: {path}", "> 0")
    numbers = {int(name.split("layers.")[1].split(".")[0]) for name in names if "layers." in name}
    if not (len(numbers) == 1 if has_named_head(model_type) else model_type in NUMBERED_HEADS):
        families = ", ".join((*NUMBERED_HEADS, *NAMED_HEADS))
        want = f"0 for {model_type}, whose heads ({names[0]}, ...) are kept: those of {families} are trained"
        raise ConfigRefused(HEADS_SETTING, want, "> 0")
    if len(frozen_names(freeze, names)) == len(names):
        want = f"patterns that leave weights of the heads to train with {HEADS_SETTING} > 0"
        raise ConfigRefused("learner.optimizer.freeze", want, list(freeze))
    return len(numbers)


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
        name: StoredTensor(
            file=file,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
