"""The choice of kernels for the model on one device: attention, recomputation, activation, experts, log-probs, heads.

Each choice is a pure function that also gives its reason; ``chosen`` looks at this machine once and logs the result.
"""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.learner.kernels.choices import (
    FLASH_CAPABILITY,
    SDPA,
    Choice,
    Site,
    choose,
    choose_attention,
    choose_own_kernels,
    this_site,
    triton_obstacle,
)
from tidemill.learner.settings.backends import refusals
from tidemill.learner.settings.config import LearnerConfig

log = logging.getLogger(__name__)

Arguments = dict[str, Any]  # keyword arguments of Megatron's configuration and model
GROUPED_MULTIPLE = 8
"""Number that must divide the sizes of experts for torch's grouped product on CUDA: 16 bytes in bfloat16."""
RECOMPUTED_MODULES = ("mlp",)
"""Modules of a layer that ``selective`` computes again. Megatron 0.16.1 offers ``layernorm`` too, but that needs
Transformer Engine (its ``CheckpointWithoutOutput`` asks for the FP8 state whatever the setting), and ``core_attn``
keeps nothing that flash attention would not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The learner's settings about kernels."""

    attention: str = "auto"
    recompute: str = "none"
    fused_activation: str = "auto"
    grouped_experts: str = "auto"
    fused_log_probs: str = "auto"
    fused_rotary: str = "auto"
    megatron: JsonMapping = field(default_factory=dict)
    """Megatron's own arguments."""

    @classmethod
    def of(cls, learner: LearnerConfig) -> "Wanted":
        """Return the kernels that a configuration wants."""
        return cls(
            attention=learner.attention,
            recompute=learner.recompute,
            fused_activation=learner.fused_activation,
            grouped_experts=learner.grouped_experts,
            fused_log_probs=learner.fused_log_probs,
            fused_rotary=learner.fused_rotary,
            megatron=learner.megatron,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of a model, after the choice."""

    attention: str = SDPA
    recompute: str = "none"
    fused_activation: bool = False
    grouped_experts: bool = False
    fused_log_probs: bool = False
    fused_rotary: bool = False
    """For the norms of queries and keys, too."""
    megatron: JsonMapping = field(default_factory=dict)

    def arguments(self) -> Arguments:
        """Return the fields of Megatron's TransformerConfig that these kernels and ``learner.megatron`` set."""
        return {**recompute_arguments(self.recompute), "bias_activation_fusion": self.fused_activation, **self.megatron}


def choose_fused_activation(setting: str, site: Site) -> Choice:
    """Return ``fused`` or ``separate``, as ``choose``. Megatron's fused SwiGLU is compiled by torch.compile."""
    # It is compiled first for the length of the first row, then for any length. A resumed run begins with another row.
    doubt = "learner.deterministic: a kernel for one length may round differently from that for any length"
    kernel = Choice("fused", "CUDA with torch.compile")
    obstacle = triton_obstacle(site)
    return choose(
        "learner.fused_activation", setting, kernel, "separate", obstacle, doubt if site.deterministic else ""
    )


def choose_grouped_experts(setting: str, site: Site) -> Choice:
    """Return ``grouped`` or ``sequential``, as ``choose``.

    Source: ``torch.nn.functional.grouped_mm`` of torch 2.13: on CUDA it takes bfloat16 from Ampere on, and rows of a
    multiple of 16 bytes.
    """
    kernel = Choice("grouped", "one product for all experts of a rank")
    return choose("learner.grouped_experts", setting, kernel, "sequential", _grouping_obstacle(site))


def _grouping_obstacle(site: Site) -> str:
    if not site.grouped:
        return f"torch {torch.__version__} has no grouped_mm"
    if site.device != "cuda":
        return ""
    if site.dtype != torch.bfloat16 or site.capability < FLASH_CAPABILITY:
        return "on CUDA the grouped product needs bfloat16 and compute capability 8.0"
    if any(size % GROUPED_MULTIPLE for size in site.expert_sizes):
        return f"experts of sizes {site.expert_sizes}: the grouped product wants multiples of {GROUPED_MULTIPLE}"
    return ""


def recompute_arguments(recompute: str) -> Arguments:
    """Return Megatron's arguments for ``none | selective | full``: nothing, the MLP of each layer, or each layer."""
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(RECOMPUTED_MODULES)}
    return {}


def chosen(config: Wanted, *, dtype: torch.dtype, head_size: int, expert_sizes: tuple[int, ...] = ()) -> Kernels:
    """Return the kernels for this machine, and log each with its reason. ConfigRefused for one that cannot work."""
    for refused in refusals(config.megatron):
        raise refused
    site = replace(this_site(dtype, head_size), expert_sizes=expert_sizes)
    choices = {
        "attention": choose_attention(config.attention, site),
        "activation": choose_fused_activation(config.fused_activation, site),
    }
    if expert_sizes:
        choices["experts"] = choose_grouped_experts(config.grouped_experts, site)
    choices["log-probs"] = choose_own_kernels("learner.fused_log_probs", config.fused_log_probs, site)
    choices["rotary"] = choose_own_kernels("learner.fused_rotary", config.fused_rotary, site)
    for name, choice in choices.items():
        log.info("kernel of=%s chosen=%s reason=%s", name, choice.kernel, choice.reason)
    return Kernels(
        attention=choices["attention"].kernel,
        recompute=config.recompute,
        fused_activation=choices["activation"].kernel == "fused",
        grouped_experts="experts" in choices and choices["experts"].kernel == "grouped",
        fused_log_probs=choices["log-probs"].kernel == "fused",
        fused_rotary=choices["rotary"].kernel == "fused",
        megatron=config.megatron,
    )
