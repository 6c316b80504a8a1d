"""Qwen3: dense. mbridge has its layout."""

from mbridge.models.qwen3 import Qwen3Bridge

from tidemill.learner.megatron.bridges.local_layers import LocalLayers


class Qwen3(LocalLayers, Qwen3Bridge):
    """Bridge of ``model_type: qwen3``."""
