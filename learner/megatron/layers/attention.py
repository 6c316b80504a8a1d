"""Attention and rotary positions of packed rows, which concatenate many sequences of any length.

``PackedRow`` is computed once per micro-batch and passes through Megatron as its ``packed_seq_params``. Sequences of
similar length are scattered into a right-padded batch, so that a row costs one attention call per length bucket and not
one per sequence. That is
exact: padding comes after every real query, and attention is causal.
Shape letters: T = tokens of the row, P = padded positions of all buckets, n = heads, d = head size.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tidemill.learner.layout.parallel import heads_for_tokens, tokens_for_heads
from tidemill.learner.megatron.layers.kernels import CUDNN, LONG_SEQUENCE, SDPA, VARLEN, varlen_operator
from tidemill.learner.megatron.layers.prefixes import Prefix, Runs, attend_behind, cuts_of, prefix_of

Group = dist.ProcessGroup  # ranks of a collective


class Rotation(NamedTuple):
    """Rotary positions of tokens, for the kernel that turns queries and keys. F = rotated pairs of a head."""

    cos_TF: Tensor
    sin_TF: Tensor
    """Both float32."""
    interleaved: bool
    """A pair is two neighbours; else its elements are F apart."""


class Piece(NamedTuple):
    """Neighbouring sequences of a row: one long one, or all between two long ones."""

    tokens: int
    longest: int
    """Tokens of the longest sequence."""
    bounds_S: Tensor | None
    """Boundaries of the sequences from the first of them on, as in ``PackedRow``; None = a long sequence."""


@dataclass
class PackedRow(PackedSeqParams):
    """Positions of the sequences in a row, and their layout for attention.

    ``qkv_format`` stays "sbhd": Megatron's own "thd" code for rotary positions loops over the sequences in Python, for
    q and k in every layer. With one row the two layouts are the same tensor, and ``PackedRotary`` supplies the angle of
    every token.
    """

    position_ids_T: Tensor | None = None
    """Positions of this rank's tokens. Fields without such a note are of the whole row."""
    padding_T: Tensor | None = None
    """True for padding in this rank's tokens; None = the whole row has none. Routers do not count it."""
    bounds_S: Tensor | None = None
    """Boundaries of the sequences, [S + 1], int32 on the device, for flash attention. Megatron's own fields stay empty.
    """
    pieces: tuple[Piece, ...] = ()
    """The row cut before and after each long sequence; empty = it has none."""
    spans: tuple[tuple[int, int], ...] = ()
    """(tokens of its prefix, tokens) of each sequence."""
    buckets: tuple[tuple[int, int], ...] = ()
    """(sequences, padded length) of each bucket."""
    prefixes: tuple[Prefix | None, ...] = ()
    """Tokens that the sequences of each bucket share; None = they have no prefix."""
    cuts: tuple[int, ...] = ()
    """Lengths of the pieces of the row that prefixes are made of; empty = there is no prefix."""
    take_P: Tensor | None = None
    """Row's token at each padded position (padding repeats its sequence's last); None = the row is the batch."""
    give_T: Tensor | None = None
    """Padded position of each token."""
    rotation: Rotation | None = None
    """Positions of this rank's tokens where core attention turns queries and keys, during a pass; None = Megatron does.
    """
    experts: tuple[Tensor, ...] = ()
    """Experts of this rank's tokens in each layer with experts, [T, K] int16, recorded or given; -1 = not known."""
    routed: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Layer of this stage -> (experts of all tokens, ascending, [T, K] int32; their weights, [T, K]; affinities, [T,
    E]) of the last pass, where routers are observed; in host memory, complete after a synchronization.
    """


def packed_row(
    cu_seqlens: NDArray[np.int32],
    position_ids_T: Tensor,
    padding_T: Tensor | None = None,
    prefixes: Sequence[Runs] = (),
) -> PackedRow:
    """Return the layout of a row with sequence boundaries ``cu_seqlens`` ([S + 1], from 0 to T).

    ``prefixes``: tokens of the row before each sequence, which it attends to too; empty = none has any.
    """
    device = position_ids_T.device
    starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
    behind = dict.fromkeys([(), *map(tuple, prefixes)])  # in order, and without a prefix first
    places = list(behind)
    prefix_S = np.array([places.index(tuple(runs)) for runs in prefixes] or [0] * len(starts))[lengths > 0]
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    buckets, of_buckets, take, give = _bucketed(starts, lengths, prefix_S)
    cuts = cuts_of(places, int(lengths.sum()))
    in_order = len(take) == len(give) and bool((take == np.arange(len(take))).all())
    longest = int(lengths.max())
    return PackedRow(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids_T=position_ids_T,
        padding_T=padding_T,
        bounds_S=_bounds(lengths, device),
        pieces=_cut(lengths, device),
        spans=tuple(
            (sum(length for _, length in places[number]), length)
            for number, length in zip(prefix_S.tolist(), lengths.tolist(), strict=True)
        ),
        buckets=buckets,
        prefixes=tuple(
            prefix_of(places[number], cuts, width, device)
            for number, (_, width) in zip(of_buckets, buckets, strict=True)
        ),
        cuts=cuts,
        take_P=None if in_order else torch.from_numpy(take).to(device),
        give_T=None if in_order else torch.from_numpy(give).to(device),
    )


def _bounds(lengths: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)


def _cut(lengths: NDArray[np.int64], device: torch.device) -> tuple[Piece, ...]:
    """Return the pieces of a row of these lengths, none of which is 0."""
    long = lengths >= LONG_SEQUENCE
    if not long.any():
        return ()
    starts = np.flatnonzero(
        long | np.append(True, long[:-1])
    )  # each long sequence begins a piece, and so does the one behind it
    pieces = []
    for first, after in itertools.pairwise([*starts.tolist(), len(lengths)]):
        part = lengths[first:after]
        pieces.append(Piece(int(part.sum()), int(part.max()), None if long[first] else _bounds(part, device)))
    return tuple(pieces)


def _bucketed(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], prefix_S: NDArray[np.int64]
) -> tuple[tuple[tuple[int, int], ...], list[int], NDArray[np.int64], NDArray[np.int64]]:
    """Assign sequences of (2^k, 2^(k+1)] tokens behind one prefix to one bucket: less than half of it is padding.

    Returns (buckets, number of the prefix of each, ``take_P``, ``give_T``) of ``PackedRow``.
    """
    # ceil, so that a length of exactly 2^k closes the bucket of the shorter ones.
    powers = np.ceil(np.log2(lengths)).astype(np.int64)
    buckets, of_buckets, take = [], [], []
    give = np.empty(int(lengths.sum()), np.int64)
    place = 0
    for prefix, power in np.unique(np.stack([prefix_S, powers]), axis=1).T.tolist():
        members = np.flatnonzero((prefix_S == prefix) & (powers == power))
        width = int(lengths[members].max())
        offsets = np.arange(width)
        index = starts[members, None] + np.minimum(offsets, lengths[members, None] - 1)
        real = offsets < lengths[members, None]
        places = place + np.arange(index.size).reshape(index.shape)
        give[index[real]] = places[real]
        take.append(index.reshape(-1))
        buckets.append((len(members), width))
        of_buckets.append(prefix)
        place += index.size
    return tuple(buckets), of_buckets, np.concatenate(take), give


class PackedRotary(RotaryEmbedding):
    """Megatron's rotary embedding, with the angles of a PackedRow's position ids where there is a PackedRow."""

    inv_freq: Tensor
    seq_len_interpolation_factor: float | None

    def get_rotary_seq_len(
        self, inference_context: Any, transformer: Any, transformer_input: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the argument of ``forward``: for a packed row the row itself instead of its length."""
        packed = args[-1] if args else None
        if isinstance(packed, PackedRow):
            return packed
        return super().get_rotary_seq_len(inference_context, transformer, transformer_input, *args, **kwargs)

    def forward(
        self, max_seq_len: PackedRow | int, offset: int = 0, packed_seq: bool = False, cp_group: Group | None = None
    ) -> Tensor:
        """Return the angles [T, 1, 1, d] of a PackedRow, or those of positions 0 .. max_seq_len - 1."""
        if not isinstance(max_seq_len, PackedRow):
            return super().forward(max_seq_len, offset, packed_seq, cp_group)
        angles_TF = self.angles(max_seq_len)
        # Each angle is that of two elements: neighbours, or one in each half.
        twice = (angles_TF, angles_TF)
        angles = torch.stack(twice, dim=-1).flatten(1) if self.rotary_interleaved else torch.cat(twice, dim=-1)
        return angles[:, None, None, :]

    def angles(self, row: PackedRow) -> Tensor:
        """Return the angles of the row's tokens, [T, F]."""
        assert row.position_ids_T is not None
        positions_T = row.position_ids_T
        # It is no buffer of the module, so ``Module.to`` does not move it.
        if self.inv_freq.device != positions_T.device:
            self.inv_freq = self.inv_freq.to(positions_T.device)
        positions_T = positions_T.to(self.inv_freq.dtype)
        if (
            self.seq_len_interpolation_factor is not None
        ):  # linear scaling, for which Megatron divides the positions as well
            positions_T = positions_T * (1 / self.seq_len_interpolation_factor)
        return torch.outer(positions_T, self.inv_freq)


