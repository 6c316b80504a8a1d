"""Second copies of the weights (the proximal policy, the reference), and the models beside the policy."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.trainer.critic import Critic
from tidemill.learner.trainer.port import Weights


def reference_weights(policy: Weights, reference_dir: Path, *, dtype: torch.dtype | None = None) -> "WeightBackup":
    """Return a backup of another model's weights, loaded through the policy, which gets its initial ones again."""
    policy.load_reference(reference_dir)
    backup = WeightBackup(policy, dtype=dtype, whole=True)
    if policy.adapters is not None:
        backup.restore({name: torch.zeros_like(backup.tensors[name]) for name in policy.adapters.names("B")})
    policy.load_initial()
    return backup


def initial_weights(policy: Weights, *, dtype: torch.dtype | None = None) -> "WeightBackup":
    """Return a backup of the initial weights; with adapters zeros for the second matrix of each are enough."""
    if policy.adapters is None:
        return WeightBackup(policy, dtype=dtype)
    zeros = WeightBackup(policy, names=policy.adapters.names("B"))
    zeros.restore({name: torch.zeros_like(copy) for name, copy in zeros.tensors.items()})
    return zeros


class WeightBackup:
    """A second copy of the weights: the proximal policy, the reference. Of CUDA weights it is in pinned host memory.

    It is without heads for further tokens, which its passes do not run.
    """

    def __init__(
        self,
        policy: Weights,
        *,
        dtype: torch.dtype | None = None,
        whole: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        """``dtype`` of the copies; None = that of the weights. A moving average of bfloat16 weights needs float32.

        ``names``: of the weights to copy, as the policy has them; None = all, or the adapters alone, unless ``whole``.
        """
        self._policy = policy
        if names is None and policy.adapters is not None and not whole:
            names = policy.adapters.names()
        left_out = policy.names_of_heads
        self._copies = {
            name: _empty_on_host(weight, dtype)
            for name, weight in policy.named_weights()
            if name not in left_out and (names is None or name in set(names))
        }
        self.refresh()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Copies by the policy's names of the weights (for the checkpoint)."""
        return self._copies

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights. Raises MemoryReleased."""
        self._policy.memory.want("a copy of the weights")
        for name, weight in self._policy.named_weights():
            if name in self._copies:
                self._copies[name].copy_(weight, non_blocking=True)
        _synchronize(self._policy)

    @torch.no_grad()
    def average(self, stays: float) -> None:
        """Move the copies to ``stays * copy + (1 - stays) * current weights``. Raises MemoryReleased."""
        self._policy.memory.want("an average of the weights")
        for name, weight in self._policy.named_weights():
            if name not in self._copies:
                continue
            self._copies[name].lerp_(weight.detach().to("cpu", self._copies[name].dtype), 1 - stays)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace copies by ``tensors`` of the same names (all of them, from a checkpoint)."""
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor)


class OtherWeights:
    """Context in which the model has the weights of one backup after the other, and its own again afterwards, bit for
    bit.

    Where contents are copied in place (``Weights.in_place``), its own weights go to the host once and come back once.
    Elsewhere parameters only point to the copies.
    """

    def __init__(self, policy: Weights, *, in_place: bool | None = None) -> None:
        """``in_place``: copy contents; None = as the policy needs it."""
        self._policy = policy
        self._in_place = policy.in_place if in_place is None else in_place
        self._own: dict[str, Tensor] = {}
        """The model's own weights: pinned copies, which are kept from context to context, or the tensors themselves."""
        self._away: set[str] = set()  # names of the weights that are others at the moment

    def __enter__(self) -> "OtherWeights":
        assert not self._away, "own weights are away"
        return self

    @torch.no_grad()
    def take(self, backup: WeightBackup) -> None:
        """Give the model the weights of ``backup``, and its own where that has none."""
        for name, weight in self._policy.named_weights():
            if name in backup.tensors:
                if name not in self._away:
                    self._put_away(name, weight)
                self._set(weight, backup.tensors[name])
            elif name in self._away:
                self._bring_back(name, weight)
        self._policy.weights_changed()

    def _put_away(self, name: str, weight: Tensor) -> None:
        if not self._in_place:
            self._own[name] = weight.data
        else:
            if name not in self._own:
                self._own[name] = _empty_on_host(weight)
            self._own[name].copy_(weight, non_blocking=True)
        self._away.add(name)

    def _bring_back(self, name: str, weight: Tensor) -> None:
        self._set(weight, self._own[name])
        self._away.discard(name)

    def _set(self, weight: Tensor, source: Tensor) -> None:
        if self._in_place:
            weight.copy_(source, non_blocking=True)
        else:
            weight.data = source.to(weight.dtype)  # the copy itself, unless its dtype is another

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        if not self._away:
            return
        for name, weight in self._policy.named_weights():
            if name in self._away:
                self._bring_back(name, weight)
        self._policy.weights_changed()
        _synchronize(self._policy)  # the only wait: copies and forward passes are in order on one stream


def _empty_on_host(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(parameter, dtype=dtype, device="cpu", pin_memory=parameter.is_cuda, requires_grad=False)


def _synchronize(policy: Weights) -> None:
    if policy.parallel.device.type == "cuda":
        torch.cuda.synchronize()


class Reference:
    """A backup of weights, or none, that follows the policy by ``kl.reference_every`` or ``kl.reference_ema``."""

    def __init__(self, weights: WeightBackup | None, config: KLConfig) -> None:
        self.weights, self._config = weights, config

    @property
    def saved(self) -> WeightBackup | None:
        """The weights, if they belong in the checkpoint."""
        return self.weights if self._config.moves else None

    def follow(self, step: int) -> None:
        """Move the weights after step ``step``, before its checkpoint. Raises MemoryReleased."""
        if self.weights is None:
            return
        if self._config.reference_ema:
            self.weights.average(self._config.reference_ema)
        elif self._config.reference_every and step % self._config.reference_every == 0:
            self.weights.refresh()


def open_reference(policy: Weights, algorithm: AlgorithmConfig) -> Reference:
    """Return the reference of a run: the weights of ``kl.reference``, or those of the policy now."""
    if not algorithm.needs_reference:
        return Reference(None, algorithm.kl)
    # A small share of a difference would be lost in a moving average in bfloat16.
    dtype = torch.float32 if algorithm.kl.reference_ema else None
    if algorithm.kl.reference:
        return Reference(reference_weights(policy, Path(algorithm.kl.reference), dtype=dtype), algorithm.kl)
    return Reference(initial_weights(policy, dtype=dtype), algorithm.kl)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModels:
    """The models beside the policy, as far as they are kept."""

    proximal: WeightBackup | None = None
    """Weights of the last published version, if that is not always the one a step starts from; else None."""
    reference: WeightBackup | None = None
    """Weights of the reference model, if the algorithm needs one; for a checkpoint, if they change. Else None."""
    critic: Critic | None = None
    """Trained with the policy, if the algorithm needs one; else None."""


NO_OTHER_MODELS = OtherModels()
