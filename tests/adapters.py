"""Random adapters for tiny models: under PEFT's names, and the weights with them added by hand."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tidemill.weightstore.format.adapters import AdapterSettings

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def settings(rank: int = 4, alpha: float = 6.0, targets: Iterable[str] = TARGETS) -> AdapterSettings:
    """Return the settings of a run's adapters."""
    peft = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(targets)}
    return AdapterSettings(scale=alpha / rank, peft=peft)


def weights_of(model_dir: Path) -> dict[str, Tensor]:
    """Return the weights of a model directory."""
    return load_file(model_dir / "model.safetensors")


def adapter(
    weights: Mapping[str, Tensor], seed: int, *, rank: int = 4, targets: Iterable[str] = TARGETS, std: float = 0.1
) -> dict[str, Tensor]:
    """Return a random adapter of the layers in ``targets``, large enough to change what is sampled."""
    draws, matrices = torch.Generator().manual_seed(seed), {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in set(targets) and ".experts." not in name:
            rows, columns = weight.shape
            matrices[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, columns, generator=draws) * std
            matrices[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(rows, rank, generator=draws) * std
    return matrices


def with_adapter(weights: Mapping[str, Tensor], matrices: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the weights with an adapter added to them."""
    added = {name: tensor.clone() for name, tensor in weights.items()}
    for name in matrices:
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            product = matrices[name.replace("lora_A", "lora_B")].double() @ matrices[name].double()
            added[f"{module}.weight"] = (added[f"{module}.weight"].double() + scale * product).float()
    return added
