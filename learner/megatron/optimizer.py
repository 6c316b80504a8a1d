"""Adam with clipping and a learning rate that is a pure function of the step. A step that is not finite is skipped by all ranks."""

import logging
import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from learner.config import OptimizerConfig
from learner.megatron.cpu_shim import megatron_device
from learner.megatron.model import Policy

log = logging.getLogger(__name__)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of step ``step`` (1-based) of ``steps``: linear warm-up from 0, then the decay, at min_lr in the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_decay == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    falling = 1 - progress if config.lr_decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (config.lr - config.min_lr) * falling


class PolicyOptimizer:
    """Megatron's optimizer (plain, not distributed; float32 main weights in bfloat16) for one policy."""

    def __init__(self, policy: Policy, config: OptimizerConfig, *, steps: int) -> None:
        self._config, self._steps, self._policy = config, steps, policy
        self._has_state = False
        with megatron_device(), policy.memory.region():
            self.inner = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=config.lr,
                    min_lr=config.min_lr,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.beta1,
                    adam_beta2=config.beta2,
                    adam_eps=config.eps,
                    clip_grad=config.clip_grad or math.inf,  # the norm is wanted in any case
                    bf16=policy.config.bf16,
                    params_dtype=policy.config.params_dtype,
                ),
                [policy.ddp],
            )
        for group in self.inner.param_groups:
            group["fused"] = True  # one kernel for all parameters of a group, on the CPU too

    def zero_grad(self) -> None:
        """Before the first micro-batch."""
        self._policy.ddp.zero_grad_buffer()
        self.inner.zero_grad()

    def step(self, step: int, *, loss: float, scale: float = 1.0) -> tuple[float | None, float]:
        """Clip and apply the gradients in step ``step``; returns the gradient norm before clipping and the learning rate.

        ``loss``: this rank's part of what was minimised. ``scale`` multiplies the learning rate.
        The norm is None when the step was skipped: loss, gradients or learning rate are not finite on some rank. Weights and Adam's
        state are then those of before, on every rank. Collective over all ranks.

        All settings of Adam are put in place here, so a loaded optimizer goes on with this start's configuration.
        Must run inside ``megatron_device()``.
        """
        rate = scale * learning_rate(self._config, step, self._steps)
        if not self._finite(step, loss, rate):
            return None, rate
        for group in self.inner.param_groups:
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = (self._config.beta1, self._config.beta2), self._config.eps
        with self._memory_of_state():
            _, norm, _ = self.inner.step()
        return float(norm), rate

    def _finite(self, step: int, loss: float, rate: float) -> bool:
        """One decision of all ranks. NaN and infinity on any of them survive the sum; so would a square that overflows float32.

        That square is what Megatron makes the norm of, so the norm that it clips by is finite, too.
        """
        squares = [float(torch.linalg.vector_norm(buffer.grad_data)) ** 2 for buffer in self._policy.ddp.buffers]
        here = self._policy.parallel
        sums = torch.tensor([loss, rate, *squares], dtype=torch.float64, device=here.device)
        if here.dp_size * here.tp_size > 1:
            dist.all_reduce(sums)
        if bool(torch.isfinite(sums).all()) and float(sums[2:].sum()) < torch.finfo(torch.float32).max:
            return True
        norm = math.sqrt(sum(squares))
        log.error("step %d skipped: want finite loss and gradients, got loss=%g gradient_norm=%g on rank %d", step, loss, norm, here.rank)
        return False

    def _memory_of_state(self) -> AbstractContextManager[None]:
        """Adam's moments are allocated by its first step."""
        first, self._has_state = not self._has_state, True
        return self._policy.memory.region() if first else nullcontext()
