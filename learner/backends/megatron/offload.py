"""Adam with its state in host memory: the moments, and the float32 main weights of a model in bfloat16.

A step copies the state to the device block by block, updates it there with the same fused kernel as without offload,
and copies it back, so the weights have the same bits. Megatron's HybridDeviceOptimizer computes on the host's cores
instead, and needs CUDA to be built (docs/decisions/022-optimizer-state-in-rectangles.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.optim.adamw import adamw

from tidemill.learner.backends.megatron.optimizer_pieces import (
    MAIN,
    STATE,
    OptimizerPiece,
    clip_factor,
    norm_over_ranks,
)
from tidemill.learner.layout.sizes import OFFLOADED_AT_ONCE

_SETTINGS = {
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "default_config": True,
    "fused": True,
}
"""Settings by which Megatron's optimizers recognise their parameter groups in a checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The state of several pieces, in one host tensor of each kind."""

    pieces: tuple[OptimizerPiece, ...]
    host: Mapping[str, Tensor]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the pieces' parts of a tensor with the elements of this block."""
        sizes = [piece.end - piece.start for piece in self.pieces]
        return list(flat.split(sizes))


class OffloadedAdam:
    """Adam over the pieces of one rank, with the methods of Megatron's optimizers that the learner uses."""

    def __init__(
        self,
        ddps: Sequence[DistributedDataParallel],
        pieces: Sequence[OptimizerPiece],
        *,
        distributed: bool,
        clip_grad: float,
        block: int = OFFLOADED_AT_ONCE,
    ) -> None:
        self._ddps, self._distributed, self.clip_grad = ddps, distributed, clip_grad
        self.steps = 0
        """Steps taken."""
        # Megatron's rule: no weight decay for vectors (norms and biases).
        groups = [[piece for piece in pieces if (piece.parameter.dim() == 1) is flat] for flat in (False, True)]
        self._pieces = [piece for group in groups for piece in group]
        self.param_groups: list[dict[str, Any]] = [
            {"blocks": [_block(piece) for piece in cut(group, block)], **_SETTINGS, "wd_mult": decay}
            for group, decay in zip(groups, (1.0, 0.0), strict=True)
        ]
        self.reload_model_params()

    @property
    def blocks(self) -> Iterator[Block]:
        return (block for group in self.param_groups for block in group["blocks"])

    def tensors(self) -> list[tuple[OptimizerPiece, dict[str, Tensor]]]:
        """Return each piece with its state on the host."""
        entries = []
        for block in self.blocks:
            parts = {name: block.views(flat) for name, flat in block.host.items()}
            entries += [
                (piece, {name: views[at] for name, views in parts.items()}) for at, piece in enumerate(block.pieces)
            ]
        return entries

    def zero_grad(self) -> None:
        """Do nothing: gradients are in the wrapper's buffers."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss: float32 and bfloat16 need no scale."""
        return loss

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copy the model's weights to the main weights."""
        for block in self.blocks:
            if MAIN in block.host:
                for piece, main in zip(block.pieces, block.views(block.host[MAIN]), strict=True):
                    main.copy_(piece.of(piece.parameter))

    def reset(self) -> None:
        """Set moments and steps to 0."""
        self.steps = 0
        for block in self.blocks:
            for name in STATE:
                block.host[name].zero_()

    @torch.no_grad()
    def step(self) -> float:
        """Clip and apply the gradients; collective. Returns the norm before clipping."""
        norm = self._norm()
        scale = clip_factor(norm, self.clip_grad)
        self.steps += 1
        for group in self.param_groups:
            for block in group["blocks"]:
                self._update(block, group, scale)
        if any(buffer.grad_data.is_cuda for ddp in self._ddps for buffer in ddp.buffers):
            torch.cuda.synchronize()  # the host's copies are read by a checkpoint, without the device
        for ddp in self._ddps if self._distributed else ():
            if not ddp.ddp_config.overlap_param_gather:
                ddp.start_param_sync()
        return norm

    def _norm(self) -> float:
        mine = [
            piece
            for piece in self._pieces
            # ``shared``: the last stage's copy of a tied embedding
            if tensor_parallel.param_is_not_tensor_parallel_duplicate(piece.parameter)
            and not getattr(piece.parameter, "shared", False)
        ]
        grads = [piece.of(piece.parameter.main_grad) for piece in mine]  # type: ignore[attr-defined]
        return norm_over_ranks(grads, self._group(), next(self._ddps[0].parameters()).device)

    def _group(self) -> dist.ProcessGroup:
        """Return the ranks that have different gradients after the reduction."""
        if self._distributed:
            return parallel_state.get_intra_distributed_optimizer_instance_group()
        return parallel_state.get_model_parallel_group()

    def _update(self, block: Block, group: Mapping[str, Any], scale: float) -> None:
        device = block.pieces[0].parameter.device
        moved = {name: flat.to(device, non_blocking=True, copy=True) for name, flat in block.host.items()}
        weights = [piece.of(piece.parameter) for piece in block.pieces]
        grads = [piece.of(piece.parameter.main_grad) for piece in block.pieces]  # type: ignore[attr-defined]
        if scale < 1.0:
            torch._foreach_mul_(grads, scale)
        mains = block.views(moved[MAIN]) if MAIN in moved else weights
        first, second = (block.views(moved[name]) for name in STATE)
        adamw(
            mains,
            grads,
            first,
            second,
            [],
            # adamw adds 1 to the number of steps of each before it uses it.
            list(torch.full((len(mains),), float(self.steps - 1), device=device).unbind()),
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if MAIN in moved:
            for weight, main in zip(weights, mains, strict=True):
                weight.copy_(main)
        for name, flat in block.host.items():
            flat.copy_(moved[name], non_blocking=True)


def cut(pieces: Sequence[OptimizerPiece], size: int) -> Iterator[tuple[OptimizerPiece, ...]]:
    """Yield runs of pieces with ``size`` elements each, but for the last; a piece that does not fit is cut."""
    run, room = [], size
    for piece in pieces:
        start = piece.start
        while start < piece.end:
            part = OptimizerPiece(piece.parameter, start, min(piece.end, start + room))
            run.append(part)
            start, room = part.end, room - (part.end - part.start)
            if not room:
                yield tuple(run)
                run, room = [], size
    if run:
        yield tuple(run)


def _block(pieces: tuple[OptimizerPiece, ...]) -> Block:
    first = pieces[0].parameter
    size = sum(piece.end - piece.start for piece in pieces)
    names = STATE if first.dtype == torch.float32 else (*STATE, MAIN)
    host = {name: torch.zeros(size, dtype=torch.float32, pin_memory=first.is_cuda) for name in names}
    return Block(pieces=pieces, host=host)
