"""The bridge of each family, by ``model_type`` of the Hugging Face config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mbridge.core.llm_bridge import LLMBridge
from transformers import AutoConfig

from learner.layout.parallel import Parallel
from learner.layout.sizes import FAMILIES, refusals
from learner.megatron.bridges.deepseek_v3 import DeepSeekV3
from learner.megatron.bridges.glm4 import Glm4
from learner.megatron.bridges.glm4_moe import Glm4MoE
from learner.megatron.bridges.llama import Llama, Mistral
from learner.megatron.bridges.local_layers import LocalLayers
from learner.megatron.bridges.mixtral import Mixtral
from learner.megatron.bridges.qwen2 import Qwen2
from learner.megatron.bridges.qwen2_moe import Qwen2MoE
from learner.megatron.bridges.qwen3 import Qwen3
from learner.megatron.bridges.qwen3_moe import Qwen3MoE
from learner.megatron.layers.kernels import Wanted
from learner.megatron.layers.mixture import Mixture

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
    model_dir: Path, *, dtype: torch.dtype, parallel: Parallel, wanted: Wanted | None = None, mixture: Mixture | None = None
) -> Any:
    """Return the bridge for a Hugging Face model directory.

    It has ``build(pre_process, post_process, vp_stage) -> GPTModel``, ``load(chunks, directory)`` and ``export(chunks)``.
    ``wanted``, ``mixture``: settings about kernels and experts; None = the defaults. Raises ConfigRefused for a model type without a
    bridge, a value that Megatron would compute differently, sizes that the parallel layout cannot split, or a kernel that cannot work here.
    """
    hf_config = AutoConfig.from_pretrained(model_dir)
    for refused in refusals(hf_config.to_dict(), where=f"{model_dir}/config.json", **parallel.sizes):
        raise refused
    bridge = _BRIDGES[hf_config.model_type](
        hf_config, dtype, wanted or Wanted(), sequence_parallel=parallel.sequence_parallel, mixture=mixture or Mixture()
    )
    assert isinstance(bridge, LLMBridge)
    return bridge
