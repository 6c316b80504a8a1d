"""Adam, SGD or an optimizer of torch, with clipping, and a learning rate by step or trained tokens."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from torch import Tensor

from tidemill.learner.errors import ConfigRefused
from tidemill.learner.megatron.cpu_shim import megatron_device
from tidemill.learner.megatron.model import Policy
from tidemill.learner.megatron.offload import OffloadedAdam
from tidemill.learner.megatron.optimizer_pieces import (
    OptimizerPiece,
    buffers_of,
    clipped,
    make_leaves,
    own_pieces,
    set_steps,
    sharded_pieces,
    state_of_pieces,
    whole_pieces,
)
from tidemill.learner.settings.schedule import OptimizerConfig, learning_rate

log = logging.getLogger(__name__)

NAMES: tuple[tuple[ModuleType, str, object], ...] = (
    (optimizer, "Adam", torch.optim.AdamW),
    (optimizer, "SGD", torch.optim.SGD),
    (optimizer, "USING_PYTORCH_OPTIMIZER", True),
    (distrib_optimizer, "Adam", torch.optim.Adam),
)
"""Modules, names in them, and the values that they have where neither package is installed."""


@contextmanager
def torch_optimizers() -> Iterator[None]:
    """Let Megatron make optimizers of torch inside the context."""
    before = [(module, name, getattr(module, name)) for module, name, _ in NAMES]
    for module, name, value in NAMES:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


PIECES = "optimizer_pieces"  # place of the optimizer's state in the content of a checkpoint, where it is in pieces


class PolicyOptimizer:
    """Optimizer of one policy: Megatron's (plain or distributed), or offloaded; main weights are float32."""

    def __init__(self, policy: Policy, config: OptimizerConfig, *, steps: int, offload: bool = False) -> None:
        """``offload``: keep the state in host memory. Raises ConfigRefused where that is not possible."""
        self._config, self._steps, self._policy = config, steps, policy
        self.tokens = (0.0, 0.0)
        """Tokens trained before this step and until its end, which the trainer sets: the place in a schedule by tokens.
        """
        self._has_state = False
        self._reset_for = 0  # step for which the state was last set to 0
        self._taken = 0  # steps of Adam, those before a restart included; counted for state in pieces only
        self._distributed = policy.replicas.distributed_optimizer
        self._experts = bool(policy.config.num_moe_experts)
        if offload and self._experts:
            raise ConfigRefused("learner.offload_optimizer", "false for a model with experts", offload)
        pieces_of = own_pieces if self._distributed else whole_pieces
        self._pieces = [piece for ddp in policy.ddps for piece in pieces_of(ddp)]
        self._most = config.clip_grad or math.inf  # the largest norm of the gradients that is not clipped
        offloaded = partial(
            OffloadedAdam, policy.ddps, self._pieces, distributed=self._distributed, clip_grad=self._most
        )
        self._offloaded = offloaded() if offload else None
        self.inner: Any = self._offloaded or self._megatrons()
        """Megatron's optimizer, or ``OffloadedAdam``."""

    def _megatrons(self) -> Any:
        config, policy = self._config, self._policy
        with megatron_device(), policy.memory.region(), torch_optimizers():
            inner = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="sgd" if config.name == "sgd" else "adam",
                    decoupled_weight_decay=config.name == "adamw",
                    sgd_momentum=config.momentum,
                    lr=config.lr,
                    min_lr=config.min_lr,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.beta1,
                    adam_beta2=config.beta2,
                    adam_eps=config.eps,
                    clip_grad=0.0,  # ``clipped`` does it
                    bf16=policy.config.bf16,
                    params_dtype=policy.config.params_dtype,
                    use_distributed_optimizer=self._distributed,
                    overlap_param_gather=policy.replicas.overlap_param_gather,
                ),
                list(policy.ddps),
            )
        if self._distributed:
            make_leaves(inner)
        for group in inner.param_groups:
            group["fused"] = True  # one kernel for all parameters of a group, on the CPU too
        if config.name == "sgd":
            for part in inner.chained_optimizers:
                part.init_state_fn = (
                    _without_momentum  # Megatron has none for SGD, and calls it before it loads a checkpoint
                )
        return inner

    def configure(self, config: OptimizerConfig, *, steps: int) -> None:
        """Take over the settings of the next steps: any but the optimizer itself and the weights that it trains."""
        self._config, self._steps, self._most = config, steps, config.clip_grad or math.inf
        if self._offloaded is not None:
            self._offloaded.clip_grad = self._most

    @property
    def by_tokens(self) -> bool:
        """True if the learning rate follows ``tokens``."""
        return self._config.by_tokens

    def zero_grad(self) -> None:
        """Set the gradients to 0; call it before the first micro-batch of a step."""
        for ddp in self._policy.ddps:
            ddp.zero_grad_buffer()
        self.inner.zero_grad()

    def step(self, step: int, *, loss: float, scale: float = 1.0) -> tuple[float | None, float]:
        """Clip and apply the gradients in step ``step``. Collective over all ranks; call it inside
        ``megatron_device()``.

        ``loss``: this rank's part of the minimised loss. ``scale`` multiplies the learning rate. Returns the gradient
        norm before clipping and the learning rate. The norm is None when the step was skipped on all ranks because
        loss, gradients or rate are not finite on one; then weights and Adam's state are unchanged.
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
        # In each step, because a checkpoint brings the settings of the start that saved it.
        for group in self.inner.param_groups:
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = (self._config.beta1, self._config.beta2), self._config.eps
            group["decoupled_weight_decay"], group["momentum"] = self._config.name == "adamw", self._config.momentum
        with self._memory_of_state():
            norm = self._offloaded.step() if self._offloaded is not None else self._step()
        self._taken += 1
        return norm, rate

    def _step(self) -> float:
        """Take a step of Megatron's optimizers, and return the norm before clipping."""
        self.inner.prepare_grads()
        norm = clipped(self.inner, self._most, self._policy.parallel.device)
        self.inner.step_with_ready_grads()
        return norm

    @torch.no_grad()
    def _reset(self) -> None:
        """Set the state to 0: moments or momentum, and the count of steps that corrects Adam's bias."""
        self._taken = 0
        if self._offloaded is not None:
            self._offloaded.reset()
            return
        for part in self.inner.chained_optimizers:
            for state in part.optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, Tensor):
                        tensor.zero_()

    def _finite(self, step: int, loss: float, rate: float) -> bool:
        """Return whether loss, rate and gradients are finite on all ranks, the same on each.

        A sum of squares beyond float32 counts as not finite, because Megatron computes the norm for clipping from it.
        """
        squares = [float(torch.linalg.vector_norm(gradient)) ** 2 for gradient in self._reduced()]
        ranks = self._policy.parallel
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

    def _reduced(self) -> Iterator[Tensor]:
        """Yield the gradients that this rank has reduced: with a distributed optimizer its share of each bucket."""
        for buffer in (buffer for ddp in self._policy.ddps for buffer in buffers_of(ddp)):
            group = buffer.data_parallel_group
            if not self._distributed:
                yield buffer.grad_data
                continue
            for bucket in buffer.buckets:
                yield bucket.grad_data.chunk(group.size())[group.rank()]

    # ---- in a checkpoint

    @property
    def kind(self) -> str:
        """The state in a checkpoint: that of adam, which adamw has as well, or of sgd."""
        return "sgd" if self._config.name == "sgd" else "adam"

    def sharded(self, model: Mapping[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """Return the optimizer's part of a checkpoint, under the plain optimizer's names. ``model``: state of all
        chunks.
        """
        if not self._in_pieces:
            return {"optimizer": self.inner.sharded_state_dict(model, is_loading=is_loading)}
        entries = {
            PIECES: sharded_pieces(model, self._state_of_pieces(), replicated=not self._distributed and self._experts)
        }
        if is_loading:
            return entries
        settings = [
            {name: value for name, value in group.items() if name not in ("params", "blocks")}
            for group in self.inner.param_groups
        ]
        common = {"param_groups": settings, "state": {"common_step": torch.tensor(float(self._taken))}}
        return {"optimizer": {"optimizer": common} if self._policy.config.bf16 else common, **entries}

    def restore(self, loaded: Mapping[str, Any]) -> None:
        """Take over the state that was loaded into the content of ``sharded``."""
        if not self._in_pieces:
            self.inner.load_state_dict(loaded["optimizer"])
            return
        common = loaded["optimizer"].get("optimizer", loaded["optimizer"])
        self._taken = int(common["state"].get("common_step", 0))  # the plain optimizer leaves out 0
        owned = {
            tensor.untyped_storage().data_ptr() for _, named in self._state_of_pieces() for tensor in named.values()
        }
        assert all(tensor.untyped_storage().data_ptr() in owned for tensor in loaded[PIECES]), (
            "Megatron has loaded into other tensors"
        )
        if self._offloaded is not None:
            self._offloaded.steps = self._taken
        else:
            set_steps(self.inner, self._taken)

    @property
    def _in_pieces(self) -> bool:
        # With experts there are two optimizers, and Megatron stores each under names of its own.
        return self._distributed or self._offloaded is not None or self._experts

    def _state_of_pieces(self) -> list[tuple[OptimizerPiece, dict[str, Tensor]]]:
        return self._offloaded.tensors() if self._offloaded is not None else state_of_pieces(self.inner, self._pieces)

    def _memory_of_state(self) -> AbstractContextManager[None]:
        """Return the memory region of the first step, which allocates Adam's moments; later none."""
        first, self._has_state = not self._has_state and self._offloaded is None, True
        return self._policy.memory.region() if first else nullcontext()


def _without_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    # Megatron has none for SGD; the first step treats 0 as none.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