class FusedRotary(PackedRotary):
    """The same for core attention that turns queries and keys itself, by one kernel."""

    def forward(  # type: ignore[override]
        self, max_seq_len: PackedRow | int, offset: int = 0, packed_seq: bool = False, cp_group: Group | None = None
    ) -> Tensor | None:
        """Give a PackedRow its ``rotation``, and return None, with which Megatron turns nothing."""
        if not isinstance(max_seq_len, PackedRow):
            return super().forward(max_seq_len, offset, packed_seq, cp_group)
        angles_TF = self.angles(max_seq_len)
        max_seq_len.rotation = Rotation(angles_TF.cos(), angles_TF.sin(), self.rotary_interleaved)
        return None


class SDPACoreAttention(MegatronModule):
    """Causal core attention by torch's scaled_dot_product_attention, for packed rows and plain batches."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError("SDPACoreAttention: want attention_dropout 0")
        self.softmax_scale = softmax_scale
        self._context = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Tensor:
        """Attend: q [s, b, n, d], k and v [s, b, groups, d] -> [s, b, n * d], before the projection.

        With a PackedRow s = T and b = 1, and b may be left out; with context parallelism s is this rank's part of the
        row.
        """
        if not isinstance(packed_seq_params, PackedRow):
            assert self._context is None, "context parallelism has packed rows only"
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        if packed_seq_params.rotation is not None:
            q, k = _turned(q, k, packed_seq_params.rotation)
        if self._context is None:
            return self._attend_row(q, k, v, packed_seq_params)[:, None]
        if k.shape[1] % self._context.size():  # too few heads of keys and values to divide them
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        q, k, v = (heads_for_tokens(x, self._context) for x in (q, k, v))
        return tokens_for_heads(self._attend_row(q, k, v, packed_seq_params), self._context)[:, None]

    def _attend_row(self, q: Tensor, k: Tensor, v: Tensor, row: PackedRow) -> Tensor:
        """Attend within each sequence of a whole row: q [T, n, d], k and v [T, groups, d] -> [T, n * d]."""
        pieces: tuple[Sequence[Tensor], ...] = (k.split(row.cuts), v.split(row.cuts)) if row.cuts else ()
        q, k, v = (_Pad.apply(x, row.take_P, row.give_T) for x in (q, k, v))
        out, place = [], 0
        for (count, width), prefix in zip(row.buckets, row.prefixes, strict=True):
            q_P, k_P, v_P = (
                x[place : place + count * width].view(count, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
            )
            if prefix is None:
                out_P = self._attend(q_P, k_P, v_P)
            else:
                out_P = attend_behind(q_P, k_P, v_P, pieces, prefix, scale=self.softmax_scale)
            out.append(out_P.transpose(1, 2).reshape(count * width, -1))
            place += count * width
        out_T: Tensor = _Unpad.apply(out[0] if len(out) == 1 else torch.cat(out), row.give_T)
        return out_T

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with all tensors [b, heads, s, d]."""
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)


