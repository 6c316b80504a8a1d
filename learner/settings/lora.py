"""Settings of LoRA's adapters, PEFT's ``adapter_config.json`` for them, and which weights are trained: all but frozen
ones, or the adapters. Loads no torch.

Sources: LoRA, Hu et al. 2021 (arXiv:2106.09685); rank-stabilised scale, Kalajdzievski 2023 (arXiv:2312.03732).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tidemill.bus.section import NotNegative, OneOf, PositiveFloat, section
from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.errors import ConfigRefused
from tidemill.weightstore.format.adapters import CONFIG, PLAIN, WEIGHTS

if TYPE_CHECKING:
    from tidemill.learner.settings.config import LearnerConfig

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a decoder that can have adapters, by the last part of their Hugging Face names."""
OF_EXPERTS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")
"""Weights of all experts of a layer in one tensor that can have adapters (FSDP), by the last two parts of their names.
"""
_PEFT_LAYOUT = (0, 19)
"""First version of PEFT with the present layout of experts' matrices: before, A and B had each other's axis."""
_PLAIN = {**PLAIN, "layers_to_transform": ([], None), "exclude_modules": ([], None)}
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
    targets: tuple[Annotated[str, OneOf((*TARGETS, *OF_EXPERTS))], ...] = TARGETS
    """Layers with adapters, by the last part of their Hugging Face names. On FSDP also weights that all experts of a
    layer share a tensor for: ``experts.gate_up_proj``, ``experts.up_proj``, ``experts.down_proj``."""
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

    @property
    def of_experts(self) -> tuple[str, ...]:
        """The targets that are weights of experts, sorted."""
        return tuple(sorted(set(self.targets) & set(OF_EXPERTS)))

    def peft(self, base_model: str) -> JsonObject:
        """Return the content of adapter_config.json for adapters on the model ``base_model``."""
        # An older version of PEFT would read the files of experts in its own layout.
        version = ".".join(map(str, (*_PEFT_LAYOUT, 0)))
        experts = {"target_parameters": list(self.of_experts), "peft_version": version} if self.of_experts else {}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "use_rslora": self.rslora,
            "target_modules": sorted(set(self.targets) - set(self.of_experts)),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            **experts,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings about the weights that are trained."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    freeze: tuple[str, ...] = ()
    seed: int = 0
    """Seed of new adapters."""
    trains: bool = True
    """False for a model that is only read: nothing has a gradient."""

    @classmethod
    def of(cls, learner: "LearnerConfig") -> "Tuning":
        """Return the learner's settings."""
        return cls(lora=learner.lora, freeze=learner.optimizer.freeze, seed=learner.seed)


def _version(text: object) -> tuple[int, ...]:
    """Return the first two numbers of a version; none for another text."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2]) if isinstance(text, str) else ()


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
    experts = adapter.get("target_parameters") or []
    targets = adapter.get("target_modules") or ([] if experts else None)
    if experts and _version(adapter.get("peft_version")) < _PEFT_LAYOUT:
        want = (
            "0.19 or newer, whose layout of experts' matrices is read; merge older ones into the model with their PEFT"
        )
        refused.append(ConfigRefused(f"{path}: peft_version", want, adapter.get("peft_version")))
    named = targets if isinstance(experts, list) else experts
    if isinstance(targets, list) and isinstance(experts, list):
        of_experts = (".".join(str(target).split(".")[-2:]) for target in experts)
        named = sorted([*(str(target).rpartition(".")[2] for target in targets), *of_experts])
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
