"""Rows through a model by Megatron's schedules: one row after the other, or a pipeline of stages (1F1B, interleaved).

    row -> this rank's chunk(s) of the layers -> hidden states -> ``finish`` on the last stage -> loss -> backward

All of a step that knows how the model is divided over the ranks is here; the loss is a function that it is given.
Shape letters: T = tokens of a packed micro-batch, H = hidden size, V = this rank's part of the vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from tidemill.learner.algorithms import diagnostics
from tidemill.learner.algorithms.diagnostics import Sums
from tidemill.learner.layout.parallel import gather_parts, is_last_stage, of_last_stage, own_part, tensors_of_last_stage
from tidemill.learner.megatron.cpu_shim import plain_torch
from tidemill.learner.megatron.layers.dense import is_embedding_too, output_weight
from tidemill.learner.megatron.layers.packed_rows import PackedRow, packed_row
from tidemill.learner.megatron.logprobs import listed_log_probs, log_probs_and_entropy, logits_at, most_probable
from tidemill.learner.megatron.model import Policy
from tidemill.learner.megatron.optimizer import PolicyOptimizer
from tidemill.learner.megatron.routing import balanced
from tidemill.learner.megatron.rows import ModelInput, Row

Input = TypeVar("Input", bound=ModelInput)
Result = TypeVar("Result")


Listed = tuple[Tensor | None, Tensor | None]
"""Most probable tokens, this context-parallel rank's part, and their log-probs, of the whole row; None = not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of the tokens of a row under one policy."""

    log_probs_T: Tensor
    entropy_T: Tensor
    listed: Listed  # on the last stage only


