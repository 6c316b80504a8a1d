"""Settings of the optimizer, the learning rate of each step, and the trained weights: all but frozen ones, or LoRA's
adapters, with PEFT's ``adapter_config.json``. Loads no torch.

Sources: LoRA, Hu et al. 2021 (arXiv:2106.09685); rank-stabilised scale, Kalajdzievski 2023 (arXiv:2312.03732).
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tidemill.bus.section import BASIC, NotNegative, NotNegativeFloat, OneOf, Positive, PositiveFloat, section
from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.errors import ConfigRefused
from tidemill.weightstore.format.adapters import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from tidemill.learner.settings.config import LearnerConfig

FALLING = ("linear", "cosine", "wsd")
"""Decays that reach min_lr."""
DECAYS = ("constant", *FALLING, "inverse_sqrt")
MUON = "muon"
OPTIMIZERS = ("adamw", "adam", "sgd", MUON)


@section
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer: AdamW, Adam, SGD or Muon."""

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    """adamw | adam (weight decay is added to the gradient) | sgd (with ``momentum``) | muon (of the matrices of layers,
    with ``momentum``, and adamw of other weights)."""
    lr: Annotated[PositiveFloat, BASIC] = 1e-6
    """Peak learning rate."""
    warmup_steps: NotNegative = 0
    """Steps of linear warm-up from 0."""
    lr_decay: Annotated[str, OneOf(DECAYS)] = "constant"
    """Decay after the warm-up; wsd = constant, then linear in a last ``wsd_share`` of the steps."""
    lr_decay_steps: NotNegative = 0
    """Steps, warm-up included, behind which ``linear``, ``cosine`` and ``wsd`` stay at min_lr; 0 = the run's."""
    warmup_tokens: NotNegative = 0
    """Trained tokens of linear warm-up, in a schedule by tokens."""
    lr_decay_tokens: NotNegative = 0
    """Trained tokens behind which ``linear``, ``cosine`` and ``wsd`` reach min_lr: a schedule by tokens. 0 = by steps.
    """
    wsd_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps, or tokens, in which ``wsd`` decays."""
    min_lr: NotNegativeFloat = 0.0
    """Learning rate behind the decay, which the last step of a run does not reach; the least one of ``inverse_sqrt``.
    """
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """Adam's decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's term in the denominator."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of ``sgd`` and ``muon``."""
    weight_decay: NotNegativeFloat = 0.0
    """Weight decay of matrices; norms and biases have none."""
    clip_grad: NotNegativeFloat = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it. 0 = any."""
    freeze: tuple[str, ...] = ()
    """Regular expressions, searched in Hugging Face names: weights that are not trained (docs/lora.md)."""
    reset_at: tuple[Positive, ...] = ()
    """Steps before which the optimizer's state is set to 0, such as those with a new reference or new data."""

    def __post_init__(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: want <= lr = {self.lr:g}, got {self.min_lr!r}")
        if self.lr_decay_steps and self.lr_decay_steps <= self.warmup_steps:
            raise ValueError(
                f"lr_decay_steps: want > warmup_steps = {self.warmup_steps}, or 0, got {self.lr_decay_steps}"
            )
        self._refuse_mixed()
        for pattern in self.freeze:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"freeze: want regular expressions, got {pattern!r}: {error}") from None

    @property
    def by_tokens(self) -> bool:
        """True if the learning rate is a function of the trained tokens, instead of the step."""
        return bool(self.warmup_tokens or self.lr_decay_tokens)

    def _refuse_mixed(self) -> None:
        """Refuse schedules by steps and tokens together, and ones by tokens without a needed end or warm-up."""
        if not self.by_tokens:
            return
        for name in ("warmup_steps", "lr_decay_steps"):
            if getattr(self, name):
                raise ValueError(f"{name}: want 0 with warmup_tokens or lr_decay_tokens, got {getattr(self, name)}")
        if self.lr_decay in FALLING and self.lr_decay_tokens <= self.warmup_tokens:
            raise ValueError(
                f"lr_decay_tokens: want > warmup_tokens = {self.warmup_tokens} with lr_decay: "
                f"{self.lr_decay}, got {self.lr_decay_tokens}"
            )
        if self.lr_decay not in FALLING and self.lr_decay_tokens:
            raise ValueError(
                f"lr_decay_tokens: want 0 with lr_decay: {self.lr_decay}, which has no end, got {self.lr_decay_tokens}"
            )


def learning_rate(config: OptimizerConfig, step: int, steps: int, tokens: tuple[float, float] = (0, 0)) -> float:
    """Return the learning rate of step ``step`` (1-based) of ``steps``: linear warm-up from 0, then the decay.

    ``tokens``: trained before this step, and until its end; they stand for the step in a schedule by tokens.
    The warm-up counts this step and the decay does not, so that neither the first nor the last step has rate 0: without
    a warm-up a linear decay to 0 ends with ``lr / steps``, as transformers' does.
    Source: wsd, Hu et al. 2024 (MiniCPM, arXiv:2404.06395), here with a linear end; inverse_sqrt, Vaswani et al. 2017,
    section 5.3.
    """
    before: float
    until: float
    if config.by_tokens:
        (before, until), warmup, end = tokens, config.warmup_tokens, config.lr_decay_tokens
    else:
        before, until, warmup, end = step - 1, step, config.warmup_steps, config.lr_decay_steps or steps
    if until <= warmup:
        return config.lr * until / max(1, warmup)
    if config.lr_decay == "constant":
        return config.lr
    if config.lr_decay == "inverse_sqrt":
        return max(config.min_lr, config.lr * math.sqrt(max(1, warmup) / until))
    progress = min(1.0, max(0.0, before - warmup) / max(1, end - warmup))
    if config.lr_decay == "wsd":
        progress = max(0.0, (progress - (1 - config.wsd_share)) / config.wsd_share)
    falling = (1 + math.cos(math.pi * progress)) / 2 if config.lr_decay == "cosine" else 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * falling


def frozen_names(patterns: Iterable[str], names: Sequence[str]) -> set[str]:
    """Return the Hugging Face names in which a pattern is found."""
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def is_frozen(patterns: Iterable[str], names: Sequence[str], where: str) -> bool:
    """Return whether the patterns freeze the tensor that has these Hugging Face names ``where`` it is trained.

    Raises ConfigRefused for patterns that name a part of it.
    """
    frozen = frozen_names(patterns, names)
    if frozen and len(frozen) < len(names):
        want = f"all or none of {', '.join(names)}, which are one tensor in {where}"
        raise ConfigRefused("learner.optimizer.freeze", want, sorted(frozen))
    return bool(frozen)


def unmatched(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the patterns that are found in none of the names."""
    return [pattern for pattern in patterns if not any(re.search(pattern, name) for name in names)]


TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a decoder that can have adapters, by the last part of their Hugging Face names."""
OF_EXPERTS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")
"""Weights of all experts of a layer in one tensor that can have adapters (FSDP), by the last two parts of their names.
"""
_PEFT_LAYOUT = (0, 19)
"""First version of PEFT with the present layout of experts' matrices: before, A and B had each other's axis."""
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
    targets: tuple[Annotated[str, OneOf((*TARGETS, *OF_EXPERTS))], ...] = TARGETS
    """Layers with adapters, by the last part of their Hugging Face names; ``experts.`` before the name of the weight of
    all experts of a layer (on FSDP)."""
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
