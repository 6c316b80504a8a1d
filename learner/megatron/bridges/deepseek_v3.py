"""DeepSeek-V3: multi-head latent attention; dense layers first, then routed experts and shared ones."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from mbridge.models.deepseek_v3 import DeepseekV3Bridge

from tidemill.learner.megatron.bridges.experts import Experts
from tidemill.learner.megatron.bridges.glm4_moe import grouped_choice
from tidemill.learner.megatron.bridges.latent_attention import LatentAttention
from tidemill.learner.megatron.layers.kernels import Arguments

_LATENT_NORM = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.(q|kv)_layernorm\.weight")


class DeepSeekV3(Experts, DeepseekV3Bridge):
    """Bridge of ``model_type: deepseek_v3``. mbridge ignores groups of experts, and needs Transformer Engine and bfloat16."""

    _FLASH_HEADS = False
    _SHARED_STATE_DICT_MAPPING: ClassVar[Mapping[str, list[str]]] = {}
    """Tensors that the layers for multi-token prediction share; models with such layers are refused."""

    def __init__(self, hf_config: Any, *arguments: Any, **more: Any) -> None:
        # mbridge reads the kind of scaling from the older of its two names.
        if scaling := getattr(hf_config, "rope_scaling", None):
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            hf_config.rope_scaling = None if kind == "default" else {**scaling, "type": kind}
        super().__init__(hf_config, *arguments, **more)

    def _build_base_config(self, **arguments: Any) -> Any:
        arguments["original_max_position_embeddings"] = arguments.pop("max_position_embeddings")
        del arguments["attention_backend"]
        arguments["mtp_num_layers"] = None
        return super()._build_base_config(**arguments)  # type: ignore[misc]

    def _arguments(self) -> Arguments:
        return super()._arguments() | grouped_choice(self.hf_config)

    def _get_gptmodel_args(self) -> Arguments:
        config = self.hf_config  # attention has the rotary positions itself
        return {
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": config.rope_theta,
        }

    def _spec(self, vp_stage: int | None) -> Any:
        spec = super()._spec(vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = LatentAttention
        return spec

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        if norm := _LATENT_NORM.fullmatch(name):
            return [f"model.layers.{norm[1]}.self_attn.{norm[2]}_a_layernorm.weight"]
        return super()._weight_name_mapping_mcore_to_hf(name)
