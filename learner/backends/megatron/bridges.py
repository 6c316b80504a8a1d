"""The bridges of the model families, each with mbridge's layout of the family, by ``model_type`` of config.json.

Dense: Llama, Mistral (Llama's layout where its window is off, ``sizes.refusals``), Qwen2, Qwen3, GLM-4. With experts:
Mixtral, Qwen2-MoE, Qwen3-MoE, GLM-4.5 and 4.6, DeepSeek-V3.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.glm4moe import GLM4MoEBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.mixtral import MixtralBridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from transformers import AutoConfig

from tidemill.bus.system.functions import find_function
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.model_values import MTP_LAYERS, SCALING, in_older_keys
from tidemill.learner.backends.megatron.layers.attention import Group, PackedParams, PackedRotary
from tidemill.learner.backends.megatron.layers.dense import NormedAttention, NormedMLP
from tidemill.learner.backends.megatron.layers.experts import Mixture
from tidemill.learner.backends.megatron.layers.kernels import Arguments, Wanted
from tidemill.learner.backends.megatron.local_layers import Experts, LocalLayers
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.layout.sizes import FAMILIES, refusals


class WholeLinear(torch.nn.Linear):
    """A projection that every tensor-parallel rank has whole; with split sequences it sees this rank's tokens."""

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class LatentRotary(PackedRotary):
    """Rotary positions for latent attention, which drops the batch dimension of packed rows."""

    def forward(
        self, max_seq_len: PackedParams | int, offset: int = 0, packed_seq: bool = False, cp_group: Group | None = None
    ) -> Tensor:
        """Return the angles [T, 1, d] of a PackedRow, or of positions 0 .. max_seq_len - 1."""
        angles = super().forward(max_seq_len, offset, packed_seq, cp_group)
        return angles[:, 0] if isinstance(max_seq_len, PackedParams) else angles


class LatentYarn(YarnRotaryEmbedding):  # type: ignore[misc]
    """Rotary positions of YaRN for latent attention: stretched angles, with a scale for their cosines and sines."""

    def get_rotary_seq_len(self, *arguments: Any, **options: Any) -> Any:
        """Return the argument of ``forward``: for a packed row the row itself instead of its length."""
        if arguments and isinstance(arguments[-1], PackedParams):
            return arguments[-1]
        return super().get_rotary_seq_len(*arguments, **options)

    def forward(
        self, max_seq_len: PackedParams | int, offset: int = 0, packed_seq: bool = False, cp_group: Group | None = None
    ) -> tuple[Tensor, float]:
        """Return the angles [T, 1, d] of a PackedRow, or of positions 0 .. max_seq_len - 1, and the scale."""
        if not isinstance(max_seq_len, PackedParams):
            found: tuple[Tensor, float] = super().forward(max_seq_len, offset, packed_seq, cp_group)
            return found
        angles, scale = self.get_emb(max_seq_len.max_seqlen_q)
        return angles[max_seq_len.row.position_ids_T][:, 0], scale


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's multi-head latent attention with whole projections to the latents, for packed rows."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        with _without_transformer_engine():
            super().__init__(config, *arguments, **options)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
        self.linear_kv_down_proj = WholeLinear(
            config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim, config
        )
        self.rotary_pos_emb.__class__ = LatentYarn if config.rope_type == "yarn" else LatentRotary


@contextmanager
def _without_transformer_engine() -> Iterator[None]:
    # Megatron 0.16.1 compares with a class that is None where Transformer Engine is absent.
    had = multi_latent_attention.HAVE_TE
    multi_latent_attention.HAVE_TE = had and isinstance(multi_latent_attention.TELinear, type)
    try:
        yield
    finally:
        multi_latent_attention.HAVE_TE = had


def grouped_choice(hf_config: Any) -> Arguments:
    """Return Megatron's arguments for experts within the best groups (``n_group``), which mbridge ignores."""
    if hf_config.n_group == 1:
        return {}
    return {"moe_router_num_groups": hf_config.n_group, "moe_router_group_topk": hf_config.topk_group}


_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")


