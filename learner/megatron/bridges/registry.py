"""The bridge of each family, by ``model_type`` of the Hugging Face config."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mbridge.core.llm_bridge import LLMBridge
from transformers import AutoConfig

from tidemill.bus.system.functions import find_function
from tidemill.bus.wire.model_values import in_older_keys
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.layout.sizes import FAMILIES, refusals
from tidemill.learner.megatron.bridges.families import (
    DeepSeekV3,
    Glm4,
    Glm4MoE,
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen2MoE,
    Qwen3,
    Qwen3MoE,
)
from tidemill.learner.megatron.bridges.local_layers import LocalLayers
from tidemill.learner.megatron.layers.kernels import Wanted
from tidemill.learner.megatron.layers.mixture import Mixture

_BRIDGES: Mapping[str, type[LocalLayers]] = {
    "deepseek_v3": DeepSeekV3,
    "glm4": Glm4,
    "glm4_moe": Glm4MoE,
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen2_moe": Qwen2MoE,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3MoE,
}
assert sorted(_BRIDGES) == sorted(FAMILIES)  # FAMILIES is for checks that must not import torch


def open_bridge(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    parallel: Parallel,
    wanted: Wanted | None = None,
    mixture: Mixture | None = None,
    own: str = "",
) -> Any:
    """Return the bridge for a Hugging Face model directory.

    It has ``build(pre_process, post_process, vp_stage) -> GPTModel``, ``load(chunks, directory)`` and
    ``export(chunks)``. ``wanted``, ``mixture``: settings about kernels and experts; None = the defaults. ``own``:
    import path of the bridge's class; empty = that of the model type. Raises ConfigRefused for a model type without a
    bridge, a value that Megatron would compute differently, sizes that the parallel layout cannot split, or a kernel
    that cannot work here; ValueError for an import path that leads to no bridge.
    """
    bridge_class = None if not own else _own(own)  # its module may tell transformers about the model type
    hf_config = _config(model_dir)
    for refused in refusals(
        hf_config.to_dict(), where=f"{model_dir}/config.json", own_bridge=bridge_class is not None, **parallel.sizes
    ):
        raise refused
    bridge = (bridge_class or _BRIDGES[hf_config.model_type])(
        hf_config,
        dtype,
        wanted or Wanted(),
        sequence_parallel=parallel.sequence_parallel,
        edge_layers=parallel.edge_layers,
        mixture=mixture or Mixture(),
    )
    assert isinstance(bridge, LLMBridge)
    return bridge


def _own(path: str) -> type[LocalLayers]:
    """Return the class at an import path. Raises ValueError for one that is no bridge."""
    bridge_class = find_function(path, "learner.bridge", want="module:Class")
    if not (
        isinstance(bridge_class, type) and issubclass(bridge_class, LocalLayers) and issubclass(bridge_class, LLMBridge)
    ):
        want = (
            "a class with the bases LocalLayers (learner/megatron/bridges/local_layers.py) and one of mbridge's "
            "bridges, in this order"
        )
        got = getattr(bridge_class, "__mro__", type(bridge_class).__name__)
        raise ValueError(f"learner.bridge: want {want}, got {path!r}: {got}")
    return bridge_class


def _config(model_dir: Path) -> Any:
    """Return the configuration of a model directory. Raises ConfigRefused for a model type that transformers does not
    know.
    """
    try:
        values = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        config = AutoConfig.from_pretrained(model_dir)
        for name, value in in_older_keys(values).items():
            setattr(config, name, value)
        return config
    except ValueError as error:
        want = (
            "a model that transformers knows; the module of learner.bridge may register its configuration "
            "(AutoConfig.register)"
        )
        raise ConfigRefused(f"{model_dir}/config.json", want, str(error).splitlines()[0]) from error
