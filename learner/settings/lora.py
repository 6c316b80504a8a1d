"""LoRA: its settings, and PEFT's ``adapter_config.json``, which describes a directory with adapters. Loads no torch.

Source: LoRA, Hu et al. 2021 (arXiv:2106.09685); rank-stabilised scale, Kalajdzievski 2023 (arXiv:2312.03732).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tidemill.bus.section import NotNegative, OneOf, PositiveFloat, section
from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.errors import ConfigRefused
from tidemill.weightstore.format.adapters import CONFIG, WEIGHTS

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a decoder that can have adapters, by the last part of their Hugging Face names."""
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layers_to_transform": ([], None),
    "layer_replication": ([], None),
    "exclude_modules": ([], None),
    "target_parameters": ([], None),
}
"""Fields of adapter_config.json that change the model, at other values, in ways that the learner does not compute."""


@section
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on frozen weights (LoRA): only they are trained (docs/lora.md)."""

    rank: NotNegative = 0
    """Rank of each adapter; 0 = no adapters: all weights are trained."""
    alpha: PositiveFloat = 32.0
    """The product of an adapter's two matrices is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rank-stabilised LoRA)."""
    targets: tuple[Annotated[str, OneOf(TARGETS)], ...] = TARGETS
    """Layers with adapters, by the last part of their Hugging Face names."""
    adapter: str = ""
    """Directory of adapters in PEFT's format, with this rank, alpha and targets, with which the run begins."""

    def __post_init__(self) -> None:
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ValueError(f"targets: want at least one name, each once, got {list(self.targets)!r}")
        if self.adapter and not self.rank:
            raise ValueError("adapter: want rank > 0 with it, that of the directory's adapter_config.json, got rank: 0")

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's two matrices."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def peft(self, base_model: str) -> JsonObject:
        """Return the content of adapter_config.json for adapters on the model ``base_model``."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "use_rslora": self.rslora,
            "target_modules": sorted(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
        }


def adapter_refusals(config: LoraConfig) -> list[ConfigRefused]:
    """Return an error for each difference between the settings and ``config.adapter``; none without one."""
    if not config.adapter:
        return []
    path = Path(config.adapter) / CONFIG
    try:
        adapter = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [
            ConfigRefused("learner.lora.adapter", "a directory with PEFT's adapter_config.json", f"{path}: {error}")
        ]
    if not isinstance(adapter, dict) or str(adapter.get("peft_type", "")).upper() != "LORA":
        kind = adapter.get("peft_type") if isinstance(adapter, dict) else adapter
        return [ConfigRefused(f"{path}: peft_type", "LORA", kind)]
    if not (path.parent / WEIGHTS).is_file():
        return [ConfigRefused("learner.lora.adapter", f"a directory with {WEIGHTS}", str(path.parent))]
    refused = [
        ConfigRefused(f"{path}: {name}", f"{plain[0]!r}, or no such field", adapter[name])
        for name, plain in _PLAIN.items()
        if name in adapter and adapter[name] not in plain
    ]
    targets = adapter.get("target_modules")
    named = sorted(str(target).rpartition(".")[2] for target in targets) if isinstance(targets, list) else targets
    pairs: Mapping[str, tuple[object, object]] = {
        "rank": (adapter.get("r"), config.rank),
        "alpha": (adapter.get("lora_alpha"), config.alpha),
        "rslora": (bool(adapter.get("use_rslora")), config.rslora),
        "targets": (named, sorted(config.targets)),
    }
    return refused + [
        ConfigRefused(f"learner.lora.{name}", f"{adapter_value!r}, as in {path}", value)
        for name, (adapter_value, value) in pairs.items()
        if adapter_value != value
    ]
