"""The tensors of a Hugging Face model directory, read one at a time. Knows safetensors and no model."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tidemill.learner.errors import ConfigRefused

INDEX = "model.safetensors.index.json"


class ModelFiles:
    """The safetensors files of a model directory. Files are opened when a tensor of theirs is read, and stay open."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigRefused for a directory without weights."""
        self._directory = directory
        self._opened: dict[str, Any] = {}
        self._file_of = self._index()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, on the CPU. Raises ConfigRefused when there is none of this name, or its file is damaged."""
        if name not in self._file_of:
            raise ConfigRefused(str(self._directory), f"a tensor {name}", "none")
        try:
            found: Tensor = self._open(self._file_of[name]).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigRefused(str(self._directory / self._file_of[name]), f"a safetensors file with {name}", str(error)) from error
        return found

    def _index(self) -> dict[str, str]:
        """Return the file of each tensor."""
        if (self._directory / INDEX).is_file():
            found: dict[str, str] = json.loads((self._directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return found
        files = sorted(path.name for path in self._directory.glob("*.safetensors"))
        if not files:
            raise ConfigRefused(str(self._directory), "weights in *.safetensors", "no such file")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (not a dict)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self._directory / file, framework="pt", device="cpu")
        return self._opened[file]
