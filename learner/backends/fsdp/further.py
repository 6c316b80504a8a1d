"""Heads for further tokens (MTP) of a model of transformers, as modules under the names of the files.

    hidden state of i, embedding of i + k -> norms, joined -> projection -> one layer -> norm: predicts i + k + 1

A head's layer is the family's own decoder layer. Embedding and output layer are the model's, and get no gradient, nor
do the model's hidden states: the heads are all that their loss trains, as in slime. Of several heads each reads the
states of the head before. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
Shape letters: T = tokens of a row, H = hidden size.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tidemill.learner.backends.fsdp.opening import base_of
from tidemill.learner.layout.model_files import has_named_head


class NumberedHead(torch.nn.Module):
    """Base of a head's class, in front of its layer's: ``model.layers.<number of layers + k>``."""

    eh_proj: torch.nn.Module
    enorm: torch.nn.Module
    hnorm: torch.nn.Module
    shared_head: Any

    def forward(self, hidden: Tensor, embedded: Tensor, **arguments: Any) -> Tensor:
        """Return the states of the head, [1, T, H]."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        states: Tensor = self.shared_head.norm(super().forward(joined, **arguments))
        return states


class NamedHead(torch.nn.Module):
    """The head ``mtp`` of a family of Qwen."""

    def __init__(self, layer: torch.nn.Module, norm: torch.nn.Module, projection: torch.nn.Linear) -> None:
        super().__init__()
        self.fc, self.layers = projection, torch.nn.ModuleList([layer])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = copy.deepcopy(norm), copy.deepcopy(norm)
        self.norm = norm

    def forward(self, hidden: Tensor, embedded: Tensor, **arguments: Any) -> Tensor:
        """Return the states of the head, [1, T, H]."""
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        states: Tensor = self.norm(self.layers[0](self.fc(torch.cat(parts, dim=-1)), **arguments))
        return states


def add_heads(model: Any, heads: int) -> None:
    """Add the heads to a model of transformers, without values."""
    base, config = base_of(model), model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    last = max(number for number, kind in enumerate(kinds) if kind == "full_attention")
    for _ in range(heads):
        layer = type(base.layers[last])(config, last)
        norm = type(base.norm)(config.hidden_size, eps=config.rms_norm_eps)
        projection = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        if has_named_head(config.model_type):
            model.mtp = NamedHead(layer, norm, projection)
            continue
        # The names in the files want the layer itself, with further parts: it keeps its instance, and its class is
        # exchanged for one of the same name, by which layers are found.
        layer.__class__ = type(type(layer).__name__, (NumberedHead, type(layer)), {})
        layer.eh_proj, layer.enorm, layer.hnorm = projection, copy.deepcopy(norm), copy.deepcopy(norm)
        layer.shared_head = torch.nn.Module()
        layer.shared_head.norm = norm
        base.layers.append(layer)  # behind those that a pass of the model takes, which it counts


def with_heads(kind: Any, heads: int) -> Any:
    """Return a class of models of transformers that are made with their heads: ``from_pretrained`` reads them, too."""

    def make(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, config, *arguments, **options)
        add_heads(self, heads)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


def heads_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the heads of a model, in order."""
    return [module for module in model.modules() if isinstance(module, NumberedHead | NamedHead)]


def names_of_heads(model: torch.nn.Module) -> frozenset[str]:
    """Return the names in the model of all tensors of its heads."""
    prefixes = {id(head): name for name, head in model.named_modules()}
    return frozenset(
        f"{prefixes[id(head)]}.{name}"
        for head in heads_of(model)
        for name, _ in (*head.named_parameters(), *head.named_buffers())
    )


def further_states(model: Any, hidden_TH: Tensor, tokens_T: Tensor, positions_T: Tensor) -> Iterator[Tensor]:
    """Yield the states [T, H] of each head; the k-th predicts the token k + 1 places behind. Inside the root's pass.

    The last k states of each sequence have read the next sequence of the row, and predict nothing.
    """
    states, positions = hidden_TH.detach()[None], positions_T[None]
    angles = base_of(model).rotary_emb(states, positions)
    for depth, head in enumerate(heads_of(model), 1):
        with torch.no_grad():
            embedded = model.get_input_embeddings()(tokens_T.roll(-depth)[None])
        states = head(states, embedded, position_embeddings=angles, attention_mask=None, position_ids=positions)
        yield states[0]
