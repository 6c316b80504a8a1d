"""Qwen2: dense. mbridge has its layout."""

from mbridge.models.qwen2 import Qwen2Bridge

from tidemill.learner.megatron.bridges.local_layers import LocalLayers


class Qwen2(LocalLayers, Qwen2Bridge):
    """Bridge of ``model_type: qwen2``."""
