"""The output layer of the policy, which leaves the product with its weight to the loss (``learner.logprobs``).

It has the weight, and with it the name, the split and the checkpoint entry of Megatron's own.
"""

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor


class OutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's output layer without the product: the model returns the hidden states [b, s, H] behind the last norm."""

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
        """Return the hidden states and no bias. ``weight`` is that of tied embeddings; see ``output_weight``."""
        # With any of these, Megatron does more with the input or the output than the loss does.
        assert not self.gather_output and self.bias is None
        if self.sequence_parallel:
            # The loss sums the gradient of the hidden states over the tensor-parallel ranks, so each takes its own tokens of it.
            return gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False), None
        return input_, None


def output_weight(model: GPTModel) -> Tensor:
    """Return this rank's part of the output weight, [V, H]: that of the embedding if the two are tied."""
    tied: bool = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight
