"""A family that transformers lacks: ``model_type: brook``, which is Qwen2 with a gate behind the attention.

``learner.family: my_family:FAMILY``. Every process that opens the model imports this module, so the classes that it
registers are those of the learner and of the built-in engine.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from tidemill.learner import Family


class BrookConfig(Qwen2Config):
    """Configuration of ``model_type: brook``."""

    model_type = "brook"


class BrookAttention(Qwen2Attention):
    """Attention whose output passes a gate, which the token's own hidden state opens."""

    def __init__(self, config: BrookConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Return the gated output, and the weights of the attention if they were computed."""
        output, weights = super().forward(hidden_states, *args, **kwargs)
        return output * self.gate(hidden_states).sigmoid(), weights


class BrookForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with these layers. Its attention is chosen by ``attn_implementation``, by which the learner packs rows."""

    config_class = BrookConfig

    def __init__(self, config: BrookConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = BrookAttention(config, number)
        self.post_init()


AutoConfig.register("brook", BrookConfig, exist_ok=True)
AutoModelForCausalLM.register(BrookConfig, BrookForCausalLM, exist_ok=True)

FAMILY = Family()
