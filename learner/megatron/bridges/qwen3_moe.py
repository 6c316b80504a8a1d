"""Qwen3-MoE: routed experts, none shared."""

from mbridge.models.qwen3moe import Qwen3MoEBridge

from tidemill.learner.megatron.bridges.experts import Experts
from tidemill.learner.megatron.layers.kernels import Arguments


class Qwen3MoE(Experts, Qwen3MoEBridge):
    """Bridge of ``model_type: qwen3_moe``. mbridge ignores ``norm_topk_prob: false``, which changes the logits."""

    def _arguments(self) -> Arguments:
        return super()._arguments() | {"moe_router_pre_softmax": not self.hf_config.norm_topk_prob}
