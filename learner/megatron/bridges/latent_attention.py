"""Multi-head latent attention of packed rows, with Megatron's own layers.

Two projections to the latents are not split by tensor parallelism here: Megatron's local layers split them and gather the output with a
backward pass that loses the other ranks' gradient of the rotary key.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from tidemill.learner.megatron.layers.attention import Group, PackedRotary, PackedRow


class WholeLinear(torch.nn.Linear):
    """A projection that every tensor-parallel rank has whole; with split sequences it sees this rank's tokens."""

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the product and no bias, as Megatron's linears do."""
        return super().forward(x), None


class LatentRotary(PackedRotary):
    """Rotary positions for latent attention, which drops the batch dimension of packed rows."""

    def forward(self, max_seq_len: PackedRow | int, offset: int = 0, packed_seq: bool = False, cp_group: Group | None = None) -> Tensor:
        """Return the angles [T, 1, d] of a PackedRow, or those of positions 0 .. max_seq_len - 1."""
        angles = super().forward(max_seq_len, offset, packed_seq, cp_group)
        return angles[:, 0] if isinstance(max_seq_len, PackedRow) else angles


class LatentYarn(YarnRotaryEmbedding):  # type: ignore[misc]
    """Rotary positions of YaRN for latent attention: stretched angles, with a scale for their cosines and sines."""

    def get_rotary_seq_len(self, *arguments: Any, **more: Any) -> Any:
        """Return the argument that Megatron passes to ``forward``: for a packed row the row itself instead of its length."""
        if arguments and isinstance(arguments[-1], PackedRow):
            return arguments[-1]
        return super().get_rotary_seq_len(*arguments, **more)

    def forward(
        self, max_seq_len: PackedRow | int, offset: int = 0, packed_seq: bool = False, cp_group: Group | None = None
    ) -> tuple[Tensor, float]:
        """Return the angles [T, 1, d] of a PackedRow, or those of positions 0 .. max_seq_len - 1, and the scale."""
        if not isinstance(max_seq_len, PackedRow):
            found: tuple[Tensor, float] = super().forward(max_seq_len, offset, packed_seq, cp_group)
            return found
        angles, scale = self.get_emb(max_seq_len.max_seqlen_q)
        return angles[max_seq_len.position_ids_T][:, 0], scale


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's multi-head latent attention with whole projections to the latents, for packed rows."""

    def __init__(self, config: Any, *arguments: Any, **more: Any) -> None:
        with _without_transformer_engine():
            super().__init__(config, *arguments, **more)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)
        self.rotary_pos_emb.__class__ = LatentYarn if config.rope_type == "yarn" else LatentRotary


@contextmanager
def _without_transformer_engine() -> Iterator[None]:
    """Let Megatron skip the linears of Transformer Engine inside the context where that is absent: 0.16.1 compares with no class then."""
    had = multi_latent_attention.HAVE_TE
    multi_latent_attention.HAVE_TE = had and isinstance(multi_latent_attention.TELinear, type)
    try:
        yield
    finally:
        multi_latent_attention.HAVE_TE = had
