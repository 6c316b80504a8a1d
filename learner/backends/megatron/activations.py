"""Outputs of the modules of Megatron's model for single prompts, under names that other implementations of the model
share.

    embedding | layers.<i>.attention.qkv, .attention.core, .attention, .mlp.experts, .mlp, layers.<i> (its output) |
norm | log_probs

    rank: its layers, tokens, heads -> outputs of the stage (tensor-, context-parallel ranks) -> rank 0: all stages

The numbers of the layers are those of the whole model at every layout. ``.mlp.experts`` is 1 where a token is sent to
an expert, else 0. Shape letters: T = tokens of one prompt, with padding; C = those of this context-parallel rank; W =
width of an output.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.learner.backends.megatron.model import MegatronPolicy
from tidemill.learner.layout.parallel import gather_parts, of_all_stages
from tidemill.learner.trainer.module_outputs import Place, num_tokens, outputs_of


def _sent(output: tuple[Tensor, Tensor]) -> Tensor:
    """Return 1 for each token and expert to which a router has sent it, else 0."""
    return output[1].float()


def module_outputs(
    policy: MegatronPolicy, prompts: Sequence[Sequence[int]], names: str = "*"
) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules with matching names, in the order of computation: ``<prompt>.<module>`` -> [T,
    W].

    One prompt at a time under the current weights. Collective over all ranks; rank 0 gets the whole outputs of all
    stages, the others none. Latent attention has no attention.qkv.
    """
    ranks, found = policy.parallel, {}
    in_first_column = ranks.dp_rank == ranks.tp_rank == ranks.cp_rank == 0
    policy.memory.want("a forward pass")
    for number, tokens in enumerate(prompts):
        stage_outputs = outputs_of(policy, list(_places(policy)), tokens, names)
        if not in_first_column:
            continue
        outputs = dict(of_all_stages(iter(stage_outputs), ranks))
        if ranks.rank == 0:
            for name in sorted(outputs, key=_order):
                found[f"{number}.{name}"] = outputs[name][: num_tokens(name, tokens)].float().cpu().numpy()
    return found


def _order(name: str) -> float:
    """Return the place of a module among those of other stages; modules of one layer are in order already."""
    layer = name.split(".")[1] if name.startswith("layers.") else ""
    return int(layer) if layer else -1 if name == "embedding" else np.inf


def _places(policy: MegatronPolicy) -> Iterator[Place]:
    ranks, config = policy.parallel, policy.config

    def tokens(value: Tensor) -> Tensor:
        """Return the tokens of all tensor-parallel ranks, which sequence parallelism divides."""
        return gather_parts(value, ranks.tp_group) if ranks.sequence_parallel else value

    def heads(value_CW: Tensor) -> Tensor:
        """Return the heads of all tensor-parallel ranks, in their order."""
        return gather_parts(value_CW.t(), ranks.tp_group).t() if ranks.tp_size > 1 else value_CW

    def query_key_value(value_CW: Tensor) -> Tensor:
        return torch.cat([heads(part) for part in _split(value_CW, config, ranks.tp_size)], dim=-1)

    for model in policy.chunks:
        if model.pre_process:
            yield Place("embedding", model.embedding, tokens)
        for layer in model.decoder.layers:
            attention, at = layer.self_attention, f"layers.{layer.layer_number - 1}"
            if not config.multi_latent_attention:  # which has no joint projection
                yield Place(f"{at}.attention.qkv", attention.linear_qkv, query_key_value)
            yield Place(f"{at}.attention.core", attention.core_attention, heads)
            yield Place(f"{at}.attention", attention, tokens)
            if (router := getattr(layer.mlp, "router", None)) is not None:
                yield Place(f"{at}.mlp.experts", router, tokens, _sent)
            yield Place(f"{at}.mlp", layer.mlp, tokens)
            yield Place(at, layer, tokens)
        if model.post_process:
            yield Place("norm", model.decoder.final_layernorm, tokens)


def _split(mixed_CW: Tensor, config: Any, tp_size: int) -> tuple[Tensor, ...]:
    """Return this rank's queries, keys and values; Megatron has them group by group."""
    groups, size = config.num_query_groups // tp_size, config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups
    parts = mixed_CW.unflatten(-1, (groups, queries + 2, size)).split((queries, 1, 1), dim=-2)
    return tuple(part.flatten(-3) for part in parts)
