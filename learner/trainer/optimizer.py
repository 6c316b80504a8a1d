"""An optimizer as every backend has it: the learning rate of a step, steps that all ranks take or skip together, and
the update of Muon for one matrix.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.optimizer import OptimizerConfig, learning_rate


def orthogonal(gradient: Tensor) -> Tensor:
    """Return Muon's update of a matrix [O, I], or of each matrix of experts [E, O, I], for a learning rate of 1.

    The factor 0.2 sqrt(max(O, I)) gives it the size of AdamW's update, so both take one learning rate.
    Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv:2502.16982) for the
    factor.
    """
    update = torch.zeros_like(gradient)
    matrices = [update] if update.dim() == 2 else list(update.unbind())
    # A step of torch's Muon from 0, without momentum and decay, is the update.
    torch_muon = torch.optim.Muon(
        matrices, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    for matrix, part in zip(matrices, [gradient] if gradient.dim() == 2 else gradient.unbind(), strict=True):
        matrix.grad = part
    torch_muon.step()
    return update.neg_()


def add_momentum(gradient: Tensor, momentum: Tensor, coefficient: float) -> Tensor:
    """Return what is made orthogonal (Nesterov's rule), and let ``momentum`` move towards the gradient."""
    momentum.lerp_(gradient, 1 - coefficient)
    return gradient.lerp(momentum, coefficient)


log = logging.getLogger(__name__)


class Optimizer(ABC):
    """Optimizer of one policy; main weights are float32. A backend has the gradients and the update."""

    inner: Any
    """The optimizer beneath, as hooks of users get it."""

    def __init__(self, config: OptimizerConfig, *, steps: int, parallel: Parallel) -> None:
        self._config, self._steps, self._parallel = config, steps, parallel
        self.tokens = (0.0, 0.0)
        """Tokens trained before this step and until its end, which the trainer sets: the place in a schedule by tokens.
        """
        self._reset_for = 0  # step for which the state was last set to 0

    def configure(self, config: OptimizerConfig, *, steps: int) -> None:
        """Take over the settings of the next steps: any but the optimizer itself and the weights that it trains."""
        self._config, self._steps = config, steps

    @property
    def by_tokens(self) -> bool:
        """True if the learning rate follows ``tokens``."""
        return self._config.by_tokens

    @property
    def max_norm(self) -> float:
        """Largest norm of the gradients that is not clipped."""
        return self._config.clip_grad or math.inf

    def step(self, step: int, *, loss: float, scale: float = 1.0) -> tuple[float | None, float]:
        """Clip and apply the gradients in step ``step``. Collective over all ranks; call it inside ``Policy.ready``.

        ``loss``: this rank's part of the minimised loss. ``scale`` multiplies the learning rate. Returns the gradient
        norm before clipping and the learning rate. The norm is None when the step was skipped on all ranks because
        loss, gradients or rate are not finite on one; then weights and the optimizer's state are unchanged.
        """
        if step in self._config.reset_at and step != self._reset_for:
            self._reset()
            self._reset_for = step
        rate = scale * learning_rate(self._config, step, self._steps, self.tokens)
        if not self._finite(step, loss, rate):
            return None, rate
        if not rate:
            log.warning(
                "step %d trains nothing: its learning rate is 0; raise learner.optimizer.min_lr or lr_decay_tokens",
                step,
            )
        return self._update(rate), rate

    def _finite(self, step: int, loss: float, rate: float) -> bool:
        """Return whether loss, rate and gradients are finite on all ranks, the same on each.

        A sum of squares beyond float32 counts as not finite, because the norm for clipping may be computed from it.
        """
        squares = [float(torch.linalg.vector_norm(gradient)) ** 2 for gradient in self._gradients()]
        ranks = self._parallel
        sums = torch.tensor([loss, rate, sum(squares)], dtype=torch.float64, device=ranks.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        # One all-reduce decides for all ranks. A rank that skipped alone would leave the others with different weights.
        if bool(torch.isfinite(sums).all()) and float(sums[2]) < torch.finfo(torch.float32).max:
            return True
        norm = math.sqrt(sum(squares))
        log.error(
            "step %d skipped: want finite loss and gradients, got loss=%g gradient_norm=%g on rank %d",
            step,
            loss,
            norm,
            ranks.rank,
        )
        return False

    @property
    def kind(self) -> str:
        """The state in a checkpoint, by which another optimizer's is refused: that of adam, which adamw has as well, of
        sgd or of muon.
        """
        return "adam" if self._config.name == "adamw" else self._config.name

    # ---- of each backend

    @abstractmethod
    def zero_grad(self) -> None:
        """Set the gradients to 0; call it before the first micro-batch of a step."""

    @abstractmethod
    def _gradients(self) -> Iterator[Tensor]:
        """Yield the gradients that this rank has reduced, in any shape; together the ranks have each at least once."""

    @abstractmethod
    def _update(self, rate: float) -> float:
        """Clip the gradients to ``max_norm``, and apply them. Returns their norm over all ranks before clipping.

        Those of heads for further tokens are clipped by their own norm, which is not in it.
        """

    @abstractmethod
    def _reset(self) -> None:
        """Set the state to 0: moments or momentum, and the count of steps that corrects Adam's bias."""
