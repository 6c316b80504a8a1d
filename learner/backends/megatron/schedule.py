"""Rows through a model by Megatron's schedules: one row after the other, or a pipeline of stages (1F1B, interleaved).

    row -> this rank's chunk(s) of the layers -> hidden states -> ``finish`` on the last stage -> loss -> backward

Shape letters: T = tokens of a packed micro-batch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from tidemill.learner.backends.megatron.cpu_shim import plain_torch
from tidemill.learner.backends.megatron.layers.attention import PackedParams
from tidemill.learner.backends.megatron.layers.experts import Mixture
from tidemill.learner.backends.megatron.routing import MegatronRouting, balanced
from tidemill.learner.kernels.packed_rows import PackedRow, packed_row
from tidemill.learner.layout.parallel import Parallel, is_last_stage, own_part
from tidemill.learner.trainer.port import Finish, Input, ModelInput, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filler(ModelInput):
    """A row of padding, which has no loss."""


class _Rotations:
    """The rotary positions of rows, kept only as long as the chunks' core attention needs them."""

    def __init__(self, *, again: bool) -> None:
        """``again``: the backward pass computes parts of the layers again, and may need them once more."""
        self._again = again
        self._rows: list[PackedParams] = []

    @contextlib.contextmanager
    def during(self, row: PackedParams) -> Iterator[None]:
        self._rows.append(row)
        yield  # the chunk sets the positions
        if not self._again:  # the backward pass has its own references
            self.clear()

    def clear(self) -> None:
        for row in self._rows:
            row.rotation = None
        self._rows = []

    close = clear


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How rows pass through the chunks of one model on this rank."""

    ddps: tuple[DistributedDataParallel, ...]
    config: Any
    """Megatron's TransformerConfig."""
    parallel: Parallel
    mixture: Mixture
    routing: MegatronRouting

    def run(
        self, rows: Sequence[Input], finish: Finish[Input, Result], *, forward_only: bool = False
    ) -> list[Result] | None:
        """Run every row through the model, as ``Policy.run``."""
        filled: list[Input | _Filler] = [*rows, *self._fillers(len(rows))]
        several = len(self.ddps) > 1
        turned = _Rotations(again=not forward_only and self.config.recompute_granularity is not None)
        with (
            contextlib.closing(turned),
            torch.no_grad() if forward_only else contextlib.nullcontext(),
            contextlib.nullcontext() if forward_only else self._balanced(rows),
        ):
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=partial(self._step, finish, turned),
                data_iterator=[iter(filled) for _ in self.ddps] if several else iter(filled),
                model=list(self.ddps) if several else self.ddps[0],
                num_microbatches=len(filled),
                seq_length=max(
                    len(row.tokens_T) for row in filled
                ),  # a pipeline sends the length of each row before it
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return results[: len(rows)] if is_last_stage(self.parallel) else None

    def _step(
        self,
        finish: Finish[Input, Result],
        turned: _Rotations,
        rows_left: Iterator[Input | _Filler],
        model: Any,
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Run a chunk of the model on its next row. Returns its output, and the function that makes the loss of it."""
        row = next(rows_left)
        if self.parallel.pp_size == 1:
            turned.clear()  # the backward pass of the row before is over
        chunk = self.ddps.index(model) if len(self.ddps) > 1 else 0
        params = PackedParams.of(row.packed)
        with turned.during(params), plain_torch(), self.routing.row(row.packed, chunk):
            # The hidden states stay in bfloat16, for the product with the output weight in the loss.
            output = model(
                input_ids=row.tokens_T[None],
                position_ids=row.packed.position_ids_T[None],
                attention_mask=None,
                packed_seq_params=params,
                padding_mask=self._padding_mask(row.packed, model),
                **({"fp32_output": False} if self.config.bf16 else {}),
            )
        return output, partial(_concluded, finish, row)

    @contextlib.contextmanager
    def _balanced(self, rows: Sequence[ModelInput]) -> Iterator[None]:
        """Scale the loss that balances the experts by the tokens of these rows on all replicas, where there is one."""
        if not self.mixture.aux_loss_coef:
            yield
            return
        scale_loss = self.config.grad_scale_func
        tokens = torch.stack([_num_tokens(row.packed) for row in rows]).sum()
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        self.config.grad_scale_func = balanced(scale_loss, tokens)
        try:
            yield
        finally:
            self.config.grad_scale_func = scale_loss

    def _padding_mask(self, packed: PackedRow, model: Any) -> Tensor | None:
        """Return the padding that the routers of a chunk leave out of their counts, [1, T]; None = none."""
        if packed.padding_T is None or not self.mixture.counts_tokens:
            return None
        ranks, padding_T = self.parallel, packed.padding_T
        if ranks.sequence_parallel and not get_attr_wrapped_model(model, "pre_process"):
            padding_T = own_part(padding_T, ranks.tp_rank, ranks.tp_size)
        return padding_T[None]

    def _fillers(self, num_rows: int) -> list[_Filler]:
        """Return rows of padding for the interleaved schedule, which wants a multiple of the number of stages."""
        ranks = self.parallel
        missing = -num_rows % ranks.pp_size if ranks.vp_size > 1 else 0
        if not missing:
            return []
        length = ranks.cp_size * ranks.tp_size
        positions_T = own_part(torch.arange(length, device=ranks.device), ranks.cp_rank, ranks.cp_size)
        padding_T = torch.ones_like(positions_T, dtype=torch.bool)
        packed = packed_row(np.array([0, length], np.int32), positions_T, padding_T=padding_T)
        return [_Filler(tokens_T=torch.zeros_like(positions_T), packed=packed)] * missing


def _num_tokens(packed: PackedRow) -> Tensor:
    """Return the number of this rank's tokens of a row without padding."""
    if packed.padding_T is None:
        return torch.tensor(len(packed.position_ids_T), device=packed.position_ids_T.device)
    return (~packed.padding_T).sum()


def _concluded(
    finish: Finish[Input, Result], row: Input | _Filler, output: Tensor
) -> tuple[Tensor, Tensor, Result | None]:
    """Return (loss, tokens, result) for the schedule; 0 tokens, because the loss has its denominators."""
    no_tokens = torch.zeros((), dtype=torch.int, device=output.device)
    with plain_torch():
        if isinstance(row, _Filler):
            return output.sum() * 0, no_tokens, None
        loss, result = finish(row, output[0])
        return loss, no_tokens, result
