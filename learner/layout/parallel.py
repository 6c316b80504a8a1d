"""Process groups of the learner's ranks, and collectives over them. Knows no model.

Loss, log-probs and diagnostics exist on the last stage of a pipeline. They are broadcast, so the code of a step does
not depend on its stage. Context parallelism cuts every row of tokens into equal parts. For attention its ranks exchange
tokens for heads: each has all tokens of the row with its share of the heads, so the work is divided equally whatever
the lengths of the sequences. Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
Shape letters: T = tokens of the row, C = tokens of one part, n = heads, d = head size.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.bus.system.functions import described
from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.errors import ConfigRefused, FirstRankFailed
from tidemill.learner.layout.sizes import num_senders


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Ranks, sizes and process groups of this rank, and its device."""

    rank: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    device: torch.device
    pp_rank: int
    """Stage of the pipeline: a part of the layers."""
    pp_size: int
    pp_group: dist.ProcessGroup
    vp_size: int
    """Chunks of layers of each stage."""
    edge_layers: tuple[int, int]
    """Layers of the first and of the last stage; 0 = as many as each other stage."""
    cp_rank: int
    """Part of every row's tokens."""
    cp_size: int
    cp_group: dist.ProcessGroup
    ep_size: int
    """Ranks over which experts are spread. They are replicas, context-parallel or tensor-parallel ranks of one stage.
    """
    sequence_parallel: bool
    """Between the split matrices, each tensor-parallel rank has its own part of the tokens."""
    sharded_size: int = 1
    """Replicas over which every weight is divided (FSDP); 1 = each replica has the whole."""
    shard_group: dist.ProcessGroup | None = None
    """These replicas, where others have the same parts; None = all replicas."""
    mirror_group: dist.ProcessGroup | None = None
    """Replicas with the same parts, one of each copy of the model, where there are several; None = this one alone."""

    @property
    def export_place(self) -> int:
        """Place of this rank among the ranks of its stage."""
        return (self.dp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    def num_senders(self, at_most: int = 0) -> int:
        """Return the number of ranks of each stage that send weights. ``at_most``: 0 = all that have parts of them."""
        return num_senders(self.tp_size, self.ep_size, at_most, sharded=self.sharded_size)

    @property
    def exports(self) -> bool:
        """True if this rank takes part in a push: it is in the first copy of the model, or has experts of it."""
        return self.export_place < self.num_senders()

    @property
    def sizes(self) -> JsonObject:
        """Sizes of the parallelism that divides a model, by the names of their settings."""
        return {
            "tensor_parallel": self.tp_size,
            "sequence_parallel": self.sequence_parallel,
            "pipeline_parallel": self.pp_size,
            "virtual_pipeline": self.vp_size,
            "first_stage_layers": self.edge_layers[0],
            "last_stage_layers": self.edge_layers[1],
            "context_parallel": self.cp_size,
            "expert_parallel": self.ep_size,
        }

    @property
    def info(self) -> dict[str, int]:
        """Ranks and sizes of the data-, tensor-, pipeline- and context-parallel groups of this rank."""
        places = {
            "dp": (self.dp_rank, self.dp_size),
            "tp": (self.tp_rank, self.tp_size),
            "pp": (self.pp_rank, self.pp_size),
            "cp": (self.cp_rank, self.cp_size),
        }
        return {
            f"{axis}_{name}": value
            for axis, place in places.items()
            for name, value in zip(("rank", "size"), place, strict=True)
        }

    @property
    def last_stage(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_global_rank(self.pp_group, self.pp_size - 1)


def choose_device(setting: str) -> torch.device:
    """Return the device for ``auto | cpu | cuda``, by LOCAL_RANK. Raises ConfigRefused where torch lacks CUDA."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigRefused("learner.device", "auto or cpu where torch finds no GPU", setting)
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def choose_dtype(setting: str, device: torch.device) -> str:
    """Return ``float32`` or ``bfloat16`` for ``auto | float32 | bfloat16`` on ``device``."""
    if setting != "auto":
        return setting
    return "bfloat16" if device.type == "cuda" else "float32"


def join_world(device: torch.device, *, timeout_s: float) -> None:
    """Join the other ranks by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))


def of_replicas(device: torch.device, *, copies: int = 1) -> Parallel:
    """Return this rank's place where every rank is a replica with rows of its own, and has a part of every weight.

    ``copies``: of the model, each divided over as many neighbouring ranks. Collective over all ranks, which have
    joined. Raises ValueError for a number of ranks that is no multiple of them.
    """
    world = dist.group.WORLD
    assert world is not None, "``join_world`` comes first"
    size, left = divmod(dist.get_world_size(), copies)
    if left:
        raise ValueError(f"WORLD_SIZE: want a multiple of the {copies} copies of the model, got {size * copies + left}")
    alone, _ = dist.new_subgroups(group_size=1)
    places: dict[str, Any] = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "cp_rank": 0, "cp_size": 1}
    if copies > 1:
        mirrors = [list(range(first, dist.get_world_size(), size)) for first in range(size)]
        places["shard_group"], _ = dist.new_subgroups(group_size=size)
        places["mirror_group"], _ = dist.new_subgroups_by_enumeration(mirrors)
    return Parallel(
        rank=dist.get_rank(),
        dp_rank=dist.get_rank(),
        dp_size=dist.get_world_size(),
        dp_group=world,
        tp_group=alone,
        pp_group=alone,
        cp_group=alone,
        device=device,
        vp_size=1,
        edge_layers=(0, 0),
        ep_size=1,
        sequence_parallel=False,
        sharded_size=size,
        **places,
    )


