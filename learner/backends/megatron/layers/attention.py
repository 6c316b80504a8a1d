"""Attention and rotary positions of packed rows (``packed_rows.py``), in the place of Megatron's own.

A ``PackedRow`` passes through Megatron as its ``packed_seq_params``, in ``PackedParams``.
Shape letters: T = tokens of the row, b = rows, n = heads, s = tokens of each, d = head size, F = rotated pairs of a
head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention import SDPBackend

from tidemill.learner.kernels.choices import CUDNN, SDPA, VARLEN, varlen_operator
from tidemill.learner.kernels.packed_rows import PackedRow, Piece, attend, attend_long, attend_row, attend_varlen
from tidemill.learner.layout.parallel import heads_for_tokens, tokens_for_heads

Group = dist.ProcessGroup  # ranks of a collective


class Rotation(NamedTuple):
    """Rotary positions of tokens, for the kernel that turns queries and keys."""

    cos_TF: Tensor
    sin_TF: Tensor
    """Both float32."""
    interleaved: bool
    """A pair is two neighbours; else its elements are F apart."""


@dataclass(kw_only=True)
class PackedParams(PackedSeqParams):
    """A row on its way through Megatron's model.

    ``qkv_format`` stays "sbhd": Megatron's own "thd" code for rotary positions loops over the sequences in Python, for
    q and k in every layer. With one row the two layouts are the same tensor, and ``PackedRotary`` supplies the angle of
    every token. Megatron's own fields for boundaries stay empty.
    """

    row: PackedRow
    rotation: Rotation | None = None
    """Positions of this rank's tokens where core attention turns queries and keys, during a pass; None = Megatron does.
    """

    @classmethod
    def of(cls, row: PackedRow) -> "PackedParams":
        """Return the row for one pass through the model."""
        return cls(qkv_format="sbhd", max_seqlen_q=row.longest, max_seqlen_kv=row.longest, row=row)


class PackedRotary(RotaryEmbedding):
    """Megatron's rotary embedding, with the angles of a PackedRow's position ids where there is a PackedRow."""

    inv_freq: Tensor
    seq_len_interpolation_factor: float | None

    def get_rotary_seq_len(
        self, inference_context: Any, transformer: Any, transformer_input: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the argument of ``forward``: for a packed row the row itself instead of its length."""
        packed = args[-1] if args else None
        if isinstance(packed, PackedParams):
            return packed
        return super().get_rotary_seq_len(inference_context, transformer, transformer_input, *args, **kwargs)

    def forward(
        self, max_seq_len: PackedParams | int, offset: int = 0, packed_seq: bool = False, cp_group: Group | None = None
    ) -> Tensor:
        """Return the angles [T, 1, 1, d] of a PackedRow, or of positions 0 .. max_seq_len - 1."""
        if not isinstance(max_seq_len, PackedParams):
            return super().forward(max_seq_len, offset, packed_seq, cp_group)
        angles_TF = self.angles(max_seq_len.row)
        # Each angle turns two elements: neighbours, or one in each half.
        twice = (angles_TF, angles_TF)
        angles = torch.stack(twice, dim=-1).flatten(1) if self.rotary_interleaved else torch.cat(twice, dim=-1)
        return angles[:, None, None, :]

    def angles(self, row: PackedRow) -> Tensor:
        """Return the angles of the row's tokens, [T, F]."""
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
        self, max_seq_len: PackedParams | int, offset: int = 0, packed_seq: bool = False, cp_group: Group | None = None
    ) -> Tensor | None:
        """Give a PackedRow its ``rotation``, and return None, with which Megatron turns nothing."""
        if not isinstance(max_seq_len, PackedParams):
            return super().forward(max_seq_len, offset, packed_seq, cp_group)
        angles_TF = self.angles(max_seq_len.row)
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
        if not isinstance(packed_seq_params, PackedParams):
            assert self._context is None, "context parallelism has packed rows only"
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return attend(q, k, v, scale=self.softmax_scale).permute(2, 0, 1, 3).flatten(2)
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        if packed_seq_params.rotation is not None:
            q, k = _turned(q, k, packed_seq_params.rotation)
        if self._context is None:
            return self._attend_row(q, k, v, packed_seq_params.row)[:, None]
        if k.shape[1] % self._context.size():  # too few heads of keys and values to divide them
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        q, k, v = (heads_for_tokens(x, self._context) for x in (q, k, v))
        return tokens_for_heads(self._attend_row(q, k, v, packed_seq_params.row), self._context)[:, None]

    def _attend_row(self, q: Tensor, k: Tensor, v: Tensor, row: PackedRow) -> Tensor:
        """Attend within each sequence of a whole row: q [T, n, d], k and v [T, groups, d] -> [T, n * d]."""
        return attend_row(q, k, v, row, scale=self.softmax_scale)


class VarlenCoreAttention(SDPACoreAttention):
    """Core attention by torch's flash attention for sequences of any length: one call a row, without padding. CUDA
    only.

    A plain batch has no boundaries, and takes the way of ``SDPACoreAttention``.
    """

    def _attend_row(self, q: Tensor, k: Tensor, v: Tensor, row: PackedRow) -> Tensor:
        return self._attend_sequences(q, k, v, Piece(len(q), row.longest, row.bounds_S)).flatten(1)

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
        return attend_long(q, k, v, scale=self.softmax_scale, backend=self._backend)


def _turned(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    from tidemill.learner.kernels.triton_kernels import rotated

    return rotated(q, k, rotation.cos_TF, rotation.sin_TF, interleaved=rotation.interleaved)


CORE_ATTENTION: Mapping[str, type[SDPACoreAttention]] = {
    SDPA: SDPACoreAttention,
    VARLEN: VarlenCoreAttention,
    CUDNN: CudnnCoreAttention,
}
"""Core attention by the name of its kernel."""
