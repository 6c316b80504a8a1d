"""Common part of the families with a mixture of experts.

Experts are spread over the expert-parallel ranks and never split by tensor parallelism. Their gradients are reduced in
buffers of their own, over the ranks with the same experts: in the dense buffers, tensor-parallel ranks would each keep
the gradient of their own tokens.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from tidemill.bus.wire.model_values import sparse_layers
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.megatron.bridges.local_layers import LocalLayers
from tidemill.learner.megatron.layers.experts import GroupedExperts, Router, ScoreRouter
from tidemill.learner.megatron.layers.kernels import Arguments, Wanted

EXPERTS = ".mlp.experts."  # part of the name of every weight of a routed expert
_LOCAL_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_NUMBERED = re.compile(r"weight(\d+)$")
_DENSE_MLP = re.compile(r"decoder\.layers\.(\d+)\.mlp\.linear_fc([12])\.weight")


class Experts(LocalLayers):
    """Mixin for mbridge's classes of mixtures of experts, to be the first base class."""

    _DENSE: ClassVar[Mapping[str, tuple[str, ...]]] = {"1": ("gate", "up"), "2": ("down",)}

    def _arguments(self) -> Arguments:
        # The balancing loss is off and the bias fixed unless settings change that: both move the policy beside its
        # objective.
        mixture = self.mixture
        return super()._arguments() | {
            "moe_grouped_gemm": False,
            "moe_shared_expert_overlap": False,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "aux_loss" if mixture.aux_loss_coef else "none",
            "moe_aux_loss_coeff": mixture.aux_loss_coef,
            "moe_router_bias_update_rate": mixture.bias_update_rate,
            "moe_enable_routing_replay": mixture.replay,
            "moe_layer_freq": [int(sparse) for sparse in sparse_layers(self.hf_config.to_dict())],
            "bias_dropout_fusion": False,
        }

    def _possible(self, wanted: Wanted) -> Wanted:
        # For the experts of a rank, each with another number of tokens, the fused activation would be compiled anew
        # again and again.
        if wanted.fused_activation == "always":
            raise ConfigRefused("learner.fused_activation", "auto or never for a model with experts", "always")
        return replace(super()._possible(wanted), fused_activation="never")

    @property
    def _expert_sizes(self) -> tuple[int, ...]:
        return int(self.config.hidden_size), int(self.config.moe_ffn_hidden_size)

    def _kernel_arguments(self) -> Arguments:
        """Return the fields that the kernels set. With experts, ``selective`` has another name for its part."""
        # One field for all layers, and the MLP of an expert has no module for its activation.
        arguments = super()._kernel_arguments() | {"use_te_activation_func": False}
        if self.kernels.recompute == "selective":
            arguments["recompute_modules"] = [*arguments["recompute_modules"], "moe"]
        return arguments

    def build(self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
        """Return the stage's layers as ``LocalLayers`` does, with the experts marked for buffers of their own."""
        model = super().build(pre_process, post_process, vp_stage)
        for name, parameter in model.named_parameters():
            if EXPERTS in name:
                parameter.allreduce = False
        return model

    def _spec(self, vp_stage: int | None) -> Any:
        spec = super()._spec(vp_stage)
        for layer in spec.layer_specs:
            if hasattr(layer.submodules.mlp.submodules, "router"):
                layer.submodules.mlp.submodules.router = self._router
                if self.kernels.grouped_experts:
                    layer.submodules.mlp.submodules.experts.module = GroupedExperts
        return spec

    @property
    def _router(self) -> type[Router]:
        by_score = self.config.moe_router_score_function == "sigmoid" and not self.hf_config.norm_topk_prob
        return ScoreRouter if by_score else Router

    def _whole_name(self, chunk: GPTModel, name: str) -> str:
        """Return the name in the whole model; of an expert the one that mbridge has for grouped experts."""
        first = self._experts_per_rank * self.mpu.ep_rank
        return _LOCAL_EXPERT.sub(
            lambda match: f"experts.{match[2]}.weight{int(match[1]) + first}", super()._whole_name(chunk, name)
        )

    @property
    def _experts_per_rank(self) -> int:
        return int(self.config.num_moe_experts) // int(self.mpu.ep_size)

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        if dense := _DENSE_MLP.fullmatch(name):
            return [f"model.layers.{dense[1]}.mlp.{part}_proj.weight" for part in self._DENSE[dense[2]]]
        return super()._weight_name_mapping_mcore_to_hf(name)

    def _split(self, name: str) -> tuple[int, int]:
        return (1, 0) if EXPERTS in name else super()._split(name)

    def _gathered(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        if EXPERTS not in name:
            yield from super()._gathered(name, weight)
            return
        if self.mpu.ep_size == 1:
            yield name, weight.detach()
            return
        # The same expert of each rank, one round at a time: no rank has more than one such round beside its own
        # weights.
        parts = [torch.empty_like(weight) for _ in range(self.mpu.ep_size)]
        dist.all_gather(parts, weight.detach().contiguous(), group=self.mpu.ep_group)
        match = _NUMBERED.search(name)
        assert match is not None
        mine = int(match[1]) % self._experts_per_rank
        for rank, part in enumerate(parts):
            yield f"{name[: match.start()]}weight{rank * self._experts_per_rank + mine}", part