class Passes:
    """The passes of a policy over rows. All methods are collective; call them inside ``megatron_device()``."""

    def __init__(self, policy: Policy, optimizer: PolicyOptimizer) -> None:
        self._policy, self._scale_loss = policy, optimizer.inner.scale_loss
        prepare(policy, optimizer)

    def scores(self, rows: list[Row], *, list_most: int = 0) -> list[Scores]:
        """Return the scores of each row without gradient, on all ranks. ``list_most``: most probable tokens to list."""
        ranks = self._policy.parallel

        def collect(row: Row, hidden_TH: Tensor) -> tuple[Tensor, tuple[Tensor, Listed]]:
            ids_TK, weight_VH = None, output_weight(self._policy.chunks[-1])
            if list_most:
                ids_TK = row.spread(most_probable(row.read(hidden_TH), weight_VH, list_most, group=ranks.tp_group))
            *scores, listed_TK = self.read(replace(row, listed_TK=ids_TK), hidden_TH, listed=True)
            return scores[0].sum(), (torch.stack(scores, dim=1), (ids_TK, listed_TK))

        results = run_rows(self._policy, rows, collect, forward_only=True)
        lengths = [len(row.seen.mask_T) for row in rows]
        scores_of_last = None if results is None else [both_T2 for both_T2, _ in results]
        both_TT2 = tensors_of_last_stage(scores_of_last, lengths, 2, ranks)
        listed: list[Listed] = [(None, None)] * len(rows) if results is None else [listed for _, listed in results]
        return [
            Scores(log_probs_T=both_T2[:, 0], entropy_T=both_T2[:, 1], listed=row_listed)
            for both_T2, row_listed in zip(both_TT2, listed, strict=True)
        ]

    def gradients(
        self, rows: list[Row], loss: Callable[[Row, Tensor], tuple[Tensor, Sums]], *, forward_only: bool = False
    ) -> Sums:
        """Add up the gradients of ``loss`` over the rows of a minibatch. Returns its sums, on all stages."""
        if self._policy.mixture.aux_loss_coef:
            tokens = self.summed(torch.stack([(row.seen.sample_T >= 0).sum() for row in rows]).sum())
            self._policy.config.grad_scale_func = balanced(self._scale_loss, tokens)
        with self._policy.routing.replaying():
            return self._sums(run_rows(self._policy, rows, loss, forward_only=forward_only))

    def _sums(self, parts: list[Sums] | None) -> Sums:
        """Return the sums over the rows on all stages. ``parts``: of the rows on the last stage, elsewhere None."""
        ranks = self._policy.parallel
        merged = None if parts is None else diagnostics.merged(parts)
        if merged is not None and ranks.pp_size == 1:
            return merged
        return of_last_stage(None if merged is None else merged.to("cpu"), ranks).to(ranks.device)

    def read(self, row: Row, hidden_TH: Tensor, *, listed: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs, entropies, and with ``listed`` the log-probs of the teacher's tokens, of the whole row."""
        ranks, weight_VH = self._policy.parallel, output_weight(self._policy.chunks[-1])
        fused, temperature = self._policy.bridge.kernels.fused_log_probs, row.temperature
        inputs = (row.read(hidden_TH), weight_VH, row.read_row(row.targets_T))
        if isinstance(temperature, Tensor):
            temperature = row.read_row(temperature)
        overlapped = self._policy.replicas.overlap_grad_reduce and not is_embedding_too(self._policy.chunks[-1])
        options = {"temperature": temperature, "group": ranks.tp_group, "fused": fused, "placeholder": overlapped}
        if listed and row.listed_TK is not None:
            *scores, listed_TK = listed_log_probs(*inputs, row.read_row(row.listed_TK), **options)
            columns = torch.cat([torch.stack(scores, dim=1), listed_TK], dim=1)
        else:
            columns = torch.stack(log_probs_and_entropy(*inputs, **options), dim=1)
        columns = row.spread(columns)
        if ranks.cp_size > 1:
            columns = gather_parts(columns, ranks.cp_group)
        return columns[:, 0], columns[:, 1], columns[:, 2:] if columns.shape[1] > 2 else None

    def logits(self, row: Row, hidden_TH: Tensor, at_K: Tensor) -> Tensor:
        """Return the logits at places of the whole row, [K, V], on all ranks of the row."""
        weight_VH = output_weight(self._policy.chunks[-1])
        return logits_at(hidden_TH, weight_VH, at_K, self._policy.parallel, temperature=row.temperature)

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over the data-parallel ranks, on the device of ``values``."""
        group = self._policy.parallel.dp_group
        if dist.get_world_size(group) > 1:
            moved = values.to(self._policy.parallel.device)
            dist.all_reduce(moved, group=group)
            values = moved.to(values.device)
        return values

    def gathered(self, values_M: Tensor) -> Tensor:
        """Return the concatenation of the data-parallel ranks' tensors, which differ in length."""
        group = self._policy.parallel.dp_group
        world = dist.get_world_size(group)
        if world == 1:
            return values_M
        lengths = [torch.zeros(1, dtype=torch.int64, device=values_M.device) for _ in range(world)]
        dist.all_gather(lengths, torch.tensor([len(values_M)], device=values_M.device), group=group)
        sizes = [int(length) for length in lengths]
        # all_gather wants tensors of one size.
        padded = torch.nn.functional.pad(values_M, (0, max(sizes) - len(values_M)))
        parts = [torch.zeros_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def prepare(policy: Policy, optimizer: PolicyOptimizer) -> None:
    """Set those fields of a model's configuration that the schedule reads."""
    policy.config.finalize_model_grads_func = _finalize_unscaled
    policy.config.grad_scale_func = optimizer.inner.scale_loss
    if policy.replicas.overlap_grad_reduce:  # only the last micro-batch of a minibatch may start a reduction
        policy.config.no_sync_func = (
            policy.ddp.no_sync if len(policy.ddps) == 1 else [ddp.no_sync for ddp in policy.ddps]
        )


def _finalize_unscaled(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    # Megatron would divide by the tokens; the loss already has the step's own denominator.
    finalize_model_grads(model, None, **groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filler(ModelInput):
    """A row of padding, which has no loss."""


class _Rotations:
    """The rotary positions of rows, kept only as long as the chunks' core attention needs them."""

    def __init__(self, *, again: bool) -> None:
        """``again``: the backward pass computes parts of the layers again, and may need them once more."""
        self._again = again
        self._rows: list[PackedRow] = []

    @contextlib.contextmanager
    def during(self, row: PackedRow) -> Iterator[None]:
        # The chunk sets the positions in this context.
        row.rotation = None  # another model may have turned its queries and keys in another way
        self._rows.append(row)
        yield
        if not self._again:  # the backward pass has its own references
            self.clear()

    def clear(self) -> None:
        for row in self._rows:
            row.rotation = None
        self._rows = []

    close = clear


def run_rows(
    policy: Policy,
    rows: Sequence[Input],
    finish: Callable[[Input, Tensor], tuple[Tensor, Result]],
    *,
    forward_only: bool = False,
) -> list[Result] | None:
    """Run every row through the model, forward and (unless ``forward_only``) backward. Collective.

    Call it inside ``megatron_device()``. ``finish(row, hidden_TH)`` returns (loss, result) on the last stage. Returns
    the results there in the order of the rows, and None on the other stages.
    """

    def step(rows_left: Iterator[Input | _Filler], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Run a chunk of the model on its next row. Returns its output, and the function that makes the loss of it."""
        row = next(rows_left)
        if policy.parallel.pp_size == 1:
            turned.clear()  # the backward pass of the row before is over
        chunk = policy.ddps.index(model) if several else 0
        with turned.during(row.packed), plain_torch(), policy.routing.row(row.packed, chunk):
            # The hidden states stay in bfloat16, for the product with the output weight in the loss.
            output = model(
                input_ids=row.tokens_T[None],
                position_ids=row.packed.position_ids_T[None],  # type: ignore[index]
                attention_mask=None,
                packed_seq_params=row.packed,
                padding_mask=_padding_mask(policy, row.packed, model),
                **({"fp32_output": False} if policy.config.bf16 else {}),
            )
        return output, partial(_concluded, finish, row)

    filled: list[Input | _Filler] = [*rows, *_fillers(policy, len(rows))]
    several = len(policy.chunks) > 1
    turned = _Rotations(again=not forward_only and policy.config.recompute_granularity is not None)
    with contextlib.closing(turned), torch.no_grad() if forward_only else contextlib.nullcontext():
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(filled) for _ in policy.chunks] if several else iter(filled),
            model=list(policy.ddps) if several else policy.ddp,
            num_microbatches=len(filled),
            seq_length=max(len(row.tokens_T) for row in filled),  # a pipeline sends the length of each row before it
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return results[: len(rows)] if is_last_stage(policy.parallel) else None


def _concluded(
    finish: Callable[[Input, Tensor], tuple[Tensor, Result]], row: Input | _Filler, output: Tensor
) -> tuple[Tensor, Tensor, Result | None]:
    """Return (loss, tokens, result) for the schedule; 0 tokens, because the loss has its denominators."""
    no_tokens = torch.zeros((), dtype=torch.int, device=output.device)
    with plain_torch():
        if isinstance(row, _Filler):
            return output.sum() * 0, no_tokens, None
        loss, result = finish(row, output[0])
        return loss, no_tokens, result


def _padding_mask(policy: Policy, packed: PackedRow, model: Any) -> Tensor | None:
    """Return the padding that the routers of a chunk leave out of their counts, [1, T]; None = nothing is counted."""
    if packed.padding_T is None or not policy.mixture.counts_tokens:
        return None
    ranks, padding_T = policy.parallel, packed.padding_T
    if ranks.sequence_parallel and not get_attr_wrapped_model(model, "pre_process"):
        padding_T = own_part(padding_T, ranks.tp_rank, ranks.tp_size)
    return padding_T[None]


def _fillers(policy: Policy, num_rows: int) -> list[_Filler]:
    """Return rows of padding for the interleaved schedule, which wants a multiple of the number of stages."""
    ranks = policy.parallel
    missing = -num_rows % ranks.pp_size if ranks.vp_size > 1 else 0
    if not missing:
        return []
    length = ranks.cp_size * ranks.tp_size
    positions_T = own_part(torch.arange(length, device=ranks.device), ranks.cp_rank, ranks.cp_size)
    padding_T = torch.ones_like(positions_T, dtype=torch.bool)
    packed = packed_row(np.array([0, length], np.int32), positions_T, padding_T=padding_T)
    return [_Filler(tokens_T=torch.zeros_like(positions_T), packed=packed)] * missing
