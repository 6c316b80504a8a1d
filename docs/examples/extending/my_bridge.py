"""A bridge for a family that the learner lacks: ``model_type: pond``, which is Qwen2 with other names in its files."""

from collections.abc import Mapping
from typing import ClassVar

from mbridge.models.qwen2 import Qwen2Bridge
from transformers import AutoConfig, Qwen2Config

from tidemill.learner import LocalLayers

LAYER = "model.layers.{layer_number}."


class PondConfig(Qwen2Config):
    """Configuration of ``model_type: pond``."""

    model_type = "pond"


AutoConfig.register("pond", PondConfig, exist_ok=True)  # transformers does not know the family


class Pond(LocalLayers, Qwen2Bridge):
    """Maps Megatron's names to those of the files. Layers, configuration and splits are Qwen2's."""

    _NORMS: ClassVar[Mapping[str, str]] = {
        "input_layernorm.weight": "model.layers.{}.norm_before_attention.weight",
        "pre_mlp_layernorm.weight": "model.layers.{}.norm_before_mlp.weight",
    }
    _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
        "mlp.linear_fc1.weight": [LAYER + "mlp.gate_and_up.weight"],
        "mlp.linear_fc2.weight": [LAYER + "mlp.down.weight"],
    }
