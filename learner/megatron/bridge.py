"""Hugging Face models as Megatron-core models: configuration, weights in, weights out.

``mbridge`` maps names and layouts. Its layer spec needs Transformer Engine, so these subclasses use Megatron's own layers with
attention of our own instead, and map the two norms of a layer that Transformer Engine would fuse into the linears.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from transformers import AutoConfig

from learner.megatron.attention import CORE_ATTENTION, PackedRotary
from learner.megatron.kernels import Kernels, Wanted, chosen
from learner.megatron.lora import is_adapter
from learner.megatron.output_layer import OutputLayer
from learner.megatron.sizes import FAMILIES, refusals, rope_arguments


class _LocalLayers:
    """Mixin for mbridge's classes, to be the first base class. Pipeline parallel size 1."""

    _NORMS: ClassVar[Mapping[str, str]] = {
        "input_layernorm.weight": "model.layers.{}.input_layernorm.weight",
        "pre_mlp_layernorm.weight": "model.layers.{}.post_attention_layernorm.weight",
    }

    _DIRECT_MAPPING: dict[str, str]

    def __init__(self, hf_config: Any, dtype: torch.dtype, wanted: Wanted) -> None:
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)  # mbridge edits it in place, which would change the class's
        super().__init__(hf_config, dtype=dtype)  # type: ignore[call-arg]
        # calculate_per_token_loss: the schedule then divides the loss by nothing; it has its denominators already (``aggregation``).
        # masked_softmax_fusion and batch_p2p_sync are for CUDA. deterministic_mode: with it the embedding's backward pass is a kernel that
        # is deterministic on CUDA; the rank has set torch's switch from ``learner.deterministic`` before.
        self.set_extra_args(  # type: ignore[attr-defined]
            use_cpu_initialization=not torch.cuda.is_available(),
            sequence_parallel=False,
            masked_softmax_fusion=False,
            batch_p2p_sync=False,
            calculate_per_token_loss=True,
            deterministic_mode=torch.are_deterministic_algorithms_enabled(),
            attention_dropout=0.0,
        )
        config = self.config  # type: ignore[attr-defined]
        self.kernels: Kernels = chosen(wanted, dtype=dtype, head_size=config.kv_channels)
        self.set_extra_args(**self.kernels.arguments())  # type: ignore[attr-defined]

    def _adjust_mapping_for_shared_weights(self) -> None:
        if self.hf_config.tie_word_embeddings:  # type: ignore[attr-defined]
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        for suffix, hf_name in self._NORMS.items():
            if name.startswith("decoder.layers.") and name.endswith("." + suffix):
                return [hf_name.format(name.split(".")[2])]
        return super()._weight_name_mapping_mcore_to_hf(name)  # type: ignore[misc,no-any-return]

    def build(self) -> GPTModel:
        """Return the model with random weights. They are initialised because Megatron marks the split weights while it does that."""
        config = self.config  # type: ignore[attr-defined]
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        spec.submodules.self_attention.submodules.core_attention = CORE_ATTENTION[self.kernels.attention]
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            share_embeddings_and_output_weights=self.hf_config.tie_word_embeddings,  # type: ignore[attr-defined]
            **self._get_gptmodel_args(),
        )
        # The same data, with other behaviour: support for packed rows, and hidden states instead of logits.
        model.rotary_pos_emb.__class__ = PackedRotary
        model.output_layer.__class__ = OutputLayer
        return model

    def _get_gptmodel_args(self) -> dict[str, Any]:
        hf_config = self.hf_config  # type: ignore[attr-defined]
        return {
            "vocab_size": hf_config.vocab_size,
            "max_sequence_length": hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": hf_config.rope_theta,
            **rope_arguments(getattr(hf_config, "rope_scaling", None)),
        }

    @torch.no_grad()
    def export(self, model: GPTModel) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights under their Hugging Face names, without adapters; collective over the tensor-parallel ranks.

        Without tensor parallelism the tensors are views on the live weights: copy those that must outlive the next step.
        """
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                continue
            whole = parameter.detach()
            if self.mpu.tp_size > 1 and getattr(parameter, "tensor_model_parallel", False):  # type: ignore[attr-defined]
                parts = [torch.empty_like(whole) for _ in range(self.mpu.tp_size)]  # type: ignore[attr-defined]
                dist.all_gather(parts, whole.contiguous(), group=self.mpu.tp_group)  # type: ignore[attr-defined]
                whole = self._weight_merge_across_tp(name, parts, parameter)  # type: ignore[attr-defined]
            names, tensors = self._weight_to_hf_format(name, whole)  # type: ignore[attr-defined]
            yield from zip(names, tensors, strict=True)


class _Qwen3(_LocalLayers, Qwen3Bridge):
    pass


class _Qwen2(_LocalLayers, Qwen2Bridge):
    pass


class _Llama(_LocalLayers, LLaMABridge):
    pass


_BRIDGES: Mapping[str, type[_LocalLayers]] = {"qwen3": _Qwen3, "qwen2": _Qwen2, "llama": _Llama}
"""Bridges by ``model_type`` of the Hugging Face config."""
assert sorted(_BRIDGES) == sorted(FAMILIES)  # FAMILIES is for checks that must not import torch


def open_bridge(model_dir: Path, *, dtype: torch.dtype, tensor_parallel: int, wanted: Wanted | None = None) -> Any:
    """Return the bridge for a Hugging Face model directory: ``build() -> GPTModel``, ``load_weights([model], dir)``, ``export(model)``.

    ``wanted``: settings about kernels; None = the defaults. Raises ConfigRefused for a model type without a bridge, sizes that tensor
    parallelism cannot split, or a kernel that cannot work here.
    """
    hf_config = AutoConfig.from_pretrained(model_dir)
    for refused in refusals(hf_config.to_dict(), where=f"{model_dir}/config.json", tensor_parallel=tensor_parallel):
        raise refused
    bridge = _BRIDGES[hf_config.model_type](hf_config, dtype, wanted or Wanted())
    assert isinstance(bridge, LLMBridge)
    return bridge
