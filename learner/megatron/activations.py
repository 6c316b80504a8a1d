"""Outputs of the modules of Megatron's model for single prompts, under names that other implementations of the model share.

    embedding | layers.<i>.attention.qkv, .attention.core, .attention, .mlp, layers.<i> (its output) | norm | log_probs

Shape letters: T = tokens of one prompt, H = hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.megatron.cpu_shim import megatron_device, plain_torch
from learner.megatron.layers.attention import packed_row
from learner.megatron.layers.output_layer import output_weight
from learner.megatron.logprobs import log_probs_and_entropy
from learner.megatron.model import Policy

Take = Callable[[Any, Any, Any], None]


def module_outputs(policy: Policy, prompts: Sequence[Sequence[int]], names: str = "*") -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules with matching names, in the order of computation: ``<prompt>.<module>`` -> [T, size].

    One prompt at a time, without padding beyond that of tensor parallelism, under the current weights. Collective over the
    tensor-parallel ranks. With tensor parallelism the outputs that are split over ranks (attention.qkv, attention.core) are left out;
    latent attention has no attention.qkv.
    """
    found: dict[str, NDArray[np.float32]] = {}
    policy.memory.want("a forward pass")
    with megatron_device(), torch.no_grad():
        for number, tokens in enumerate(prompts):
            taken: dict[str, Tensor] = {}
            with _hooked(policy, taken):
                hidden_TH = _forward(policy, tokens)
            targets_T = torch.tensor([*tokens[1:], 0], device=policy.parallel.device)
            padded_T = torch.nn.functional.pad(targets_T, (0, len(hidden_TH) - len(tokens)))
            with plain_torch():
                weight_VH = output_weight(policy.module)
                taken["log_probs"] = log_probs_and_entropy(hidden_TH, weight_VH, padded_T, group=policy.parallel.tp_group)[0][:, None]
            for name, value in taken.items():
                if fnmatchcase(name, names):
                    last = len(tokens) - (name == "log_probs")  # the last token has no target
                    found[f"{number}.{name}"] = value[:last].float().cpu().numpy()
    return found


def _forward(policy: Policy, tokens: Sequence[int]) -> Tensor:
    """Return the hidden states that the output layer gets, [T, H]."""
    padding = -len(tokens) % policy.parallel.tp_size
    device = policy.parallel.device
    ids_T = torch.tensor([*tokens, *[0] * padding], device=device)
    ends = [0, len(tokens), *([len(ids_T)] if padding else [])]
    positions_T = torch.cat([torch.arange(end - start, device=device) for start, end in pairwise(ends)])
    packed = packed_row(np.array(ends, np.int32), positions_T)
    with plain_torch():
        output = policy.ddp(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            attention_mask=None,
            packed_seq_params=packed,
            **({"fp32_output": False} if policy.config.bf16 else {}),
        )
    return output[0]  # type: ignore[no-any-return]


@contextmanager
def _hooked(policy: Policy, taken: dict[str, Tensor]) -> Iterator[None]:
    """Take the outputs of the modules while entered, in ``taken``."""
    handles = [module.register_forward_hook(_taking(name, change, taken)) for name, module, change in _places(policy)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _taking(name: str, change: Callable[[Tensor], Tensor], taken: dict[str, Tensor]) -> Take:
    def take(module: Any, inputs: Any, output: Any) -> None:
        """Keep a copy of the output, with its bias, where Megatron returns that apart."""
        value, bias = output[:2] if isinstance(output, tuple) else (output, None)
        is_bias = isinstance(bias, Tensor) and bias.ndim == 1
        value = change((value + bias if is_bias else value).detach())
        taken[name] = value.reshape(-1, value.shape[-1]).clone()

    return take


def _places(policy: Policy) -> Iterator[tuple[str, Any, Callable[[Tensor], Tensor]]]:
    """Yield name, module, and the change of layout of its output."""

    def same(value: Tensor) -> Tensor:
        return value

    model, whole = policy.module, policy.parallel.tp_size == 1
    yield "embedding", model.embedding, same
    for index, layer in enumerate(model.decoder.layers):
        attention, at = layer.self_attention, f"layers.{index}"
        if whole and not policy.config.multi_latent_attention:  # which has no joint projection
            yield f"{at}.attention.qkv", attention.linear_qkv, lambda value: _query_key_value(value, policy.config)
        if whole:
            yield f"{at}.attention.core", attention.core_attention, same
        yield f"{at}.attention", attention, same
        yield f"{at}.mlp", layer.mlp, same
        yield at, layer, same
    yield "norm", model.decoder.final_layernorm, same


def _query_key_value(mixed: Tensor, config: Any) -> Tensor:
    """Return all queries, all keys, all values; Megatron has them group by group."""
    groups, size = config.num_query_groups, config.kv_channels
    queries = config.num_attention_heads // groups
    parts = mixed.unflatten(-1, (groups, queries + 2, size)).split((queries, 1, 1), dim=-2)
    return torch.cat([part.flatten(-3) for part in parts], dim=-1)
