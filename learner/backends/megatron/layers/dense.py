"""Norms, linear layers, activation and output layers in the place of Megatron's own. Knows no family."""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable


class Norm(torch.nn.RMSNorm):
    """RMSNorm for Megatron's layer specs.

    With sequence parallelism each rank normalises its own tokens, so it has a part of the weight's gradient. Megatron
    adds the parts up for weights that are marked ``sequence_parallel``.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        assert (
            config.normalization == "RMSNorm"
            and not config.layernorm_zero_centered_gamma
            and not config.persist_layer_norm
        )
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the entries of a checkpoint, for Megatron's MLP, which asks each of its parts for them."""
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {}, sharded_offsets
        )
        return entries


class FusedHeadNorm(Norm):
    """The norm of queries or keys by kernels for rows of a head's size: it takes and returns [..., n, d]."""

    def forward(self, x: Tensor) -> Tensor:
        from tidemill.learner.kernels.triton_kernels import head_norm

        assert self.eps is not None
        return head_norm(x, self.weight, self.eps)


class GatedSilu(torch.nn.Module):
    """SiLU of the first half of the input times the second. It keeps the input alone for the backward pass."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., I] for [..., 2 I]."""
        gated: Tensor = _GatedSilu.apply(x)
        return gated

    def sharded_state_dict(self, *place: Any, **named: Any) -> dict[str, Any]:
        """Return no entries of a checkpoint, for Megatron's MLP, which asks each of its parts for them."""
        return {}


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return grad_x


class NormedAttention(SelfAttention):  # type: ignore[misc]
    """Self attention with a norm between its output and the residual."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.post_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        out, bias = super().forward(*arguments, **options)
        return self.post_norm(out), bias


class NormedMLP(MLP):  # type: ignore[misc]
    """MLP with a norm between its output and the residual."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        options.setdefault("ffn_hidden_size", config.ffn_hidden_size)  # Megatron passes it to its own class only
        super().__init__(config, *arguments, **options)
        self.post_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        out, bias = super().forward(*arguments, **options)
        return self.post_norm(out), bias


class OutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's output layer without the product: the model returns the hidden states [b, s, H]."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        """Return the hidden states and no bias. ``weight``: the weight of tied embeddings; see ``output_weight``."""
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
    """Return this rank's part of the output weight, [V, H]: the embedding's part if the two are tied."""
    tied: bool = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight


def is_embedding_too(model: GPTModel) -> bool:
    """Return whether the output weight of this stage is also its embedding's."""
    return bool(model.share_embeddings_and_output_weights and model.pre_process)


class _OneProduct(torch.nn.Module):
    """Mixin for Megatron's linear layers, to be the first base class."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *arguments: Any, **named: Any) -> Tensor:
        # torch.matmul multiplies each token with a frozen weight on its own where the strides of [s, 1, H] are not
        # those of a contiguous tensor, as behind a transposition; that takes as long as the weight's gradient.
        out: Tensor = super()._forward_impl(input.flatten(0, -2), weight, *arguments, **named)  # type: ignore[misc]
        return out.unflatten(0, (-1, *input.shape[1:-1]))


class FrozenColumn(_OneProduct, ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel layer whose weight is not trained."""


class FrozenRow(_OneProduct, RowParallelLinear):  # type: ignore[misc]
    """A row-parallel layer whose weight is not trained."""


def freeze_linears(module: torch.nn.Module) -> None:
    """Exchange the class of each of Megatron's linear layers in ``module`` whose weight has no gradient."""
    classes: dict[type, type] = {ColumnParallelLinear: FrozenColumn, RowParallelLinear: FrozenRow}
    for layer in module.modules():
        if type(layer) in classes and not layer.weight.requires_grad:  # type: ignore[union-attr]
            layer.__class__ = classes[type(layer)]
