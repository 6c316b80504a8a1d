"""Adam, SGD or Muon of torch, with clipping, and a learning rate by step or trained tokens.

Muon makes each matrix of the model's files orthogonal as a whole:

    gradient -> momentum, each rank its range -> whole part of a tensor-parallel rank, in the gradient buffer
    -> its owner among the replicas: whole matrices of the files -> orthogonal -> this part -> all replicas

Megatron has queries, keys and values in one weight, and gate and up; the files have a matrix each, which FSDP2 trains
as well, so both backends take the same step. Gate and up of a routed expert are one matrix on both. The replicas share
the matrices out; the tensor-parallel ranks of an owner all compute the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from torch import Tensor

from tidemill.learner.backends.megatron.cpu_shim import megatron_device
from tidemill.learner.backends.megatron.layers.lora import is_adapter
from tidemill.learner.backends.megatron.local_layers import EXPERTS
from tidemill.learner.backends.megatron.model import MegatronPolicy
from tidemill.learner.backends.megatron.offload import OffloadedAdam
from tidemill.learner.backends.megatron.optimizer_pieces import (
    MOMENTUM,
    OptimizerPiece,
    buffers_of,
    clipped,
    mains_of,
    make_leaves,
    own_pieces,
    set_steps,
    sharded_pieces,
    state_of_pieces,
    whole_pieces,
)
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.optimizer import MUON, OptimizerConfig
from tidemill.learner.trainer.optimizer import Optimizer, add_momentum, orthogonal

_LAYERS = "decoder.layers."
DECOUPLED = ("adamw", MUON)
"""Optimizers whose weight decay is no part of the gradient."""
PIECES = "optimizer_pieces"  # place of the optimizer's state in the content of a checkpoint, where it is in pieces


def matrices_of(policy: MegatronPolicy) -> dict[Tensor, str]:
    """Return the trained matrices of this rank's layers, with their names in the whole model: no embedding, no output
    layer.
    """
    matrices = {}
    for chunk in policy.chunks:
        whole_names = dict(policy.bridge.names(chunk))
        for name, parameter in chunk.named_parameters():
            if name.startswith(_LAYERS) and parameter.requires_grad and parameter.dim() == 2:
                matrices[parameter] = name if is_adapter(name) else whole_names[name]
    return matrices


class Muon:
    """Updates the matrices before a step of Megatron's optimizers, which have all other weights."""

    def __init__(
        self,
        policy: MegatronPolicy,
        inner: Any,
        names: Mapping[Tensor, str],
        states: Sequence[tuple[OptimizerPiece, dict[str, Tensor]]],
    ) -> None:
        """``inner``: Megatron's optimizer. ``names``: of ``matrices_of``. ``states``: of all pieces of this rank."""
        self._policy, self._names = policy, names
        self.states = list(states)
        """Each piece of this rank with its state."""
        mains = mains_of(inner)
        self._own = [
            (piece, mains[id(piece.parameter)][0], named[MOMENTUM])
            for piece, named in states
            if piece.parameter in names
        ]

    @torch.no_grad()
    def step(self, rate: float, *, weight_decay: float, momentum: float) -> None:
        """Update the matrices by their clipped gradients, which are gone then. Collective over all ranks."""
        for piece, main, buffer in self._own:
            assert main.grad is not None
            moved = add_momentum(main.grad.view(-1), buffer, momentum)
            piece.of(_scratch(piece.parameter)).copy_(moved)
            main.grad = None
        for buffer in (buffer for ddp in self._policy.ddps for buffer in buffers_of(ddp)):
            self._make_orthogonal(buffer)
        for piece, main, _ in self._own:
            main.mul_(1 - rate * weight_decay)
            main.add_(piece.of(_scratch(piece.parameter)).view_as(main), alpha=-rate)

    def _make_orthogonal(self, buffer: Any) -> None:
        """Replace the matrices in a gradient buffer by their updates; collective over the ranks that share it."""
        group = buffer.data_parallel_group
        rank, size = group.rank(), group.size()
        if size > 1 and self._policy.replicas.distributed_optimizer:
            for bucket in buffer.buckets:
                dist.all_gather_into_tensor(bucket.grad_data, bucket.grad_data.chunk(size)[rank], group=group)
        matrices = [parameter for parameter in buffer.param_index_map if parameter in self._names]
        for start in range(0, len(matrices), size):
            together = matrices[start : start + size]
            if rank < len(together):
                values = _scratch(together[rank])
                values.copy_(self._update_of(together[rank], values))
            for owner, parameter in enumerate(together if size > 1 else ()):
                dist.broadcast(_scratch(parameter), group=group, group_src=owner)

    def _update_of(self, parameter: Tensor, values: Tensor) -> Tensor:
        """Return this rank's part of the update; collective over the tensor-parallel ranks."""
        name, ranks = self._names[parameter], self._policy.parallel
        if EXPERTS in name:  # whole on this rank, with gate and up as one matrix, as transformers has them
            return orthogonal(values)
        if not is_adapter(name):
            update: Tensor = self._policy.bridge.update_matrices(name, parameter, values, orthogonal)
            return update
        if ranks.tp_size == 1 or not parameter.tensor_model_parallel:  # type: ignore[attr-defined]
            return orthogonal(values)
        parts = [torch.empty_like(values) for _ in range(ranks.tp_size)]
        dist.all_gather(parts, values.contiguous(), group=ranks.tp_group)
        axis: int = parameter.partition_dim  # type: ignore[attr-defined]
        return orthogonal(torch.cat(parts, dim=axis)).chunk(ranks.tp_size, dim=axis)[ranks.tp_rank]