class VarlenCoreAttention(SDPACoreAttention):
    """Core attention by torch's flash attention for sequences of any length: one call a row, without padding. CUDA
    only.

    A plain batch has no boundaries, and takes the way of ``SDPACoreAttention``.
    """

    def _attend_row(self, q: Tensor, k: Tensor, v: Tensor, row: PackedRow) -> Tensor:
        return self._attend_sequences(q, k, v, Piece(len(q), row.max_seqlen_q, row.bounds_S)).flatten(1)

    def _attend_sequences(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> Tensor:
        operator = varlen_operator()
        assert operator is not None  # ``choose_attention`` has looked
        return attend_varlen(q, k, v, piece, operator=operator, scale=self.softmax_scale)


class CudnnCoreAttention(VarlenCoreAttention):
    """The same, but long sequences go one by one through cuDNN's attention. For Hopper; not deterministic."""

    _backend = SDPBackend.CUDNN_ATTENTION
    """Backend of a long sequence."""

    def _attend_row(self, q: Tensor, k: Tensor, v: Tensor, row: PackedRow) -> Tensor:
        if not row.pieces:
            return super()._attend_row(q, k, v, row)
        sizes = [piece.tokens for piece in row.pieces]
        parts = [
            self._attend_long(q_P, k_P, v_P) if piece.bounds_S is None else self._attend_sequences(q_P, k_P, v_P, piece)
            for piece, q_P, k_P, v_P in zip(row.pieces, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _attend_long(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally within one sequence: q [L, n, d], k and v [L, groups, d] -> [L, n, d].

        cuDNN makes a plan for each new length, in 0.2 s, so the sequence is padded to one of a few. Padding comes
        behind all queries, which attend to nothing after them.
        """
        padding = padded_length(len(q)) - len(q)
        parts = (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x for x in (q, k, v))
        with sdpa_kernel(self._backend):
            out = self._attend(*(x[None].transpose(1, 2) for x in parts))
        return out.transpose(1, 2)[0, : len(q)]


def padded_length(length: int) -> int:
    """Return the next one of sixteen lengths between a power of two and the next, all multiples of 128."""
    step = max(128, (1 << (length.bit_length() - 1)) // 16)
    return -(-length // step) * step


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, piece: Piece, *, operator: Callable[..., Any], scale: float | None
) -> Tensor:
    """Attend causally within each sequence of a piece: q [T, n, d], k and v [T, groups, d] -> [T, n, d].

    ``operator`` has the signature of ``torch.nn.attention.varlen.varlen_attn``, where (-1, 0) is a causal window. Where
    it has no ``enable_gqa`` (torch 2.11), it takes fewer heads of keys and values as they are.
    """
    groups = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _takes_groups(operator) else {}
    bounds, longest = piece.bounds_S, piece.longest
    out: Tensor = operator(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), **groups)
    return out


@functools.cache
def _takes_groups(operator: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(operator).parameters


def _turned(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    from tidemill.learner.megatron.layers.triton_kernels import rotated

    return rotated(q, k, rotation.cos_TF, rotation.sin_TF, interleaved=rotation.interleaved)


CORE_ATTENTION: Mapping[str, type[SDPACoreAttention]] = {
    SDPA: SDPACoreAttention,
    VARLEN: VarlenCoreAttention,
    CUDNN: CudnnCoreAttention,
}
"""Core attention by the name of its kernel."""


class _Pad(torch.autograd.Function):
    """Scatters the tokens of a row to padded positions. Padding reaches no output, so it gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take_P: Tensor | None, give_T: Tensor | None) -> Tensor:
        """Return x at the padded positions, [P, ...]."""
        ctx.give_T = give_T
        return x if take_P is None else x.index_select(0, take_P)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradients at the real positions, [T, ...]."""
        return grad if ctx.give_T is None else grad.index_select(0, ctx.give_T), None, None


class _Unpad(torch.autograd.Function):
    """Gathers the tokens of a row from padded positions; the gradient of padding is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, give_T: Tensor | None) -> Tensor:
        """Return x at the positions of the row's tokens, [T, ...]."""
        ctx.give_T, ctx.num_places = give_T, len(x)
        return x if give_T is None else x.index_select(0, give_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradients at their padded positions, and 0 at the others, [P, ...]."""
        if ctx.give_T is None:
            return grad, None
        return grad.new_zeros(ctx.num_places, *grad.shape[1:]).index_copy_(0, ctx.give_T, grad), None
