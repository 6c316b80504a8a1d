"""Outputs of the modules of a model of transformers for single prompts, under names that other implementations share.

    embedding | layers.<i>.attention, .mlp, layers.<i> (its output) | norm | log_probs

Modules that a family names otherwise are left out, and named in the log.
"""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.learner.backends.fsdp.opening import base_of
from tidemill.learner.backends.fsdp.policy import FsdpPolicy
from tidemill.learner.trainer.module_outputs import Place, num_tokens, outputs_of

log = logging.getLogger(__name__)

_OF_LAYER = {"attention": ("self_attn", "linear_attn", "attention"), "mlp": ("mlp", "feed_forward", "block_sparse_moe")}
"""Names of a layer's modules in the families, by ours."""
_MIXER = "mixer"
"""Name of the only module of a layer of nemotron_h, which has a kind (``block_type``)."""
_NORMS = ("norm", "final_layernorm", "embedding_norm", "norm_f")


def module_outputs(
    policy: FsdpPolicy, prompts: Sequence[Sequence[int]], names: str = "*"
) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules with matching names, in the order of computation: ``<prompt>.<module>`` -> [T,
    W].

    One prompt at a time under the current weights. Collective over all ranks, which compute the same; rank 0 gets the
    outputs, the others none.
    """
    policy.memory.want("a forward pass")
    places, found = list(_places(policy)), {}
    for number, tokens in enumerate(prompts):
        for name, output in outputs_of(policy, places, tokens, names):
            if policy.parallel.rank == 0:
                found[f"{number}.{name}"] = output[: num_tokens(name, tokens)].float().cpu().numpy()
    return found


def _shared_name(name: str, layer: torch.nn.Module) -> str:
    """Return our name of a module of a layer; empty = there is none."""
    if name == _MIXER:
        return "mlp" if getattr(layer, "block_type", "") in ("mlp", "moe") else "attention"
    return next((ours for ours, names in _OF_LAYER.items() if name in names), "")


def _places(policy: FsdpPolicy) -> Iterator[Place]:
    transformer = policy.root.transformer
    yield Place("embedding", transformer.get_input_embeddings())
    base, left_out = base_of(transformer), set[str]()
    for number, layer in enumerate(base.layers):
        for own_name, module in layer.named_children():
            if name := _shared_name(own_name, layer):
                yield Place(f"layers.{number}.{name}", module)
            else:
                left_out.add(own_name)
        yield Place(f"layers.{number}", layer)
    log.info("modules of layers without a shared name are left out of the dump: %s", ", ".join(sorted(left_out)))
    for module in (getattr(base, each, None) for each in _NORMS):
        if module is not None:
            yield Place("norm", module)
