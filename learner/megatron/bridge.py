"""Hugging Face models as Megatron-core models: configuration, weights in, weights out.

``mbridge`` maps names and layouts. Its layer spec needs Transformer Engine, so these subclasses use Megatron's own layers with
attention of our own instead, and map the two norms of a layer that Transformer Engine would fuse into the linears.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from mbridge.core.llm_bridge import LLMBridge
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor
from transformers import AutoConfig

from learner.megatron.attention import CORE_ATTENTION, PackedRotary
from learner.megatron.kernels import Kernels, Wanted, chosen
from learner.megatron.norms import Norm
from learner.megatron.output_layer import OutputLayer
from learner.megatron.sizes import FAMILIES, refusals, rope_arguments


class _LocalLayers:
    """Mixin for mbridge's classes, to be the first base class.

    A chunk is the model, or the layers of one stage of a pipeline; every rank has one or (virtual stages) several.
    """

    _NORMS: ClassVar[Mapping[str, str]] = {
        "input_layernorm.weight": "model.layers.{}.input_layernorm.weight",
        "pre_mlp_layernorm.weight": "model.layers.{}.post_attention_layernorm.weight",
    }

    _DIRECT_MAPPING: dict[str, str]

    def __init__(self, hf_config: Any, dtype: torch.dtype, wanted: Wanted, *, sequence_parallel: bool = False) -> None:
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)  # mbridge edits it in place, which would change the class's
        super().__init__(hf_config, dtype=dtype)  # type: ignore[call-arg]
        # calculate_per_token_loss: the schedule then divides the loss by nothing; it has its denominators already (``aggregation``).
        # masked_softmax_fusion and batch_p2p_sync are for CUDA. deterministic_mode: with it the embedding's backward pass is a kernel that
        # is deterministic on CUDA; the rank has set torch's switch from ``learner.deterministic`` before.
        self.set_extra_args(  # type: ignore[attr-defined]
            use_cpu_initialization=not torch.cuda.is_available(),
            sequence_parallel=sequence_parallel,
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

    def build(self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
        """Return a chunk with random weights. They are initialised because Megatron marks the split weights while it does that.

        ``pre_process``: it has the embedding. ``post_process``: it has the last norm and the output layer. ``vp_stage``: the virtual
        stage, with which Megatron finds its layers; None = there is one chunk a rank.
        """
        config = self.config  # type: ignore[attr-defined]
        model = GPTModel(
            config=config,
            transformer_layer_spec=self._layers(config, vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            share_embeddings_and_output_weights=self.hf_config.tie_word_embeddings,  # type: ignore[attr-defined]
            **self._get_gptmodel_args(),
        )
        # The same data, with other behaviour: support for packed rows, and hidden states instead of logits.
        model.rotary_pos_emb.__class__ = PackedRotary
        if post_process:
            model.output_layer.__class__ = OutputLayer
        return model

    def _layers(self, config: Any, vp_stage: int | None) -> TransformerBlockSubmodules:
        """Return the layers of a chunk, with attention and norms of our own."""
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        attention.core_attention = CORE_ATTENTION[self.kernels.attention]
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
        return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=Norm)

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
    def load(self, chunks: Sequence[GPTModel], directory: Path) -> None:
        """Load this rank's part of the weights from the files of a Hugging Face directory; no collective, one weight at a time.

        Raises OSError, and KeyError or ValueError for a weight that is not in the files.
        """
        files = SafeTensorIO(str(directory))
        for chunk in chunks:
            tensors = chunk.state_dict()
            for name, of_model in self._names(chunk).items():
                wanted = self._weight_name_mapping_mcore_to_hf(of_model)
                found = files.load_some_hf_weight(wanted)
                whole = self._weight_to_mcore_format(of_model, [found[one] for one in wanted])  # type: ignore[attr-defined]
                mine = self._weight_split_across_tp(of_model, whole, tensors[name], self.mpu.tp_size)[self.mpu.tp_rank]  # type: ignore[attr-defined]
                tensors[name].copy_(mine)

    @torch.no_grad()
    def export(self, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights of these chunks under their Hugging Face names; collective over the tensor-parallel ranks.

        Without tensor parallelism the tensors are views on the live weights: copy those that must outlive the next step.
        """
        for chunk in chunks:
            names = self._names(chunk)
            for name, parameter in chunk.named_parameters():
                if getattr(parameter, "shared", False):
                    continue  # the last stage's copy of a tied embedding, which the first stage yields
                whole = parameter.detach()
                if self.mpu.tp_size > 1 and getattr(parameter, "tensor_model_parallel", False):  # type: ignore[attr-defined]
                    parts = [torch.empty_like(whole) for _ in range(self.mpu.tp_size)]  # type: ignore[attr-defined]
                    dist.all_gather(parts, whole.contiguous(), group=self.mpu.tp_group)  # type: ignore[attr-defined]
                    whole = self._weight_merge_across_tp(names[name], parts, parameter)  # type: ignore[attr-defined]
                hf_names, tensors = self._weight_to_hf_format(names[name], whole)  # type: ignore[attr-defined]
                yield from zip(hf_names, tensors, strict=True)

    def _names(self, chunk: GPTModel) -> dict[str, str]:
        """Return the names of the whole model's weights, by those of the chunk, which count its own layers."""
        names: dict[str, str] = self._weight_name_mapping_mcore_local_to_global(chunk)  # type: ignore[attr-defined]
        return names


class _Qwen3(_LocalLayers, Qwen3Bridge):
    pass


class _Qwen2(_LocalLayers, Qwen2Bridge):
    pass


class _Llama(_LocalLayers, LLaMABridge):
    pass


_BRIDGES: Mapping[str, type[_LocalLayers]] = {"qwen3": _Qwen3, "qwen2": _Qwen2, "llama": _Llama}
"""Bridges by ``model_type`` of the Hugging Face config."""
assert sorted(_BRIDGES) == sorted(FAMILIES)  # FAMILIES is for checks that must not import torch


def open_bridge(
    model_dir: Path, *, dtype: torch.dtype, sizes: Mapping[str, int], wanted: Wanted | None = None, sequence_parallel: bool = False
) -> Any:
    """Return the bridge for a Hugging Face model directory.

    It has ``build(pre_process, post_process, vp_stage) -> GPTModel``, ``load(chunks, directory)`` and ``export(chunks)``.
    ``sizes``: those of ``sizes.refusals``. ``wanted``: settings about kernels; None = the defaults. Raises ConfigRefused for a model type
    without a bridge, sizes that the ranks cannot divide, or a kernel that cannot work here.
    """
    hf_config = AutoConfig.from_pretrained(model_dir)
    for refused in refusals(hf_config.to_dict(), where=f"{model_dir}/config.json", **sizes):
        raise refused
    bridge = _BRIDGES[hf_config.model_type](hf_config, dtype, wanted or Wanted(), sequence_parallel=sequence_parallel)
    assert isinstance(bridge, LLMBridge)
    return bridge
