"""Attention of packed rows as an ``attn_implementation`` of transformers, and other mixers of tokens: no sequence
reads another one.

The layers of transformers know one long row. Here its sequences are scattered into right-padded buckets of similar
length, as in the layers of Megatron, and rules that a family has beside causal order (windows, chunks, sinks, caps) are
applied within each. Convolutions and recurrent states read the tokens of a row in their order, so the state of one
sequence would go on into the next one; in a bucket each sequence begins with an empty state, and padding comes behind
all real tokens. Shape letters: T = tokens of the row, n = heads, g = heads of keys and values, d = head size, b =
sequences of a bucket, s = their padded length, c = tokens of a prefix that they share.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from tidemill.learner.backends.fsdp.family import Family
from tidemill.learner.kernels.choices import FLASH_HEAD_SIZE, FLASH_MULTIPLE, SDPA, varlen_operator
from tidemill.learner.kernels.packed_rows import PackedRow, Pad, Piece, Unpad, attend_varlen, joined

PACKED = "tidemill_packed"
"""Name of this attention among transformers' implementations."""


class Rules(NamedTuple):
    """Attention of a layer beside causal order."""

    scale: float
    """Factor of the scores."""
    window: int = 0
    """Tokens that a query sees, its own included; 0 = all before it."""
    chunk: int = 0
    """Tokens of a chunk, beyond which nothing is seen; 0 = there are no chunks."""
    cap: float = 0.0
    """Soft cap of the scores; 0 = none."""
    sinks_N: Tensor | None = None
    """Score of a place that every query sees and that has no value, for each head."""

    @property
    def plain(self) -> bool:
        """True if torch's attention has all of it but the window."""
        return not self.chunk and not self.cap and self.sinks_N is None


@dataclass(slots=True)
class CurrentRow:
    """The row that a model computes: one for all of its layers.

    It stays until the next one, because the backward pass computes checkpointed layers again, on another thread.
    """

    packed: PackedRow | None = None
    kernel: str = SDPA
    """Kernel of causal attention (``kernels.choose_attention``)."""
    masks: dict[tuple[int, int, int, int], Tensor] = field(default_factory=dict)
    """Masks of the row by their sizes and rules."""

    def set(self, packed: PackedRow) -> None:
        """Begin a pass over a row."""
        self.packed, self.masks = packed, {}

    def visible(self, queries: int, keys: int, window: int, chunk: int, device: torch.device) -> Tensor:
        """Return where a query sees a key, [queries, keys]. The queries are the last ones of the keys."""
        sizes = (queries, keys, window, chunk)
        if sizes not in self.masks:
            key_at = torch.arange(keys, device=device)
            query_at = key_at[keys - queries :, None]
            mask = key_at <= query_at
            if window:
                mask &= key_at > query_at - window
            if chunk:
                mask &= key_at // chunk == query_at // chunk
            self.masks[sizes] = mask
        return self.masks[sizes]


def give_row(model: torch.nn.Module, row: CurrentRow) -> None:
    """Let all layers of a model that attend find its current row."""
    for module in model.modules():
        module.current_row = row  # type: ignore[assignment]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of the row: query [1, n, T, d], key and value [1, g, T, d] -> [1, T, n, d].

    ``sliding_window``, ``softcap`` and ``s_aux`` (sinks, one of each head) are transformers' names. Raises
    NotImplementedError for another rule, with which the family is computed in padded rows.
    """
    if attention_mask is not None or others.get("position_bias") is not None:
        raise NotImplementedError("attention with a mask or a bias of its own")
    row: CurrentRow = module.current_row  # type: ignore[assignment]
    # llama4 has its chunks in the mask alone, for the layers with rotary positions.
    chunked = getattr(module, "use_rope", False) and getattr(module.config, "attention_chunk_size", None)
    rules = Rules(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        chunk=chunked or 0,
        cap=softcap or 0.0,
        sinks_N=s_aux,
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    assert row.packed is not None, "no row has been set"
    return (_varlen(q, k, v, row, rules) if _fits_varlen(q, v, row, rules) else _bucketed(q, k, v, row, rules))[
        None
    ], None


AttentionInterface.register(PACKED, attend)


def _fits_varlen(q: Tensor, v: Tensor, row: CurrentRow, rules: Rules) -> bool:
    size = q.shape[-1]
    fits = size == v.shape[-1] and size <= FLASH_HEAD_SIZE and size % FLASH_MULTIPLE == 0
    assert row.packed is not None
    return row.kernel != SDPA and fits and rules.plain and not row.packed.cuts


def _varlen(q: Tensor, k: Tensor, v: Tensor, row: CurrentRow, rules: Rules) -> Tensor:
    operator, packed = varlen_operator(), row.packed
    assert operator is not None and packed is not None and packed.bounds_S is not None  # ``choose_attention`` looked
    piece = Piece(len(q), packed.longest, packed.bounds_S)
    return attend_varlen(q, k, v, piece, operator=operator, scale=rules.scale, window=rules.window)


def _bucketed(q: Tensor, k: Tensor, v: Tensor, row: CurrentRow, rules: Rules) -> Tensor:
    """Attend bucket by bucket: q [T, n, d], k and v [T, g, d] -> [T, n, d]."""
    packed, out, place = row.packed, [], 0
    assert packed is not None
    pieces = (k.split(packed.cuts), v.split(packed.cuts)) if packed.cuts else ()
    q, k, v = (Pad.apply(x, packed.take_P, packed.give_T) for x in (q, k, v))
    for (count, width), prefix in zip(packed.buckets, packed.prefixes, strict=True):
        q_P, k_P, v_P = (
            x[place : place + count * width].view(count, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
        )
        if prefix is not None:
            k_P, v_P = (
                torch.cat([joined(of_row, prefix).expand(count, -1, -1, -1), behind], dim=2)
                for of_row, behind in zip(pieces, (k_P, v_P), strict=True)
            )
        out.append(_attend(q_P, k_P, v_P, row, rules).transpose(1, 2).flatten(0, 1))
        place += count * width
    attended: Tensor = Unpad.apply(out[0] if len(out) == 1 else torch.cat(out), packed.give_T)
    return attended


def _attend(q: Tensor, k: Tensor, v: Tensor, row: CurrentRow, rules: Rules) -> Tensor:
    """Attend with q [b, n, s, d], k and v [b, g, c + s, d] -> [b, n, s, d]."""
    queries, keys = q.shape[2], k.shape[2]
    window, chunk = (size if 0 < size < keys else 0 for size in (rules.window, rules.chunk))
    causal = queries == keys and not window and not chunk
    mask = (
        None
        if causal and not rules.cap and rules.sinks_N is None
        else row.visible(queries, keys, window, chunk, q.device)
    )
    if not rules.cap and rules.sinks_N is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=rules.scale, enable_gqa=grouped
        )
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * rules.scale
    if rules.cap:
        scores = rules.cap * torch.tanh(scores / rules.cap)
    assert mask is not None
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if rules.sinks_N is not None:
        sinks = rules.sinks_N.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(v.dtype) @ v


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
