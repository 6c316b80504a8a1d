"""Checkpoints of Megatron's own training (``torch_dist``) as files: iteration, tensors in the index, missing bytes.

    DIR/latest_checkpointed_iteration.txt    "10", or "release"
    DIR/iter_0000010/, or DIR/release/       metadata.json, common.pt, .metadata (index, a pickle), *.distcp (tensors)

No torch: the index is read without its classes, and no code of the pickle is run.
"""

import hashlib
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.learner.checkpoints.disk import TORCH_DIST
from tidemill.learner.checkpoints.manifest import MANIFEST
from tidemill.learner.errors import ConfigRefused

TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the last complete iteration. Source: ``megatron/training/checkpointing.py`` of Megatron-LM."""
SETTING = "model.megatron_checkpoint"
WANTED = "a torch_dist checkpoint of Megatron"
_LAYERS = re.compile(r"decoder\.layers\.(\d+\.)?")
_SAMPLED_BYTES = 1 << 16  # bytes at the start of each file of tensors that are part of the fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Content of ``.metadata``."""

    shapes: Mapping[str, tuple[int, ...]]
    """Global shape of every tensor by Megatron's name, the optimizer's included."""
    sizes: Mapping[str, int]
    """Bytes that each file of tensors has at least."""


def find(directory: Path) -> Path:
    """Return the directory of one iteration: ``directory``, or what its ``TRACKER`` names. Raises ConfigRefused."""
    if (directory / MANIFEST).is_file():
        raise ConfigRefused(SETTING, f"{WANTED}; give one of Tidemill as learner.from_checkpoint", str(directory))
    if any((directory / name).is_file() for name in TORCH_DIST):
        return directory
    if (directory / TRACKER).is_file():
        return directory / _named(directory / TRACKER)
    raise ConfigRefused(
        SETTING, f"{WANTED}: DIR/iter_NNNNNNN, or DIR with {TRACKER}", f"{directory}: {_seen(directory)}"
    )


def _named(tracker: Path) -> str:
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    name = text if text == "release" else f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else ""
    if not name:
        raise ConfigRefused(str(tracker), "the number of an iteration, or release", text)
    if not (tracker.parent / name).is_dir():
        raise ConfigRefused(
            SETTING, f"{name}, the last iteration by {tracker}", f"no such directory in {tracker.parent}"
        )
    return name


def _seen(directory: Path) -> str:
    if not directory.is_dir():
        return "no such directory"
    if (directory / "config.json").is_file():
        return "a model directory in Hugging Face format, which belongs in model.path"
    if any(directory.glob("mp_rank_*")):
        return "a checkpoint in Megatron's format torch; save it with --ckpt-format torch_dist"
    iterations = sorted(path.name for path in directory.glob("iter_*")) + [
        path.name for path in directory.glob("release")
    ]
    return f"no {TRACKER} beside {', '.join(iterations[-3:])}; name one of these" if iterations else "none of its files"


def read_index(iteration: Path) -> Index:
    """Return the index of a complete checkpoint. Raises ConfigRefused for missing, damaged or too short files."""
    if missing := [name for name in TORCH_DIST if not (iteration / name).is_file()]:
        raise ConfigRefused(
            str(iteration), f"{WANTED} with {', '.join(TORCH_DIST)}", f"no {missing[0]}: it was not written completely"
        )
    try:
        backend = json.loads((iteration / TORCH_DIST[0]).read_text(encoding="utf-8"))["sharded_backend"]
        with (iteration / ".metadata").open("rb") as file:
            index = _index(_Classless(file).load())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigRefused(
            str(iteration), f"{WANTED} with a readable index", f"{type(error).__name__}: {error}"
        ) from error
    if backend != "torch_dist":
        raise ConfigRefused(str(iteration), WANTED, f"the format {backend}")
    for name, size in index.sizes.items():
        size_on_disk = (iteration / name).stat().st_size if (iteration / name).is_file() else -1
        if size_on_disk < size:
            got = "no such file" if size_on_disk < 0 else f"{size_on_disk} bytes: it was not written completely"
            raise ConfigRefused(str(iteration / name), f"at least {size} bytes, as in the index", got)
    return index


def described(iteration: Path) -> str:
    """Return the iteration's name, and a digest of index, common part, and sizes and first bytes of tensor files."""
    total = hashlib.sha256()
    for path in sorted(iteration.glob("*.distcp")):
        total.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            total.update(file.read(_SAMPLED_BYTES))
    for name in TORCH_DIST:
        total.update((iteration / name).read_bytes() if (iteration / name).is_file() else b"")
    return f"{iteration.name} (files {total.hexdigest()[:8]})"


def layers_apart(names: Mapping[str, object]) -> bool:
    """Return whether each layer has tensors of its own (``decoder.layers.3.``), instead of one for all layers."""
    return any(match[1] is not None for name in names if (match := _LAYERS.match(name)))


def parts_apart(names: Mapping[str, object]) -> bool:
    """Return whether each expert, and each half of a gated layer, has its own tensors (``singleton_local_shards``)."""
    return any(name.endswith(("weight_w", "weight_v")) for name in names)


class _Object:
    """Stands for an instance of any class in the pickle."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore the arguments: the fields that are read come with the state."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):  # properties of tensors have a tuple, which is not read
            self.__dict__.update(state)


class _Classless(pickle.Unpickler):
    """Makes plain objects of everything but shapes, without importing anything."""

    def find_class(self, module: str, name: str) -> Any:
        return tuple if (module, name) == ("torch", "Size") else type(name, (_Object,), {"__module__": "index"})


def _index(metadata: Any) -> Index:
    """Return the index. Source: ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py``."""
    shapes = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if type(entry).__name__.startswith("Tensor")
    }
    sizes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return Index(shapes=shapes, sizes=sizes)
