"""Rows through the model by Megatron's schedules: one row after the other, or a pipeline of stages (1F1B, interleaved).

    row -> this rank's chunk(s) of the layers -> hidden states -> ``finish`` on the last stage -> loss -> backward

Knows the policy and the inputs of its model; the loss is a function that it is given.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from tidemill.learner.layout.parallel import is_last_stage, own_part
from tidemill.learner.megatron.cpu_shim import plain_torch
from tidemill.learner.megatron.layers.packed_rows import PackedRow, packed_row
from tidemill.learner.megatron.model import Policy


class ModelInput(Protocol):
    """Attributes of a row that a forward pass reads."""

    @property
    def tokens_T(self) -> Tensor:
        """Tokens of this rank's part of the row."""
        ...

    @property
    def packed(self) -> PackedRow:
        """Layout of the whole row."""
        ...


Row = TypeVar("Row", bound=ModelInput)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filler:
    """A row of padding, which has no loss."""

    tokens_T: Tensor
    packed: PackedRow


class _Rotations:
    """The rotary positions of rows, kept only as long as the chunks' core attention needs them.

    A row serves several models, and one may turn its queries and keys in another way.
    """

    def __init__(self, *, again: bool) -> None:
        """``again``: the backward pass computes parts of the layers again, and may need them once more."""
        self._again = again
        self._rows: list[PackedRow] = []

    @contextlib.contextmanager
    def during(self, row: PackedRow) -> Iterator[None]:
        """Begin a forward pass of a row without them; the chunk sets them in this context."""
        row.rotation = None
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
    rows: Sequence[Row],
    finish: Callable[[Row, Tensor], tuple[Tensor, Result]],
    *,
    forward_only: bool = False,
) -> list[Result] | None:
    """Run every row through the model, forward and (unless ``forward_only``) backward. Collective.

    Call it inside ``megatron_device()``. ``finish(row, hidden_TH)`` returns (loss, result) on the last stage. Returns
    the results there in the order of the rows, and None on the other stages.
    """

    def after(row: Row | _Filler, output: Tensor) -> tuple[Tensor, Tensor, Result | None]:
        """Return (loss, tokens, result) for the schedule; 0 tokens, because the loss has its denominators."""
        no_tokens = torch.zeros((), dtype=torch.int, device=output.device)
        with plain_torch():
            if isinstance(row, _Filler):
                return output.sum() * 0, no_tokens, None
            loss, result = finish(row, output[0])
            return loss, no_tokens, result

    def step(rows_left: Iterator[Row | _Filler], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
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
        return output, partial(after, row)

    filled: list[Row | _Filler] = [*rows, *_fillers(policy, len(rows))]
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
