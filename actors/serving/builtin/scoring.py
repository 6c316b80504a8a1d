"""Outputs of the modules of the built-in engine's decoder for single prompts, under names that other implementations
share.

    embedding | layers.<i>.attention.qkv, .attention.core, .attention, .mlp.experts, .mlp, layers.<i> (its output) |
norm | log_probs

Of a mixture of experts ``.mlp.experts`` is 1 where a token is sent to an expert, else 0, and ``.mlp`` the sum over a
token's experts. The decoder itself is not changed: its calls with a weight, the routers' choices and the additions to
the residual stream are intercepted. Shape letters: T = tokens of one prompt.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.input_scores import without_cache
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.builtin.weights import Weights, load_from_directory


def module_outputs(
    weights: Weights, prompts: Sequence[Sequence[int]], names: str = "*"
) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules with matching names, in the order of computation: ``<prompt>.<module>`` -> [T,
    size], without padding. ``log_probs`` has a value for each token but the first, at temperature 1. Raises
    UnsupportedModel.
    """
    shape = weights.shape
    outputs: dict[str, NDArray[np.float32]] = {}
    for number, tokens in enumerate(prompts):
        if len(tokens) > shape.max_positions or max(tokens) >= shape.vocab_size:
            limits = f"at most {shape.max_positions} tokens, each below {shape.vocab_size}"
            raise UnsupportedModel(
                f"prompt {number}", f"want {limits}, got {len(tokens)} tokens, the largest {max(tokens)}"
            )
        for name, value in _outputs(weights, tokens).items():
            if fnmatchcase(name, names):
                outputs[f"{number}.{name}"] = value.float().cpu().numpy()
    return outputs


def score_directory(
    directory: Path, prompts: Sequence[Sequence[int]], names: str = "*", *, dtype: str = "float32", device: str = "cpu"
) -> dict[str, NDArray[np.float32]]:
    """Return the outputs for a model directory. Raises UpdateRefused, UnsupportedModel."""
    weights = Weights(ModelShape.read(directory), dtype=getattr(torch, dtype), device=torch.device(device))
    load_from_directory(weights, directory)
    return module_outputs(weights, prompts, names)


@torch.inference_mode()
def _outputs(weights: Weights, tokens: Sequence[int]) -> dict[str, Tensor]:
    length = len(tokens)
    angles = decoder.RopeTable(weights, length).at(torch.arange(length, device=weights.device)[None])
    tokens_1T = torch.tensor([list(tokens)], device=weights.device)
    with _Taking(weights) as taking:
        x_1TE = decoder.forward(weights, tokens_1T, angles, without_cache)
        logits_TV = decoder.logits(weights, x_1TE[0])
    log_probs_TV = logits_TV[:-1].log_softmax(-1)
    taking.found["log_probs"] = log_probs_TV.gather(-1, tokens_1T[0, 1:, None])
    return taking.found


class _Taking(TorchFunctionMode):
    """Takes outputs of a forward pass by the operands of the decoder's calls: weights, and the residual stream."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        self._residual: Tensor | None = None
        """The stream, which only the sublayer of ``_entered`` adds to."""
        self._entered = ""
        self._sublayers = {weights.norm.data_ptr(): "norm"}
        """Names behind each norm, by the address of its weight."""
        self._products: dict[int, tuple[str, str]] = {}
        """Names of the input and the output of a weight's product, by the weight's address; empty = not taken."""
        for index, layer in enumerate(weights.layers):
            at = f"layers.{index}"
            self._sublayers |= {layer.input_norm.data_ptr(): f"{at}.attention", layer.mlp_norm.data_ptr(): f"{at}.mlp"}
            self._products[layer.qkv_QE.data_ptr()] = ("", f"{at}.attention.qkv")
            self._products[layer.output.data_ptr()] = (f"{at}.attention.core", "")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call; take its operands or its result if it is at one of the places."""
        result = func(*args, **(kwargs or {}))
        if func is functional.embedding:
            self._take("embedding", result)
        elif func is functional.rms_norm and (weight := (kwargs or {}).get("weight")) is not None:
            self._enter(self._sublayers.get(weight.data_ptr(), ""), args[0], result)
        elif func is functional.linear:
            before, after = self._products.get(args[1].data_ptr(), ("", ""))
            self._take(before, args[0])
            self._take(after, result)
        elif func is Tensor.topk and self._entered:  # the router's choice
            self._take(f"{self._entered}.experts", torch.zeros_like(args[0]).scatter_(-1, result.indices, 1.0))
        elif func is Tensor.add and args[0] is self._residual:
            self._take(self._entered, args[1])  # of a mixture of experts the sum over a token's experts
            if self._entered.endswith(".mlp"):
                self._take(self._entered.removesuffix(".mlp"), result)
        return result

    def _enter(self, name: str, stream: Tensor, normed: Tensor) -> None:
        """Note the sublayer whose norm reads the residual stream; behind the last norm there is none."""
        if name == "norm":
            self._take(name, normed)
        elif name:
            self._entered, self._residual = name, stream

    def _take(self, name: str, value: Tensor) -> None:
        if name:
            self.found[name] = value.detach().reshape(-1, value.shape[-1]).clone()