def _scratch(parameter: Tensor) -> Tensor:
    """Return the parameter's place in the gradient buffer, [O, I] float32, which is free once momentum has taken it."""
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


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


class MegatronOptimizer(Optimizer):
    """Megatron's optimizer (plain or distributed), or an offloaded one."""

    inner: Any
    """Megatron's optimizer, or ``OffloadedAdam``."""

    def __init__(self, policy: MegatronPolicy, config: OptimizerConfig, *, steps: int, offload: bool = False) -> None:
        """``offload``: keep the state in host memory. Raises ConfigRefused where that is not possible."""
        super().__init__(config, steps=steps, parallel=policy.parallel)
        self._policy = policy
        self._has_state = config.name == MUON
        self._taken = 0  # steps of Adam, those before a restart included; counted for state in pieces only
        self._distributed = policy.replicas.distributed_optimizer
        self._experts = bool(policy.config.num_moe_experts)
        if offload and self._experts:
            raise ConfigRefused("learner.offload_optimizer", "false for a model with experts", offload)
        pieces_of = own_pieces if self._distributed else whole_pieces
        self._pieces = [piece for ddp in policy.ddps for piece in pieces_of(ddp)]
        offloaded = partial(
            OffloadedAdam, policy.ddps, self._pieces, distributed=self._distributed, clip_grad=self.max_norm
        )
        self._offloaded = offloaded() if offload else None
        self.inner = self._offloaded or self._megatrons()
        self._muon: Muon | None = None
        if config.name == MUON:
            names = matrices_of(policy)
            with policy.memory.region():
                states = state_of_pieces(self.inner, self._pieces, by_momentum=names)
            self._muon = Muon(policy, self.inner, names, states)
        _prepare(policy, self.inner)

    def _megatrons(self) -> Any:
        config, policy = self._config, self._policy
        with megatron_device(), policy.memory.region(), torch_optimizers():
            inner = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="sgd" if config.name == "sgd" else "adam",
                    decoupled_weight_decay=config.name in DECOUPLED,
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
                part.init_state_fn = _zero_momentum  # which Megatron calls before it loads, and has none for SGD
                with policy.memory.region():  # now, because torch makes none while the momentum is 0
                    _zero_momentum(part.optimizer)
        return inner

    def configure(self, config: OptimizerConfig, *, steps: int) -> None:
        super().configure(config, steps=steps)
        if self._offloaded is not None:
            self._offloaded.clip_grad = self.max_norm

    def zero_grad(self) -> None:
        for ddp in self._policy.ddps:
            ddp.zero_grad_buffer()
        self.inner.zero_grad()

    def _update(self, rate: float) -> float:
        # In each step, because a checkpoint brings the settings of the start that saved it.
        for group in self.inner.param_groups:
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = (self._config.beta1, self._config.beta2), self._config.eps
            group["decoupled_weight_decay"], group["momentum"] = self._config.name in DECOUPLED, self._config.momentum
        with self._memory_of_state():
            norm = self._offloaded.step() if self._offloaded is not None else self._step(rate)
        self._taken += 1
        return norm

    def _step(self, rate: float) -> float:
        """Take a step of Megatron's optimizers, and return the norm before clipping."""
        self.inner.prepare_grads()
        norm = clipped(self.inner, self.max_norm, self._policy.parallel.device)
        if self._muon is not None:
            # Without a gradient afterwards, Adam leaves these matrices as they are.
            self._muon.step(rate, weight_decay=self._config.weight_decay, momentum=self._config.momentum)
        self.inner.step_with_ready_grads()
        return norm

    @torch.no_grad()
    def _reset(self) -> None:
        self._taken = 0
        if self._offloaded is not None:
            self._offloaded.reset()
            return
        for part in self.inner.chained_optimizers:
            for state in part.optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, Tensor):
                        tensor.zero_()

    def _gradients(self) -> Iterator[Tensor]:
        # With a distributed optimizer this rank has reduced its share of each bucket.
        for buffer in (buffer for ddp in self._policy.ddps for buffer in buffers_of(ddp)):
            group = buffer.data_parallel_group
            if not self._distributed:
                yield buffer.grad_data
                continue
            for bucket in buffer.buckets:
                yield bucket.grad_data.chunk(group.size())[group.rank()]

    # ---- in a checkpoint

    def sharded(self, model: Mapping[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """Return the optimizer's part of a checkpoint, under the plain optimizer's names. ``model``: state of all
        chunks.
        """
        if not self._in_pieces:
            return {"optimizer": self.inner.sharded_state_dict(model, is_loading=is_loading)}
        entries = {PIECES: sharded_pieces(model, self._state_of_pieces(), replicated=not self._distributed)}
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
        # With experts there are two optimizers, and Megatron stores each under names of its own. It knows no Muon.
        return self._distributed or self._offloaded is not None or self._experts or self._muon is not None

    def _state_of_pieces(self) -> list[tuple[OptimizerPiece, dict[str, Tensor]]]:
        if self._muon is not None:
            return self._muon.states
        return self._offloaded.tensors() if self._offloaded is not None else state_of_pieces(self.inner, self._pieces)

    def _memory_of_state(self) -> AbstractContextManager[None]:
        """Return the memory region of the first step, which allocates Adam's moments; later none."""
        first, self._has_state = not self._has_state and self._offloaded is None, True
        return self._policy.memory.region() if first else nullcontext()


def _zero_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    # The first step treats 0 as none.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _prepare(policy: MegatronPolicy, inner: Any) -> None:
    """Set those fields of a model's configuration that the schedule reads."""
    policy.config.finalize_model_grads_func = _finalize_unscaled
    policy.config.grad_scale_func = inner.scale_loss
    if policy.replicas.overlap_grad_reduce:  # only the last micro-batch of a minibatch may start a reduction
        policy.config.no_sync_func = (
            policy.ddp.no_sync if len(policy.ddps) == 1 else [ddp.no_sync for ddp in policy.ddps]
        )


def _finalize_unscaled(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    # Megatron would divide by the tokens; the loss already has the step's own denominator.
    finalize_model_grads(model, None, **groups)
