"""Convolutions and recurrent states over packed rows: each sequence begins with an empty state.

A mixer reads the tokens of a row in their order, without attention. Position ids mean nothing to it, so in a packed row
the state of one sequence would go on into the next one. Here it sees the sequences in right-padded buckets, which is
exact: padding comes behind all real tokens. Nothing else of the model is padded.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tidemill.learner.backends.fsdp.attention import CurrentRow
from tidemill.learner.backends.fsdp.family import Family
from tidemill.learner.kernels.attention import Pad, Unpad

_OF_ROW = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "attention_mask",
    "position_ids",
)
"""Arguments about the tokens of a row, which a bucket does not have."""


def mixers_of(model: torch.nn.Module, family: Family) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that carry a state from token to token."""
    yield from ((name, module) for name, module in model.named_modules() if family.is_mixer(module))


def separate_sequences(model: torch.nn.Module, row: CurrentRow, family: Family) -> None:
    """Let the mixers of a model compute each sequence of the current row alone."""
    for _, mixer in mixers_of(model, family):
        mixer.forward = partial(_by_bucket, mixer.forward, row, family)  # type: ignore[method-assign]


def _by_bucket(
    forward: Callable[..., Any],
    row: CurrentRow,
    family: Family,
    hidden_states: Tensor,
    *positional: Any,
    **arguments: Any,
) -> Any:
    """Return a mixer's output, computed for each sequence alone: [1, T, H] -> [1, T, H]."""
    packed, out, place = row.packed, [], 0
    assert packed is not None and not packed.cuts, "a mixer has whole sequences only"
    arguments = {name: value for name, value in arguments.items() if name not in _OF_ROW}
    hidden = Pad.apply(hidden_states[0], packed.take_P, packed.give_T)
    for count, width in packed.buckets:
        bucket_BLH = hidden[place : place + count * width].view(count, width, -1)
        out.append(family.mix(forward, bucket_BLH, *positional, **arguments).reshape(count * width, -1))
        place += count * width
    mixed_TH: Tensor = Unpad.apply(out[0] if len(out) == 1 else torch.cat(out), packed.give_T)
    return family.result(mixed_TH[None])
