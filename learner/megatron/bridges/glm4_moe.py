"""GLM-4.5 and 4.6: dense layers first, then routed experts and shared ones; sigmoid scores with a bias for each expert."""

from typing import Any

from mbridge.models.glm4moe import GLM4MoEBridge

from tidemill.learner.megatron.bridges.experts import Experts
from tidemill.learner.megatron.layers.kernels import Arguments


def grouped_choice(hf_config: Any) -> Arguments:
    """Return Megatron's arguments for a choice of experts within the best groups (``n_group``, ``topk_group``), which mbridge ignores."""
    if hf_config.n_group == 1:
        return {}
    return {"moe_router_num_groups": hf_config.n_group, "moe_router_group_topk": hf_config.topk_group}


class Glm4MoE(Experts, GLM4MoEBridge):
    """Bridge of ``model_type: glm4_moe``. mbridge takes one shared expert for any number, and biases whether they are there or not."""

    def _arguments(self) -> Arguments:
        config = self.hf_config
        return super()._arguments() | {
            "add_qkv_bias": config.attention_bias,
            "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
            **grouped_choice(config),
        }

    def _get_gptmodel_args(self) -> Arguments:
        return super()._get_gptmodel_args() | {"rotary_percent": self.hf_config.partial_rotary_factor}
