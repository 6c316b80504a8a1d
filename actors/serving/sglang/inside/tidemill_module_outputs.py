"""Runs in the scheduler of an SGLang server: writes what the modules of its model computed. Needs torch and safetensors, nothing of ours.

SGLang calls ``hook`` for ``--forward-hooks``; the folder of this file is on the server's PYTHONPATH, hence a name that no other module has.
Outputs are [T, width], float32: T = tokens of one pass.
"""

import re
from collections.abc import Callable, Iterator, Mapping
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
"""Modules of a layer by their names in SGLang, and the ends of ours; of two in one layer the later one, which is added to the stream.

Source: ``sglang/srt/models``, release 0.5.23.
"""
STREAM = "input_layernorm"
"""Of a layer but the first; returns the residual stream, too, as does the norm behind the last layer: the output of the layer before."""
PATTERNS = ("model", "model.embed_tokens", "model.norm", *(f"model.layers.*.{part}" for part in (*PARTS, STREAM)))
"""The modules that the hook is for; ``model`` runs around all others."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def hook(config: Mapping[str, str]) -> Callable[[nn.Module, object, object], None]:
    """Return the hook for all ``PATTERNS``, which writes ``<directory>/<number>.safetensors`` after each pass.

    Names in the file begin with their place in the order of computation.
    """
    directory, numbers, outputs = Path(config["directory"]), count(), list[tuple[nn.Module, list[Tensor]]]()

    def take(module: nn.Module, inputs: object, output: object) -> None:
        layers = getattr(module, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            outputs.append((module, _copies(output)))  # later modules may compute in place
            return
        names = {id(one): name for name, one in module.named_modules()}
        found = dict(pair for one, values in outputs for pair in _named(names[id(one)], values, len(layers)))
        outputs.clear()
        file = directory / f"{next(numbers):06d}"
        save_file({f"{place:06d}.{name}": value for place, (name, value) in enumerate(found.items())}, file)
        file.rename(file.with_suffix(".safetensors"))

    return take


def _copies(output: object) -> list[Tensor]:
    """Return the tensors of an output; of a router's choice, 1 for each token and expert to which it is sent, else 0."""
    chosen, scores = getattr(output, "topk_ids", None), getattr(output, "router_logits", None)
    if isinstance(chosen, Tensor) and isinstance(scores, Tensor):
        return [torch.zeros(scores.shape).scatter_(-1, chosen.long().cpu(), 1.0)]
    values = output if isinstance(output, tuple) else (output,)
    return [value.detach().float().cpu().flatten(1).clone() for value in values if isinstance(value, Tensor)]


def _named(name: str, values: list[Tensor], layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield our names for the output of a module."""
    if not values:
        return
    if name == "embed_tokens":
        yield "embedding", values[0]
    elif name == "norm":
        yield from ((f"layers.{layers - 1}", stream) for stream in values[1:])
        yield name, values[0]
    elif found := _LAYER.fullmatch(name):
        layer, part = int(found[1]), found[2]
        if part == STREAM:
            yield from ((f"layers.{layer - 1}", stream) for stream in values[1:])
        else:
            yield f"layers.{layer}{PARTS[part]}", values[0]
