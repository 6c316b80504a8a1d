"""Small models whose files have heads for further tokens (MTP), under the names of the releases."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families import FAMILIES, write_family

NUMBERED = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
"""Families whose releases have the heads as layers behind the last one."""
NAMED = ("nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families whose releases have them as ``mtp``."""


def files_of(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a model's files."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rewrite(directory: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    """Write other tensors into a model's directory, and settings into its configuration."""
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))


def write_with_heads(directory: Path, family: str, *, heads: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model with as many heads, whose layers are like its last one. Returns its directory."""
    write_family(directory, family, dtype=dtype)
    files = files_of(directory)
    rewrite(directory, files | heads_of(family, files, heads=heads))
    return directory


def heads_of(family: str, files: dict[str, Tensor], *, heads: int = 1) -> dict[str, Tensor]:
    """Return random heads for a model with these files."""
    numbers = [int(name.split("layers.")[1].split(".")[0]) for name in files if "layers." in name]
    last = max(numbers)
    own = {name.split(f"layers.{last}.")[1]: tensor for name, tensor in files.items() if f"layers.{last}." in name}
    norm = next(tensor for name, tensor in own.items() if name.endswith("norm.weight") and tensor.dim() == 1)
    hidden = next(tensor for name, tensor in files.items() if "embed" in name).shape[1]
    norm, joined = norm.new_ones(hidden), norm.new_ones(hidden, 2 * hidden)
    generator = torch.Generator().manual_seed(7)

    def drawn(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() == 1:
            return (tensor + noise * 0.1).to(tensor.dtype)
        return (noise * tensor.shape[-1] ** -0.5).to(tensor.dtype)

    tensors = {}
    if FAMILIES[family][0] in NUMBERED:
        parts = {"eh_proj": joined, "enorm": norm, "hnorm": norm, "shared_head.norm": norm}
        for number in range(last + 1, last + 1 + heads):
            prefix = f"model.layers.{number}."
            tensors |= {f"{prefix}{name}": drawn(tensor) for name, tensor in own.items()}
            tensors |= {f"{prefix}{name}.weight": drawn(tensor) for name, tensor in parts.items()}
            tensors[f"{prefix}embed_tokens.weight"] = files["model.embed_tokens.weight"].clone()
            tensors[f"{prefix}shared_head.head.weight"] = files["lm_head.weight"].clone()
        return tensors
    parts = {"fc": joined, "pre_fc_norm_embedding": norm, "pre_fc_norm_hidden": norm, "norm": norm}
    return {f"mtp.layers.0.{name}": drawn(tensor) for name, tensor in own.items()} | {
        f"mtp.{name}.weight": drawn(tensor) for name, tensor in parts.items()
    }
