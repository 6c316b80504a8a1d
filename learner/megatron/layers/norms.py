"""The norm of every layer, of queries and keys, and behind the last layer: torch's RMSNorm."""

from typing import Any

import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class Norm(torch.nn.RMSNorm):
    """RMSNorm for Megatron's layer specs.

    With sequence parallelism each rank normalises its own tokens, so that it has a part of the weight's gradient. Megatron adds the parts
    up for the weights that are marked ``sequence_parallel``.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma and not config.persist_layer_norm
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> dict[str, Any]:
        """Return the entries of a checkpoint, for Megatron's MLP, which asks each of its parts for them."""
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {}, sharded_offsets)
        return entries


class FusedHeadNorm(Norm):
    """The norm of queries or keys by kernels for rows of a head's size: it takes and returns [..., n, d]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of each head."""
        from tidemill.learner.megatron.layers.fused_heads import head_norm

        assert self.eps is not None
        return head_norm(x, self.weight, self.eps)
