"""Runs in the scheduler of an SGLang server: writes the outputs of the modules of its model. It imports nothing of this
package.

SGLang calls ``hook`` for ``--forward-hooks``; the folder of this file is on the server's PYTHONPATH, hence a name that
no other module has. Outputs are [T, width], float32: T = tokens of one pass.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

PARTS = {
    "self_attn.qkv_proj": ".attention.qkv",
    "self_attn.attn": ".attention.core",
    "self_attn": ".attention",
    "post_self_attn_layernorm": ".attention",
    "mlp.topk": ".mlp.experts",
    "mlp": ".mlp",
    "block_sparse_moe.topk": ".mlp.experts",
    "block_sparse_moe": ".mlp",
    "post_mlp_layernorm": ".mlp",
}
"""SGLang's name of a module in a layer -> the end of the shared name. Of two with the same the later output counts,
which the residual stream adds. Source: ``sglang/srt/models``, release 0.5.23.
"""
ROUTER = ".topk"
STREAM = "input_layernorm"
"""The norm before attention. From the second layer on it also returns the residual stream, which is the output of the
layer before; so does the norm behind the last layer.
"""
PATTERNS = ("model", "model.embed_tokens", "model.norm", *(f"model.layers.*.{part}" for part in (*PARTS, STREAM)))
"""The modules that the hook is for; ``model`` runs around all others."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def hook(config: Mapping[str, str]) -> Callable[[nn.Module, object, object], None]:
    """Return the hook for all ``PATTERNS``, which writes ``<directory>/<number>.safetensors`` after each pass. Names in
    the file begin with their place in the order of computation.
    """
    directory, numbers, outputs = Path(config["directory"]), count(), list[tuple[nn.Module, Taken]]()
    writer = f"{os.getpid()}-{id(outputs)}"
    """SGLang may ask for the hook of two models in one process; a prompt then has two passes, which is refused."""

    def take(module: nn.Module, inputs: object, output: object) -> None:
        layers = getattr(module, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            outputs.append((module, _taken(output)))
            return
        names = {id(module_inside): name for name, module_inside in module.named_modules()}
        named = dict(
            pair for module_inside, copies in outputs for pair in _named(names[id(module_inside)], copies, len(layers))
        )
        outputs.clear()
        file = directory / f"{next(numbers):06d}-{writer}"
        save_file({f"{place:06d}.{name}": value for place, (name, value) in enumerate(named.items())}, file)
        file.rename(file.with_suffix(".safetensors"))

    return take


@dataclass(frozen=True, slots=True)
class Taken:
    """Copies of the output of a module: later modules may overwrite it, as they compute in place."""

    values: list[Tensor]
    """The tensors of the output that have a row for each token, [T, width]."""
    sent: Tensor | None
    """Of a router: 1 where a token is sent to an expert, else 0, [T, experts]; None = it returns no ids of experts."""


def _taken(output: object) -> Taken:
    values = output if isinstance(output, tuple) else (output,)
    copies = [
        value.detach().float().cpu().flatten(1).clone()
        for value in values
        if isinstance(value, Tensor) and value.ndim > 1
    ]
    chosen, scores = getattr(output, "topk_ids", None), getattr(output, "router_logits", None)
    if not (isinstance(chosen, Tensor) and isinstance(scores, Tensor)):
        return Taken(copies, None)
    # An expert that all tokens share has the number behind the others, and padding -1.
    experts, ids = scores.shape[-1], chosen.long().cpu()
    ids = ids.where((ids >= 0) & (ids < experts), experts)
    return Taken(copies, torch.zeros(len(ids), experts + 1).scatter_(-1, ids, 1.0)[:, :experts].contiguous())


def _named(name: str, copies: Taken, layers: int) -> Iterator[tuple[str, Tensor]]:
    values, match = copies.values, _LAYER.fullmatch(name)
    if name == "embed_tokens":
        yield from (("embedding", value) for value in values[:1])
    elif name == "norm":
        yield from ((f"layers.{layers - 1}", stream) for stream in values[1:])
        yield from (("norm", value) for value in values[:1])
    elif match and match[2] == STREAM:
        yield from ((f"layers.{int(match[1]) - 1}", stream) for stream in values[1:])
    elif match:
        outputs = values[:1] if not name.endswith(ROUTER) else [] if copies.sent is None else [copies.sent]
        yield from ((f"layers.{match[1]}{PARTS[match[2]]}", value) for value in outputs)
