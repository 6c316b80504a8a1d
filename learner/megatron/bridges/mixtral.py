"""Mixtral: routed experts in every layer."""

from mbridge.models.mixtral import MixtralBridge

from tidemill.learner.megatron.bridges.experts import Experts
from tidemill.learner.megatron.layers.kernels import Arguments


class Mixtral(Experts, MixtralBridge):
    """Bridge of ``model_type: mixtral``. Its softmax is over the chosen experts; mbridge takes it over all of them."""

    def _arguments(self) -> Arguments:
        return super()._arguments() | {"moe_router_pre_softmax": False}
