"""A StepBatch as tensors: the micro-batches of a rank, and the values that all of them share.

Shape letters: T = tokens of a packed micro-batch, N = samples of the step on all ranks, C = turns, K = parts of the
reward.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.learner.algorithms.aggregation import Denominators
from tidemill.learner.algorithms.tokens import RewardParts, Tokens, TurnColumns
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.batch.shared_prompts import Tree, tree_of
from tidemill.learner.kernels.packed_rows import packed_row
from tidemill.learner.layout.parallel import Parallel, own_part
from tidemill.learner.trainer.port import ModelInput, Routing


class Fan(NamedTuple):
    """Places of the tokens that predict a trainable one."""

    at_M: Tensor
    """In the row, where each sequence is whole."""
    source_M: Tensor
    """Among the computed tokens, where a token of a shared prefix stands for several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(ModelInput):
    """A micro-batch on the device: this context-parallel rank's tokens and targets, with ``fan`` the computed ones."""

    targets_T: Tensor
    position_T: Tensor
    """Index of the target in its response, from 0."""
    temperature: float | Tensor
    """Sampling temperature of the step, or, where samples differ, of each token, [T]; 1 for padding."""
    turn_T: Tensor
    """Index of the turn that sampled the target, 0..C-1; -1 where not trainable."""
    seen: Tokens
    """Inputs of the objective, in which demonstrations are masked."""
    demonstrated_T: Tensor
    """Trainable tokens of demonstrations."""
    fan: Fan | None = None
    """Mapping from computed tokens to the tokens that the loss reads; None = the loss reads every computed token."""
    listed_TK: Tensor | None = None
    """Token ids that the teacher listed, this rank's part, [T, K]; None = none. Of the reference: on the last stage."""

    def read(self, values_C: Tensor) -> Tensor:
        """Return the values at the tokens that the loss reads: with ``fan`` those before a trainable one."""
        return values_C if self.fan is None else values_C.index_select(0, self.fan.source_M)

    def read_row(self, values_T: Tensor) -> Tensor:
        """Return the row's values at the same tokens."""
        return values_T if self.fan is None else values_T.index_select(0, self.fan.at_M)

    def spread(self, values_M: Tensor) -> Tensor:
        """Return values of these tokens at their places in the row, [T, ...]; 0 elsewhere. Differentiable."""
        if self.fan is None:
            return values_M
        zeros_T = values_M.new_zeros(len(self.targets_T), *values_M.shape[1:])
        return zeros_T.index_copy(0, self.fan.at_M, values_M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Values that all rows of a step share."""

    rewards_N: Tensor
    groups_N: Tensor
    lengths_N: Tensor
    sampled_N: Tensor
    truncated_N: Tensor
    trainable_N: Tensor
    turns: TurnColumns
    parts: RewardParts
    metadata: tuple[JsonMapping, ...]
    """Metadata of each sample; empty unless the estimator asks for it."""
    minibatches_N: Tensor
    demonstration_N: Tensor
    constant: float
    max_new_tokens: int

    def denominators(self, minibatch: int, samples_N: Tensor) -> Denominators:
        """Return the denominators of one optimizer step over some samples of the step, the same on every rank."""
        trainable_N = torch.where((self.minibatches_N == minibatch) & samples_N, self.trainable_N, 0)
        return Denominators(
            tokens=int(trainable_N.sum()),
            sequences=int((trainable_N > 0).sum()),
            trainable_N=trainable_N,
            constant=self.constant,
            groups_N=self.groups_N,
        )


def step_of(batch: StepBatch, *, constant: float) -> Step:
    """Return the values that the rows of a batch share. ``constant``: of the denominators; 0 = the longest response."""
    return Step(
        rewards_N=tensor_of(batch.rewards_N).double(),
        groups_N=tensor_of(batch.groups_N),
        lengths_N=tensor_of(batch.response_lengths_N),
        sampled_N=tensor_of(batch.sampled_N),
        truncated_N=tensor_of(batch.truncated_N),
        trainable_N=tensor_of(batch.trainable_N).long(),
        turns=TurnColumns(
            samples_C=tensor_of(batch.turn_samples_C).long(),
            rewards_C=tensor_of(batch.turn_rewards_C).double(),
            trainable_C=tensor_of(batch.turn_tokens_C).long(),
        ),
        parts=RewardParts(
            names=batch.part_names,
            values_NK=tensor_of(batch.parts_NK).double().view(len(batch.rewards_N), len(batch.part_names)),
        ),
        metadata=batch.metadata,
        minibatches_N=tensor_of(batch.minibatches_N),
        demonstration_N=tensor_of(batch.demonstration_N),
        constant=constant or float(batch.max_new_tokens),
        max_new_tokens=batch.max_new_tokens,
    )


def rows_of(
    batch: StepBatch,
    ranks: Parallel,
    routing: Routing | None = None,
    *,
    shared: bool = False,
    trained_only: bool = False,
) -> list[Row]:
    """Return the micro-batches on this rank's device. ``shared``: compute common prefixes once. ``trained_only``: read
    the trained tokens alone, as with ``shared``; for rows that are whole on a rank.
    """
    rows = [_row(micro_batch, batch, ranks) for micro_batch in batch.micro_batches]
    if shared:
        trees = [tree_of(micro_batch) for micro_batch in batch.micro_batches]
        rows = [row if tree is None else _shared(row, tree, ranks) for row, tree in zip(rows, trees, strict=True)]
    elif trained_only:
        rows = [_trained_only(row) for row in rows]
    if routing is not None and batch.routing != (0, 0):
        for row, micro_batch in zip(rows, batch.micro_batches, strict=True):
            experts_TEK = tensor_of(micro_batch.experts).view(-1, *batch.routing)
            row.packed.experts = routing.own(_part_of_router(experts_TEK, ranks).to(ranks.device, non_blocking=True))
    return rows


def _shared(row: Row, tree: Tree, ranks: Parallel) -> Row:
    missing = -len(tree.take_P) % ranks.tp_size
    padding = torch.zeros(missing, dtype=torch.int64, device=ranks.device)
    take_P = torch.from_numpy(tree.take_P).to(ranks.device)
    positions_T = row.packed.position_ids_T
    lengths = [*tree.lengths, *([missing] if missing else [])]
    at_M = (row.seen.mask_T | row.demonstrated_T).nonzero()[:, 0]
    return replace(
        row,
        tokens_T=torch.cat([row.tokens_T[take_P], padding]),
        packed=packed_row(
            np.cumsum([0, *lengths]).astype(np.int32),
            torch.cat([positions_T[take_P], torch.arange(missing, device=ranks.device)]),
            prefixes=[*tree.prefixes, *([()] if missing else [])],
        ),
        fan=Fan(at_M, torch.from_numpy(tree.source_T).to(ranks.device)[at_M]),
    )


def _trained_only(row: Row) -> Row:
    at_M = (row.seen.mask_T | row.demonstrated_T).nonzero()[:, 0]
    return replace(row, fan=Fan(at_M, at_M)) if len(at_M) else row  # a row of padding has none


def _part_of_router(values_T: Tensor, ranks: Parallel) -> Tensor:
    """Return this rank's part of a row's values at its routers, where sequence parallelism divides the tokens, too."""
    part = own_part(values_T, ranks.cp_rank, ranks.cp_size)
    return own_part(
        part, ranks.tp_rank, ranks.tp_size
    )  # with experts, tensor parallelism is never without sequence parallelism


def _row(micro_batch: MicroBatch, batch: StepBatch, ranks: Parallel) -> Row:
    demonstration_N, temperatures_N, top_k = (
        tensor_of(batch.demonstration_N),
        tensor_of(batch.temperatures_N),
        batch.teacher_top_k,
    )
    to = partial(torch.Tensor.to, device=ranks.device, non_blocking=True)
    part = partial(own_part, rank=ranks.cp_rank, size=ranks.cp_size)
    mask_T, sample_T = tensor_of(micro_batch.loss_mask_T), tensor_of(micro_batch.sample_T).long()
    sequence_T = tensor_of(micro_batch.sequence_T).long()
    padding_T = sample_T < 0
    rollout_T = to(tensor_of(micro_batch.rollout_log_probs_T))
    demonstrated_T = mask_T & demonstration_N[sample_T.clamp(min=0)]
    temperature: float | Tensor = float(temperatures_N[0])
    if (temperatures_N != temperature).any():
        temperature = to(part(temperatures_N[sample_T.clamp(min=0)].where(~padding_T, 1.0).float()))
    return Row(
        tokens_T=to(part(tensor_of(micro_batch.tokens_T))),
        targets_T=to(part(tensor_of(micro_batch.targets_T))),
        position_T=to(_places(mask_T, sequence_T)),
        turn_T=to(tensor_of(micro_batch.turn_T).long()),
        temperature=temperature,
        packed=packed_row(
            micro_batch.cu_seqlens,
            to(part(tensor_of(micro_batch.position_ids_T))),
            padding_T=to(part(padding_T)) if padding_T.any() else None,
        ),
        demonstrated_T=to(demonstrated_T),
        listed_TK=to(part(tensor_of(micro_batch.teacher_top_ids_TK).long().view(-1, top_k))) if top_k else None,
        seen=Tokens(
            mask_T=to(mask_T & ~demonstrated_T),
            sample_T=to(sample_T),
            num_samples=len(demonstration_N),
            rollout_T=rollout_T,
            lag_T=to(tensor_of(micro_batch.lag_T)),
            advantages_T=torch.zeros_like(rollout_T),
            sequence_T=to(sequence_T),
            num_sequences=batch.num_sequences,
            teacher_T=to(tensor_of(micro_batch.teacher_log_probs_T)) if len(micro_batch.teacher_log_probs_T) else None,
            teacher_top_TK=to(tensor_of(micro_batch.teacher_top_log_probs_TK).view(-1, top_k)) if top_k else None,
        ),
    )


def _places(mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return the number of trainable tokens of the same sequence before each token, [T]."""
    at_T = torch.arange(len(mask_T))
    before_T = mask_T.long().cumsum(0) - mask_T.long()
    new_T = torch.cat([torch.ones(1, dtype=torch.bool), sequence_T[1:] != sequence_T[:-1]])
    first_T = torch.where(new_T, at_T, 0).cummax(0).values
    return before_T - before_T[first_T]


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor that shares its memory."""
    return torch.from_numpy(array)
