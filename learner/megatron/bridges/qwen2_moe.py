"""Qwen2-MoE: routed experts and a shared one with a gate."""

from mbridge.models.qwen2moe import Qwen2MoEBridge

from tidemill.learner.megatron.bridges.experts import Experts
from tidemill.learner.megatron.layers.kernels import Arguments


class Qwen2MoE(Experts, Qwen2MoEBridge):
    """Bridge of ``model_type: qwen2_moe``. mbridge leaves out the gate of the shared expert, and always normalises as Qwen1.5-MoE does."""

    def _arguments(self) -> Arguments:
        return super()._arguments() | {
            "moe_shared_expert_gate": True,
            "moe_router_pre_softmax": not self.hf_config.norm_topk_prob,
            "add_qkv_bias": getattr(self.hf_config, "qkv_bias", True),
        }
