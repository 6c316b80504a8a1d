"""Attention and rotary positions of packed rows (``packed_rows.py``), in the place of Megatron's own.

A ``PackedRow`` passes through Megatron as its ``packed_seq_params``.
Shape letters: T = tokens of the row, P = padded positions of all buckets, b = sequences, n = heads, s = their padded
length, c = tokens of a prefix that several sequences share, d = head size.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tidemill.learner.layout.parallel import heads_for_tokens, tokens_for_heads
from tidemill.learner.megatron.layers.kernels import CUDNN, SDPA, VARLEN, varlen_operator
from tidemill.learner.megatron.layers.packed_rows import PackedRow, Piece, Prefix, Rotation

Group = dist.ProcessGroup  # ranks of a collective


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
        q, k, v = (Pad.apply(x, row.take_P, row.give_T) for x in (q, k, v))
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
        out_T: Tensor = Unpad.apply(out[0] if len(out) == 1 else torch.cat(out), row.give_T)
        return out_T

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with all tensors [b, heads, s, d]."""
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)


def attend_behind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Sequence[Sequence[Tensor]],
    prefix: Prefix,
    *,
    scale: float | None,
) -> Tensor:
    """Attend to the prefix, and causally within each sequence: q [b, n, s, d], k, v [b, groups, s, d] -> [b, n, s, d].

    ``pieces``: of the keys and of the values of the row, [tokens, groups, d] each.
    """
    k, v = (
        torch.cat([joined(of_row, prefix).expand(len(q), -1, -1, -1), behind], dim=2)
        for of_row, behind in zip(pieces, (k, v), strict=True)
    )
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=prefix.mask, scale=scale, enable_gqa=grouped)


def joined(pieces: Sequence[Tensor], prefix: Prefix) -> Tensor:
    """Return the tokens of the prefix, [1, groups, c, d]."""
    parts = [pieces[piece] for piece in prefix.pieces]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1)[None]


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Piece,
    *,
    operator: Callable[..., Any],
    scale: float | None,
    window: int = 0,
) -> Tensor:
    """Attend causally within each sequence of a piece: q [T, n, d], k and v [T, groups, d] -> [T, n, d].

    ``window``: tokens that a query sees, its own included; 0 = all before it. ``operator`` has the signature of
    ``torch.nn.attention.varlen.varlen_attn``, where (-1, 0) is a causal window. Where it has no ``enable_gqa`` (torch
    2.11), it takes fewer heads of keys and values as they are.
    """
    groups = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _takes_groups(operator) else {}
    bounds, longest = piece.bounds_S, piece.longest
    left = window - 1 if window else -1
    out: Tensor = operator(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), **groups)
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


class Pad(torch.autograd.Function):
    """Scatters the tokens of a row to padded positions. Padding reaches no output, so it gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take_P: Tensor | None, give_T: Tensor | None) -> Tensor:
        ctx.give_T = give_T
        return x if take_P is None else x.index_select(0, take_P)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.give_T is None else grad.index_select(0, ctx.give_T), None, None


class Unpad(torch.autograd.Function):
    """Gathers the tokens of a row from padded positions; the gradient of padding is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, give_T: Tensor | None) -> Tensor:
        ctx.give_T, ctx.num_places = give_T, len(x)
        return x if give_T is None else x.index_select(0, give_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.give_T is None:
            return grad, None
        return grad.new_zeros(ctx.num_places, *grad.shape[1:]).index_copy_(0, ctx.give_T, grad), None