def yarn_arguments(rope: JsonMapping) -> Arguments:
    """Return the arguments of latent attention in Megatron for ``rope_parameters``; none without YaRN."""
    if rope["rope_type"] != "yarn":
        return {}
    values = {name: rope[name] for name in _YARN if name in rope}
    return {"rope_type": "yarn", "rotary_scaling_factor": rope["factor"], **values}


class Glm4MoE(Experts, GLM4MoEBridge):
    """``glm4_moe``. mbridge takes one shared expert for any number, and biases whether they are there or not."""

    def _arguments(self) -> Arguments:
        config = self.hf_config
        return super()._arguments() | {
            "add_qkv_bias": config.attention_bias,
            "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
            **grouped_choice(config),
        }

    def _get_gptmodel_args(self) -> Arguments:
        return super()._get_gptmodel_args() | {"rotary_percent": self.hf_config.partial_rotary_factor}


_LAYER = "model.layers.{layer_number}."


class Glm4(LocalLayers, Qwen2Bridge):
    """``glm4``, which mbridge does not have; gate and up projection are one tensor in the files already."""

    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
        **Qwen2Bridge._ATTENTION_MAPPING,
        "self_attention.post_norm.weight": [_LAYER + "post_self_attn_layernorm.weight"],
    }
    _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
        "mlp.linear_fc1.weight": [_LAYER + "mlp.gate_up_proj.weight"],
        "mlp.linear_fc2.weight": [_LAYER + "mlp.down_proj.weight"],
        "mlp.post_norm.weight": [_LAYER + "post_mlp_layernorm.weight"],
    }

    def _build_config(self) -> Any:
        return self._build_base_config(
            add_qkv_bias=self.hf_config.attention_bias, qk_layernorm=False, rotary_interleaved=True
        )

    def _spec(self, vp_stage: int | None) -> Any:
        spec = super()._spec(vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = NormedAttention
            layer.submodules.mlp.module = NormedMLP
        return spec

    def _get_gptmodel_args(self) -> Arguments:
        return super()._get_gptmodel_args() | {"rotary_percent": self.hf_config.partial_rotary_factor}


class Qwen3MoE(Experts, Qwen3MoEBridge):
    """Bridge of ``model_type: qwen3_moe``. mbridge ignores ``norm_topk_prob: false``, which changes the logits."""

    def _arguments(self) -> Arguments:
        return super()._arguments() | {"moe_router_pre_softmax": not self.hf_config.norm_topk_prob}


class Qwen3(LocalLayers, Qwen3Bridge):
    """Bridge of ``model_type: qwen3``."""


class Qwen2MoE(Experts, Qwen2MoEBridge):
    """``qwen2_moe``. mbridge leaves out the gate of the shared expert, and normalises always."""

    def _arguments(self) -> Arguments:
        return super()._arguments() | {
            "moe_shared_expert_gate": True,
            "moe_router_pre_softmax": not self.hf_config.norm_topk_prob,
            "add_qkv_bias": getattr(self.hf_config, "qkv_bias", True),
        }


class Qwen2(LocalLayers, Qwen2Bridge):
    """Bridge of ``model_type: qwen2``."""


class Mixtral(Experts, MixtralBridge):
    """Bridge of ``model_type: mixtral``. Its softmax is over the chosen experts; mbridge takes it over all of them."""

    def _arguments(self) -> Arguments:
        return super()._arguments() | {"moe_router_pre_softmax": False}


class Llama(LocalLayers, LLaMABridge):
    """Bridge of ``model_type: llama``."""


class Mistral(Llama):
    """Bridge of ``model_type: mistral``."""


_LATENT_NORM = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.(q|kv)_layernorm\.weight")


class DeepSeekV3(Experts, DeepseekV3Bridge):
    """``deepseek_v3``. mbridge ignores groups of experts, and needs Transformer Engine and bfloat16."""

    _FLASH_HEADS = False
    _SHARED_STATE_DICT_MAPPING: ClassVar[Mapping[str, list[str]]] = {}
    """Tensors that the layers for multi-token prediction share, which are not built."""

    def _build_base_config(self, **arguments: Any) -> Any:
        arguments["original_max_position_embeddings"] = arguments.pop("max_position_embeddings")
        del arguments["attention_backend"]
        arguments["mtp_num_layers"] = None
        # mbridge looks for the scaling under its name in transformers 4.
        arguments |= yarn_arguments(self.hf_config.rope_parameters)
        return super()._build_base_config(**arguments)  # type: ignore[misc]

    def _arguments(self) -> Arguments:
        return super()._arguments() | grouped_choice(self.hf_config)

    def _get_gptmodel_args(self) -> Arguments:
        config = self.hf_config  # attention has the rotary positions itself
        return {
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": config.rope_theta,
        }

    def _spec(self, vp_stage: int | None) -> Any:
        spec = super()._spec(vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = LatentAttention
        return spec

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        if norm := _LATENT_NORM.fullmatch(name):
            return [f"model.layers.{norm[1]}.self_attn.{norm[2]}_a_layernorm.weight"]
        return super()._weight_name_mapping_mcore_to_hf(name)


_BRIDGES: Mapping[str, type[LocalLayers]] = {
    "deepseek_v3": DeepSeekV3,
    "glm4": Glm4,
    "glm4_moe": Glm4MoE,
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen2_moe": Qwen2MoE,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3MoE,
}
assert sorted(_BRIDGES) == sorted(FAMILIES)  # FAMILIES is for checks that must not import torch


def open_bridge(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    parallel: Parallel,
    wanted: Wanted | None = None,
    mixture: Mixture | None = None,
    own: str = "",
) -> Any:
    """Return the bridge for a Hugging Face model directory.

    It has ``build(pre_process, post_process, vp_stage) -> GPTModel``, ``load(chunks, directory)`` and
    ``export(chunks)``. ``wanted``, ``mixture``: settings about kernels and experts; None = the defaults. ``own``:
    import path of the bridge's class; empty = that of the model type. Raises ConfigRefused for a model type without a
    bridge, a value that Megatron would compute differently, sizes that the parallel layout cannot split, or a kernel
    that cannot work here; ValueError for an import path that leads to no bridge.
    """
    bridge_class = None if not own else _own(own)  # its module may register the model type in transformers
    hf_config = _config(model_dir)
    for refused in refusals(
        hf_config.to_dict(), where=f"{model_dir}/config.json", own_bridge=bridge_class is not None, **parallel.sizes
    ):
        raise refused
    bridge = (bridge_class or _BRIDGES[hf_config.model_type])(
        hf_config,
        dtype,
        wanted or Wanted(),
        sequence_parallel=parallel.sequence_parallel,
        edge_layers=parallel.edge_layers,
        mixture=mixture or Mixture(),
    )
    assert isinstance(bridge, LLMBridge)
    return bridge


def _own(path: str) -> type[LocalLayers]:
    bridge_class = find_function(path, "learner.bridge", want="module:Class")
    if not (
        isinstance(bridge_class, type) and issubclass(bridge_class, LocalLayers) and issubclass(bridge_class, LLMBridge)
    ):
        want = (
            "a class with the bases LocalLayers (learner/backends/megatron/local_layers.py) and one of "
            "mbridge's bridges, in this order"
        )
        got = getattr(bridge_class, "__mro__", type(bridge_class).__name__)
        raise ValueError(f"learner.bridge: want {want}, got {path!r}: {got}")
    return bridge_class


def _config(model_dir: Path) -> Any:
    """Return the configuration of a model directory, with the names of transformers 4 too, which mbridge reads.

    Raises ConfigRefused for a model type unknown to transformers.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir)
        for name, value in in_older_keys(config.to_dict()).items():
            if name != SCALING:  # in transformers 5 another name of rope_parameters
                setattr(config, name, value)
        if hasattr(config, MTP_LAYERS):  # they stay in the files (trainer/exports.py)
            setattr(config, MTP_LAYERS, 0)
        return config
    except ValueError as error:
        want = (
            "a model that transformers knows; the module of learner.bridge may register its configuration "
            "(AutoConfig.register)"
        )
        raise ConfigRefused(f"{model_dir}/config.json", want, str(error).splitlines()[0]) from error
