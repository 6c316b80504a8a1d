"""The part of the optimizer's state that one rank has, its place in a checkpoint, and the norm of the gradients.

With a distributed optimizer every data-parallel rank owns an equal range of each gradient bucket, which may begin and
end inside a row of a matrix. A checkpoint has it as at most three rectangles of that matrix, under the plain
optimizer's names, so one optimizer loads the state of the other, over any number of ranks. Megatron's own formats lose
Adam's step without Apex or Transformer Engine (docs/decisions/022-optimizer-state-in-rectangles.md).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

STATE = ("exp_avg", "exp_avg_sq")
"""Tensors that torch's Adam keeps for every parameter; their names are part of the checkpoint."""
MOMENTUM = "momentum_buffer"
"""Name of the tensor that torch's Muon keeps for a matrix."""
MAIN = "fp32_param"  # name of the float32 main weights in a checkpoint, as Megatron has it


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerPiece:
    """A range of one parameter, with its optimizer state on this rank."""

    parameter: Tensor
    start: int
    """First element of the range in the flattened parameter."""
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the range of ``tensor``, which has the parameter's shape, as a flat view."""
        return tensor.detach().view(-1)[self.start : self.end]


def whole_pieces(ddp: DistributedDataParallel) -> list[OptimizerPiece]:
    """Return a piece for every parameter, for an optimizer that is not distributed."""
    return [OptimizerPiece(parameter, 0, parameter.numel()) for parameter in ddp.params_with_grad]


def buffers_of(ddp: DistributedDataParallel) -> list[Any]:
    """Return all gradient buffers; experts have buffers apart, because other ranks share them."""
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


def own_pieces(ddp: DistributedDataParallel) -> list[OptimizerPiece]:
    """Return the pieces of this rank: its share of each bucket, without the padding between parameters."""
    pieces = []
    for buffer in buffers_of(ddp):
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        for parameter, (begins, ends, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // size
            first = bucket.offset + rank * share
            start, end = max(begins, first), min(ends, first + share)
            if start < end:
                pieces.append(OptimizerPiece(parameter, start - begins, end - begins))
    return pieces


def sharded_pieces(
    model: Mapping[str, Any],
    tensors: Sequence[tuple[OptimizerPiece, Mapping[str, Tensor]]],
    *,
    replicated: bool = False,
) -> list[ShardedTensor]:
    """Return the checkpoint entries of the pieces' state, views of their tensors, so that loading fills them.

    ``model``: sharded state with the parameters. ``tensors``: each piece with its flat tensors by name. ``replicated``:
    other data-parallel ranks have the same pieces.
    """
    of_parameter = {
        id(entry.data): entry for entry in nested_values(extract_sharded_tensors_and_factories(dict(model))[0])
    }
    return [
        entry
        for piece, named in tensors
        for place, start in _places(of_parameter[id(piece.parameter)], piece.parameter)
        for entry in _entries(place, start, piece, named, replicated)
    ]


def _places(entry: ShardedTensor | ShardedTensorFactory, parameter: Tensor) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the model's entries of a parameter, each with its first element: two for a gated MLP's joint projection."""
    start = 0
    for place in entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]:
        yield place, start
        start += math.prod(place.local_shape)
    assert start == parameter.numel(), f"{entry.key}: its parts have {start} elements of {parameter.numel()}"


def _entries(
    place: ShardedTensor, start: int, piece: OptimizerPiece, named: Mapping[str, Tensor], replicated: bool
) -> Iterator[ShardedTensor]:
    """Yield the parts of a piece that lie in ``place``, which begins at element ``start`` of the parameter."""
    first, last = max(piece.start, start), min(piece.end, start + math.prod(place.local_shape))
    width = math.prod(place.local_shape[1:])
    before = (1,) * place.prepend_axis_num
    for row, column, rows, columns in rectangles(first - start, last - start, width):
        at = start + row * width + column - piece.start
        inner = (rows, *((columns,) if len(place.local_shape) > 1 else ()))
        offset = [*place.global_offset]
        offset[place.prepend_axis_num] += row
        if len(place.local_shape) > 1:
            offset[place.prepend_axis_num + 1] += column
        for name, tensor in named.items():
            yield replace(
                place,
                key=f"optimizer.state.{name}.{place.key}",
                data=tensor[at : at + rows * columns].view(*before, *inner),
                dtype=tensor.dtype,
                local_shape=(*before, *inner),
                global_offset=tuple(offset),
                axis_fragmentations=None,  # not a regular grid
                replica_id=place.replica_id
                if replicated
                else (*place.replica_id[:-1], 0),  # 0: no other data-parallel rank has it
                prepend_axis_num=0,
            )


def rectangles(first: int, last: int, width: int) -> list[tuple[int, int, int, int]]:
    """Cut elements ``first`` to ``last`` of a matrix with rows of ``width`` into (row, column, rows, columns)."""
    boxes = []
    while first < last:
        row, column = divmod(first, width)
        if column or last - first < width:
            rows, columns = 1, min(width - column, last - first)
        else:
            rows, columns = (last - first) // width, width
        boxes.append((row, column, rows, columns))
        first += rows * columns
    return boxes


def make_leaves(inner: Any) -> None:
    """Replace the float32 shards of Megatron's new distributed optimizer by leaves on the same memory.

    They are views of the parameters, and torch warns whenever the gradient of a tensor that is no leaf is read.
    """
    for distributed in inner.chained_optimizers:
        for group, shards in zip(distributed.optimizer.param_groups, distributed.shard_fp32_groups, strict=True):
            assert [*map(id, group["params"])][: len(shards)] == [*map(id, shards)], (
                "Megatron orders its groups in another way"
            )
            for at, shard in enumerate(shards):
                shards[at] = group["params"][at] = shard.detach()
                tensor_parallel.copy_tensor_model_parallel_attributes(shards[at], shard)
                if getattr(
                    shard, "shared", False
                ):  # the last stage's copy of a tied embedding, which counts once in the norm
                    shards[at].shared = True


def mains_of(inner: Any) -> dict[int, tuple[Tensor, torch.optim.Optimizer]]:
    """Return the tensor that torch's optimizer updates, and that optimizer, by the id of the parameter."""
    return {
        id(parameter): (main, part.optimizer) for part in inner.chained_optimizers for parameter, main in _mains(part)
    }


def state_of_pieces(
    inner: Any, pieces: Sequence[OptimizerPiece], *, by_momentum: Collection[Tensor] = ()
) -> list[tuple[OptimizerPiece, dict[str, Tensor]]]:
    """Return each piece with its state in Megatron's optimizers (a second one for experts), made here before a step.

    ``by_momentum``: parameters that have Muon's momentum instead of Adam's moments.
    """
    mains, states = mains_of(inner), []
    for piece in pieces:
        main, adam = mains[id(piece.parameter)]
        assert main.numel() == piece.end - piece.start, "Megatron divides its buckets in another way"
        names = (MOMENTUM,) if piece.parameter in by_momentum else STATE
        state = adam.state[main]
        if not state:
            state.update({name: torch.zeros_like(main) for name in names})
            if names == STATE:  # every parameter needs a step of its own, because torch counts it in place
                state["step"] = torch.zeros((), device=main.device)
        named = {name: state[name].view(-1) for name in names}
        states.append(
            (piece, named if piece.parameter.dtype == torch.float32 else {**named, MAIN: main.detach().view(-1)})
        )
    return states


def _mains(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (parameter, the tensor that Adam updates) of one of Megatron's optimizers."""
    if hasattr(optimizer, "shard_fp32_groups"):  # distributed: a shard of the parameter, or of its main weights
        pairs = (
            *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
            *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        )
    elif hasattr(optimizer, "float16_groups"):
        main_groups = optimizer.fp32_from_fp32_groups
        pairs = (
            *zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True),
            *zip(main_groups, main_groups, strict=True),
        )
    else:
        pairs = tuple((group["params"], group["params"]) for group in optimizer.optimizer.param_groups)
    for models, mains in pairs:
        yield from zip(models, mains, strict=True)


def set_steps(inner: Any, steps: int) -> None:
    """Set the number of steps in the state of Megatron's optimizers."""
    for part in inner.chained_optimizers:
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)


