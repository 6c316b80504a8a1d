"""The stages of a pipeline, each of which has a part of the layers: results of the last one, and the weights of all of
them.

Loss, log-probs and diagnostics exist on the last stage. They are broadcast, so that every rank goes on with the same
numbers, and the code of a step does not depend on its stage. Knows the groups of ``parallel``; no model.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learner.layout.parallel import Parallel

T = TypeVar("T")


def is_last(ranks: Parallel) -> bool:
    """Return whether this rank is in the last stage, which has the loss."""
    return ranks.pp_rank == ranks.pp_size - 1


def tensors_of_last(
    values: Sequence[Tensor] | None, lengths: Sequence[int], width: int, ranks: Parallel
) -> list[Tensor]:
    """Return the last stage's float32 tensors [length, width] on all stages. ``values``: those of the last stage; None
    elsewhere.
    """
    assert (values is not None) == is_last(ranks)
    rows = torch.empty(sum(lengths), width, device=ranks.device) if values is None else torch.cat(list(values))
    if ranks.pp_size > 1:
        dist.broadcast(rows, src=ranks.last_stage, group=ranks.pp_group)
    return list(rows.split(list(lengths)))


def of_last(value: T | None, ranks: Parallel) -> T:
    """Return the last stage's value, without tensors on a device, on all stages. ``value``: that of the last stage;
    None elsewhere.
    """
    values = [value]
    if ranks.pp_size > 1:
        dist.broadcast_object_list(values, src=ranks.last_stage, group=ranks.pp_group, device=ranks.device)
    assert values[0] is not None
    return values[0]


def values_of_all(value: T, ranks: Parallel) -> list[T]:
    """Return the values of all stages, without tensors, in their order, on each of them."""
    values: list[Any] = [value] * ranks.pp_size
    if ranks.pp_size > 1:
        dist.all_gather_object(values, value, group=ranks.pp_group)
    return values


def of_all(stage_weights: Iterator[tuple[str, Tensor]], ranks: Parallel) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of all stages, in the order of the stages, on each of them; collective over the stages.

    Each stage in turn broadcasts its tensors one at a time, so that a rank that keeps none has one tensor of another
    stage at most. All ranks must run the iterator to its end.
    """
    for stage in range(ranks.pp_size):
        source = dist.get_global_rank(ranks.pp_group, stage)
        if stage == ranks.pp_rank:
            for name, tensor in stage_weights:
                _announce((name, tuple(tensor.shape), tensor.dtype), source, ranks)
                dist.broadcast(tensor.contiguous(), src=source, group=ranks.pp_group)
                yield name, tensor
            _announce(None, source, ranks)
            continue
        while (header := _announce(None, source, ranks)) is not None:
            name, shape, dtype = header
            tensor = torch.empty(shape, dtype=dtype, device=ranks.device)
            dist.broadcast(tensor, src=source, group=ranks.pp_group)
            yield name, tensor


def _announce(header: Any, source: int, ranks: Parallel) -> Any:
    """Return the header that the rank ``source`` gives, on all stages."""
    headers = [header]
    dist.broadcast_object_list(headers, src=source, group=ranks.pp_group, device=ranks.device)
    return headers[0]
