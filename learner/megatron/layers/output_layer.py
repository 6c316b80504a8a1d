"""The output layers: the policy's, which leaves the product with its weight to the loss (``logprobs``), and the
critic's.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class OutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's output layer without the product: the model returns the hidden states [b, s, H]."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        """Return the hidden states and no bias. ``weight`` is that of tied embeddings; see ``output_weight``."""
        # With any of these, Megatron does more with the input or the output than the loss does.
        assert not self.gather_output and self.bias is None
        if self.sequence_parallel:
            # The loss sums the gradient of the hidden states over the tensor-parallel ranks, so each takes its own
            # tokens of it.
            return gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False), None
        return input_, None


class ValueHead(torch.nn.Module):
    """One value per token instead of logits: whole on every tensor-parallel rank, in float32, 0 at first."""

    def __init__(self, config: Any, *, device: torch.device) -> None:
        """``config``: Megatron's TransformerConfig."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)
        self._gathers = bool(config.sequence_parallel)
        # Its gradient is then of this rank's tokens, and Megatron sums it over the ranks.
        self.weight.sequence_parallel = self._gathers  # type: ignore[attr-defined]

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        """Return the values [s, b, 1], float32, and no bias. ``weight``: of tied embeddings, never of a critic."""
        assert weight is None
        values = torch.nn.functional.linear(input_.float(), self.weight.float())
        return (
            gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False) if self._gathers else values
        ), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the checkpoint entry of the weight, the same on all tensor-parallel ranks."""
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
        )
        return entries


def output_weight(model: GPTModel) -> Tensor:
    """Return this rank's part of the output weight, [V, H]: that of the embedding if the two are tied."""
    tied: bool = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight


def is_embedding_too(model: GPTModel) -> bool:
    """Return whether the output weight of this stage is also its embedding's."""
    return bool(model.share_embeddings_and_output_weights and model.pre_process)