SMALL = 1.0e-6  # Megatron's addition to the norm in the factor of clipping


def norm_over_ranks(grads: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the norm of all ranks' gradients, float32; collective. ``device``: of a rank without any."""
    norms = torch.stack(torch._foreach_norm(list(grads))) if grads else torch.zeros(1, device=device)
    square = torch.linalg.vector_norm(norms) ** 2
    dist.all_reduce(square, group=group)
    return float(square.item() ** 0.5)


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor for gradients of norm ``norm``: 1 up to ``max_norm``, above it ``max_norm`` / norm."""
    return min(1.0, max_norm / (norm + SMALL))


@torch.no_grad()
def clipped(inner: Any, max_norm: float, device: torch.device) -> float:
    """Scale the gradients of Megatron's optimizers where their norm is above ``max_norm``. Returns the norm before.

    One collective serves all optimizers with gradients over the same ranks; with experts each has one of its own.
    """
    shared, optimizers = inner.grads_states_parallel_group_is_shared(), inner.chained_optimizers
    by_group = [optimizers] if shared else [[optimizer] for optimizer in optimizers]
    norms = []
    for several in by_group:
        grads = [grad for optimizer in several for grad in optimizer.get_main_grads_for_grad_norm()]
        norms.append(norm_over_ranks(grads, several[0].get_grad_stats_parallel_group(), device))
    norm = norms[0] if len(norms) == 1 else math.sqrt(sum(value**2 for value in norms))
    factor = clip_factor(norm, max_norm)
    grads = [parameter.grad for optimizer in optimizers for parameter in optimizer.get_parameters()]
    if factor < 1.0 and (present := [grad.detach() for grad in grads if grad is not None]):
        torch._foreach_mul_(present, factor)
    return norm
