"""Adam with clipping and a learning rate that is a pure function of the step."""

import math
from contextlib import AbstractContextManager, nullcontext

from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from learner.config import OptimizerConfig
from learner.megatron.cpu_shim import megatron_device
from learner.megatron.model import Policy


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

    def step(self, step: int, *, scale: float = 1.0) -> tuple[float, float]:
        """Clip and apply the gradients in step ``step``; returns the gradient norm before clipping and the learning rate.

        ``scale`` multiplies the learning rate.

        All settings of Adam are put in place here, so a loaded optimizer goes on with this start's configuration.
        Must run inside ``megatron_device()``. Raises FloatingPointError on a gradient that is not finite: the weights are unchanged.
        """
        rate = scale * learning_rate(self._config, step, self._steps)
        for group in self.inner.param_groups:
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = (self._config.beta1, self._config.beta2), self._config.eps
        if not all(math.isfinite(buffer.grad_data.sum()) for buffer in self._policy.ddp.buffers):
            raise FloatingPointError(f"step {step}: want finite gradients, got NaN or infinity")
        with self._memory_of_state():
            _, norm, _ = self.inner.step()
        return float(norm), rate

    def _memory_of_state(self) -> AbstractContextManager[None]:
        """Adam's moments are allocated by its first step."""
        first, self._has_state = not self._has_state, True
        return self._policy.memory.region() if first else nullcontext()
