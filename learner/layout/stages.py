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


def is_last(here: Parallel) -> bool:
    """Return whether this rank is in the last stage, which has the loss."""
    return here.pp_rank == here.pp_size - 1


def tensors_of_last(
    values: Sequence[Tensor] | None, lengths: Sequence[int], width: int, here: Parallel
) -> list[Tensor]:
    """Return the last stage's float32 tensors [length, width] on all stages. ``values``: those of the last stage; None
    elsewhere.
    """
    assert (values is not None) == is_last(here)
    whole = torch.empty(sum(lengths), width, device=here.device) if values is None else torch.cat(list(values))
    if here.pp_size > 1:
        dist.broadcast(whole, src=here.last_stage, group=here.pp_group)
    return list(whole.split(list(lengths)))


def of_last(value: T | None, here: Parallel) -> T:
    """Return the last stage's value, without tensors on a device, on all stages. ``value``: that of the last stage;
    None elsewhere.
    """
    found = [value]
    if here.pp_size > 1:
        dist.broadcast_object_list(found, src=here.last_stage, group=here.pp_group, device=here.device)
    assert found[0] is not None
    return found[0]


def values_of_all(own: T, here: Parallel) -> list[T]:
    """Return the values of all stages, without tensors, in their order, on each of them."""
    found: list[Any] = [own] * here.pp_size
    if here.pp_size > 1:
        dist.all_gather_object(found, own, group=here.pp_group)
    return found


def of_all(own: Iterator[tuple[str, Tensor]], here: Parallel) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of all stages, in the order of the stages, on each of them; collective over the stages.

    Each stage in turn broadcasts its tensors one at a time, so that a rank that keeps none has one tensor of another
    stage at most. All ranks must run the iterator to its end.
    """
    for stage in range(here.pp_size):
        source = dist.get_global_rank(here.pp_group, stage)
        if stage == here.pp_rank:
            for name, tensor in own:
                _announce((name, tuple(tensor.shape), tensor.dtype), source, here)
                dist.broadcast(tensor.contiguous(), src=source, group=here.pp_group)
                yield name, tensor
            _announce(None, source, here)
            continue
        while (header := _announce(None, source, here)) is not None:
            name, shape, dtype = header
            tensor = torch.empty(shape, dtype=dtype, device=here.device)
            dist.broadcast(tensor, src=source, group=here.pp_group)
            yield name, tensor


def _announce(header: Any, source: int, here: Parallel) -> Any:
    """Return the header that the rank ``source`` gives, on all stages."""
    found = [header]
    dist.broadcast_object_list(found, src=source, group=here.pp_group, device=here.device)
    return found[0]
