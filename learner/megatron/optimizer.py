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
    """Return the learning rate of step ``step`` (1-based) of ``steps``: linear warm-up from 0, then the decay to min_lr at the end."""
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
                    clip_grad=config.clip_grad or math.inf,  # not 0, with which Megatron would not compute the norm
                    bf16=policy.config.bf16,
                    params_dtype=policy.config.params_dtype,
                ),
                [policy.ddp],
            )
        for group in self.inner.param_groups:
            group["fused"] = True  # one kernel for all parameters of a group, on the CPU too

    def zero_grad(self) -> None:
        """Set the gradients to 0; call it before the first micro-batch of a step."""
        self._policy.ddp.zero_grad_buffer()
        self.inner.zero_grad()

    def step(self, step: int, *, loss: float, scale: float = 1.0) -> tuple[float | None, float]:
        """Clip and apply the gradients in step ``step``. Collective over all ranks; call it inside ``megatron_device()``.

        ``loss``: this rank's part of the minimised loss. ``scale`` multiplies the learning rate. All settings of Adam are set here, so
        an optimizer that was loaded from a checkpoint continues with the configuration of this start.

        Returns the gradient norm before clipping and the learning rate. The norm is None when the step was skipped because loss,
        gradients or learning rate are not finite on some rank; then weights and Adam's state are unchanged on every rank.
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
        """Return whether loss, rate and gradients are finite on all ranks, the same on each: NaN and infinity of any rank survive the sum.

        A sum of squares beyond float32 counts as not finite, because Megatron computes the norm for clipping from it.
        """
        squares = [float(torch.linalg.vector_norm(buffer.grad_data)) ** 2 for buffer in self._policy.ddp.buffers]
        here = self._policy.parallel
        sums = torch.tensor([loss, rate, *squares], dtype=torch.float64, device=here.device)
        if here.dp_size * here.tp_size > 1:
            dist.all_reduce(sums)
        # One all-reduce decides for all ranks. A rank that skipped alone would leave the others with different weights.
        if bool(torch.isfinite(sums).all()) and float(sums[2:].sum()) < torch.finfo(torch.float32).max:
            return True
        norm = math.sqrt(sum(squares))
        log.error("step %d skipped: want finite loss and gradients, got loss=%g gradient_norm=%g on rank %d", step, loss, norm, here.rank)
        return False

    def _memory_of_state(self) -> AbstractContextManager[None]:
        """Return the memory region of the first step, which allocates Adam's moments; a context without effect afterwards."""
        first, self._has_state = not self._has_state, True
        return self._policy.memory.region() if first else nullcontext()
