"""Settings of the optimizer, the learning rate of each step, and the weights that are frozen. Loads no torch."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from tidemill.bus.section import BASIC, NotNegative, NotNegativeFloat, OneOf, Positive, PositiveFloat, section
from tidemill.learner.errors import ConfigRefused

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
