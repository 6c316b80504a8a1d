"""Llama and Mistral: dense. mbridge has the layout of Llama, which Mistral shares where its window is off (``sizes.refusals``)."""

from mbridge.models.llama import LLaMABridge

from tidemill.learner.megatron.bridges.local_layers import LocalLayers


class Llama(LocalLayers, LLaMABridge):
    """Bridge of ``model_type: llama``."""


class Mistral(Llama):
    """Bridge of ``model_type: mistral``."""
