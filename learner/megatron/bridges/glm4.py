"""GLM-4 (0414): dense, with norms behind attention and MLP, and rotary positions of neighbouring pairs in a part of each head."""

from typing import Any, ClassVar

from mbridge.models.qwen2 import Qwen2Bridge

from tidemill.learner.megatron.bridges.layers import NormedAttention, NormedMLP
from tidemill.learner.megatron.bridges.local_layers import LocalLayers
from tidemill.learner.megatron.layers.kernels import Arguments

_LAYER = "model.layers.{layer_number}."


class Glm4(LocalLayers, Qwen2Bridge):
    """Bridge of ``model_type: glm4``, which mbridge does not have; gate and up projection are one tensor in the files already."""

    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
        **Qwen2Bridge._ATTENTION_MAPPING,
        "self_attention.post_norm.weight": [_LAYER + "post_self_attn_layernorm.weight"],
    }
    _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
        "mlp.linear_fc1.weight": [_LAYER + "mlp.gate_up_proj.weight"],
        "mlp.linear_fc2.weight": [_LAYER + "mlp.down_proj.weight"],
        "mlp.post_norm.weight": [_LAYER + "post_mlp_layernorm.weight"],
    }

    def _build_config(self) -> Any:
        return self._build_base_config(add_qkv_bias=self.hf_config.attention_bias, qk_layernorm=False, rotary_interleaved=True)

    def _spec(self, vp_stage: int | None) -> Any:
        spec = super()._spec(vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = NormedAttention
            layer.submodules.mlp.module = NormedMLP
        return spec

    def _get_gptmodel_args(self) -> Arguments:
        return super()._get_gptmodel_args() | {"rotary_percent": self.hf_config.partial_rotary_factor}
