"""Muon for Megatron's parameters: each matrix of the model's files is made orthogonal as a whole.

    gradient -> momentum, each rank its range -> whole part of a tensor-parallel rank, in the gradient buffer
    -> its owner among the replicas: whole matrices of the files -> orthogonal -> this part -> all replicas

Megatron has queries, keys and values in one weight, and gate and up; the files have a matrix each, which FSDP2 trains
as well, so both backends take the same step. Gate and up of a routed expert are one matrix on both. The replicas share
the matrices out; the tensor-parallel ranks of an owner all compute the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learner.backends.megatron.bridges.local_layers import EXPERTS
from tidemill.learner.backends.megatron.layers.lora import is_adapter
from tidemill.learner.backends.megatron.model import MegatronPolicy
from tidemill.learner.backends.megatron.optimizer_pieces import MOMENTUM, OptimizerPiece, buffers_of, mains_of
from tidemill.learner.kernels.orthogonal import add_momentum, orthogonal

_LAYERS = "decoder.layers."


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
        for each in (buffer for ddp in self._policy.ddps for buffer in buffers_of(ddp)):
            self._make_orthogonal(each)
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