T = TypeVar("T")


def is_last_stage(ranks: Parallel) -> bool:
    """Return whether this rank is in the last stage, which has the loss."""
    return ranks.pp_rank == ranks.pp_size - 1


def tensors_of_last_stage(
    values: Sequence[Tensor] | None, lengths: Sequence[int], width: int, ranks: Parallel
) -> list[Tensor]:
    """Return the last stage's float32 tensors [length, width] on all stages. ``values``: None on the others."""
    assert (values is not None) == is_last_stage(ranks)
    rows = torch.empty(sum(lengths), width, device=ranks.device) if values is None else torch.cat(list(values))
    if ranks.pp_size > 1:
        dist.broadcast(rows, src=ranks.last_stage, group=ranks.pp_group)
    return list(rows.split(list(lengths)))


def of_last_stage(value: T | None, ranks: Parallel) -> T:
    """Return the last stage's value, without device tensors, on all stages. ``value``: None on the others."""
    values = [value]
    if ranks.pp_size > 1:
        dist.broadcast_object_list(values, src=ranks.last_stage, group=ranks.pp_group, device=ranks.device)
    assert values[0] is not None
    return values[0]


def values_of_stages(value: T, ranks: Parallel) -> list[T]:
    """Return the values of all stages, without tensors, in their order, on each of them."""
    values: list[Any] = [value] * ranks.pp_size
    if ranks.pp_size > 1:
        dist.all_gather_object(values, value, group=ranks.pp_group)
    return values


def of_all_stages(stage_weights: Iterator[tuple[str, Tensor]], ranks: Parallel) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of all stages, in their order, on each of them. All ranks run the iterator to its end.

    Each stage broadcasts one tensor at a time, so a rank that keeps none has at most one of another stage.
    """
    if ranks.pp_size == 1:
        yield from stage_weights
        return
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


def own_part(values_T: Tensor, rank: int, size: int) -> Tensor:
    """Return part ``rank`` of ``size`` equal parts along the first axis, as a view."""
    assert len(values_T) % size == 0, f"a row of {len(values_T)} tokens has no {size} equal parts"
    width = len(values_T) // size
    return values_T[rank * width : (rank + 1) * width]


def gather_parts(values_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the concatenation of all ranks' parts, [T, ...]; differentiable.

    The computation on the result must be the same on all ranks, because each takes its part of its own gradient.
    """
    gathered: Tensor = _Gather.apply(values_C, group)
    return gathered


def heads_for_tokens(values_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange: [C, n, d] of this rank's tokens -> [T, n / ranks, d] of its heads. Differentiable."""
    ranks = dist.get_world_size(group)
    tokens, heads, size = values_C.shape
    by_rank = values_C.view(tokens, ranks, heads // ranks, size).transpose(0, 1).contiguous()
    exchanged: Tensor = _Exchange.apply(by_rank, group)
    return exchanged.reshape(ranks * tokens, heads // ranks, size)


def tokens_for_heads(values_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange back: [T, m] of this rank's heads -> [C, ranks * m], the heads of all ranks in order. Differentiable."""
    ranks = dist.get_world_size(group)
    tokens, width = values_T.shape
    mine: Tensor = _Exchange.apply(values_T.view(ranks, tokens // ranks, width), group)
    return mine.transpose(0, 1).reshape(tokens // ranks, ranks * width)


def from_first(make: Callable[[], T], *, device: torch.device, group: dist.ProcessGroup | None = None) -> T:
    """Return what ``make`` returns on the first rank of a group, on all its ranks. Collective. None = all ranks.

    Its errors end all ranks: ConfigRefused is raised on all, for any other FirstRankFailed on the ranks that wait.
    """
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = make()
        except ConfigRefused as error:
            outcome[1] = failure = error
        except Exception as error:
            # Of any library: it might not be picklable, or not without code that the other ranks lack.
            outcome[1], failure = FirstRankFailed(described(error)), error
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(outcome, group=group, group_src=0, device=device)
    value, other = outcome
    if (raised := failure or other) is not None:
        raise raised
    return value  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_C: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = values_C.new_empty(dist.get_world_size(group) * len(values_C), *values_C.shape[1:])
        dist.all_gather(list(gathered.chunk(dist.get_world_size(group))), values_C.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        return own_part(grad_T, dist.get_rank(ctx.group), dist.get_world_size(ctx.group)), None


class _Exchange(torch.autograd.Function):
    """Sends slice r of the first axis to rank r. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    dist.all_to_all_single(received, values.contiguous(), group=group)
    return received
