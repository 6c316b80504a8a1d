"""Common part of all families: configuration, layers, weights from Hugging Face files and back to Hugging Face names.

mbridge maps names and layouts. Its layer spec needs Transformer Engine, so this mixin uses Megatron's own layers with
our attention and norms, and maps the two norms that Transformer Engine would fuse into the linears.

Experts are spread over the expert-parallel ranks and never split by tensor parallelism. Their gradients are reduced in
buffers of their own, over the ranks with the same experts: in the dense buffers, tensor-parallel ranks would each keep
the gradient of their own tokens.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tidemill.bus.wire.model_values import sparse_layers
from tidemill.learner.backends.megatron.layers.attention import (
    CORE_ATTENTION,
    FusedRotary,
    PackedRotary,
    SDPACoreAttention,
)
from tidemill.learner.backends.megatron.layers.dense import FusedHeadNorm, GatedSilu, Norm, OutputLayer
from tidemill.learner.backends.megatron.layers.experts import GroupedExperts, Mixture, Router, ScoreRouter
from tidemill.learner.backends.megatron.layers.kernels import Arguments, Kernels, Wanted, chosen
from tidemill.learner.backends.megatron.layers.lora import is_adapter
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.choices import CUDNN, SDPA, VARLEN
from tidemill.learner.layout.sizes import rope_arguments

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"


class ModelFiles:
    """The safetensors files of a model directory. Files are opened when a tensor of theirs is read, and stay open."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigRefused for a directory without weights."""
        self._directory = directory
        self._opened: dict[str, Any] = {}
        self._file_of = self._index()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, on the CPU. Raises ConfigRefused when there is none of this name, or its file is damaged."""
        if name not in self._file_of:
            raise ConfigRefused(str(self._directory), f"a tensor {name}", "none")
        try:
            tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigRefused(
                str(self._directory / self._file_of[name]), f"a safetensors file with {name}", str(error)
            ) from error
        return tensor

    def _index(self) -> dict[str, str]:
        if (self._directory / INDEX).is_file():
            weight_map: dict[str, str] = json.loads((self._directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return weight_map
        files = sorted(path.name for path in self._directory.glob("*.safetensors"))
        if not files:
            raise ConfigRefused(str(self._directory), "weights in *.safetensors", "no such file")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (not a dict)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self._directory / file, framework="pt", device="cpu")
        return self._opened[file]


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EDGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_NORM_NAMES = ("q_layernorm", "k_layernorm", "kv_layernorm")


class LocalLayers:
    """Mixin for mbridge's classes, to be the first base class."""

    _NORMS: ClassVar[Mapping[str, str]] = {
        "input_layernorm.weight": "model.layers.{}.input_layernorm.weight",
        "pre_mlp_layernorm.weight": "model.layers.{}.post_attention_layernorm.weight",
    }
    """Hugging Face names of a layer's norms, by the end of Megatron's."""
    _FLASH_HEADS = True
    """True where keys and values have heads of one size, as torch's flash attention needs."""

    _DIRECT_MAPPING: dict[str, str]
    dtype: torch.dtype | None
    config: Any
    hf_config: Any
    mpu: Any

    def __init__(
        self,
        hf_config: Any,
        dtype: torch.dtype,
        wanted: Wanted,
        *,
        sequence_parallel: bool = False,
        edge_layers: tuple[int, int] = (0, 0),
        mixture: Mixture | None = None,
    ) -> None:
        """``edge_layers``: of the first and of the last stage of a pipeline; 0 = as many as each other stage."""
        self.mixture = mixture or Mixture()
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)  # mbridge edits it in place, which would change the class's
        if getattr(hf_config, "head_dim", 0) is None:  # mbridge divides by it
            hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
        super().__init__(hf_config, dtype=dtype)  # type: ignore[call-arg]
        edges = dict(zip(_EDGES, (layers or None for layers in edge_layers), strict=True))
        self.set_extra_args(**self._arguments(), **edges, sequence_parallel=sequence_parallel)  # type: ignore[attr-defined]
        self.kernels: Kernels = chosen(
            self._possible(wanted), dtype=dtype, head_size=self.config.kv_channels, expert_sizes=self._expert_sizes
        )
        self.set_extra_args(**self._kernel_arguments())  # type: ignore[attr-defined]

    def _arguments(self) -> Arguments:
        """Return the fields of Megatron's TransformerConfig that are set for every model of the class."""
        # calculate_per_token_loss: the schedule then divides the loss by nothing; it has its denominators already
        # (``aggregation``). masked_softmax_fusion and batch_p2p_sync are for CUDA. deterministic_mode: with it the
        # embedding's backward pass is a kernel that is deterministic on CUDA; the rank has set torch's switch from
        # ``learner.deterministic`` before.
        return {
            "use_cpu_initialization": not torch.cuda.is_available(),
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "batch_p2p_sync": False,
            "calculate_per_token_loss": True,
            "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
            "attention_dropout": 0.0,
        }

    def _possible(self, wanted: Wanted) -> Wanted:
        """Return the settings that the family has a use for. Raises ConfigRefused for a demand it cannot meet."""
        if self._FLASH_HEADS:
            return wanted
        if wanted.attention in (VARLEN, CUDNN):
            want, got = (
                "sdpa or auto",
                f"{wanted.attention}: keys and values of {self.hf_config.model_type} have heads of different sizes",
            )
            raise ConfigRefused("learner.attention", want, got)
        if wanted.fused_rotary == "always":
            got = f"always: the attention of {self.hf_config.model_type} turns a part of its queries and keys itself"
            raise ConfigRefused("learner.fused_rotary", "auto or never", got)
        return replace(wanted, attention=SDPA, fused_rotary="never")

    @property
    def _expert_sizes(self) -> tuple[int, ...]:
        """Sizes of an expert's inputs and outputs; empty for a model without experts."""
        return ()

    def _kernel_arguments(self) -> Arguments:
        # Megatron's name of an MLP whose activation is a module: here ``GatedSilu``, where no kernel computes both.
        return {"use_te_activation_func": not self.kernels.fused_activation, **self.kernels.arguments()}

    # ---- the model

    def build(self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
        """Return the layers of this rank's pipeline stage, with random weights.

        ``pre_process``: with the embedding; ``post_process``: with the last norm and the output layer; ``vp_stage``:
        number of the chunk, of a rank with several. Megatron marks split weights while it initialises them.
        """
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=self._spec(vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=self.hf_config.tie_word_embeddings,
            vp_stage=vp_stage,
            **self._get_gptmodel_args(),
        )
        # The same data, with other behaviour: support for packed rows, and hidden states instead of logits.
        if hasattr(model, "rotary_pos_emb"):
            model.rotary_pos_emb.__class__ = (
                FusedRotary if self.kernels.fused_rotary and self._turns(model) else PackedRotary
            )
        if post_process:
            model.output_layer.__class__ = OutputLayer
        return model

    def _turns(self, model: GPTModel) -> bool:
        """Return whether core attention turns queries and keys in every layer; not so in some users' bridges."""
        cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
        turns = not self.config.no_rope_freq and all(isinstance(core, SDPACoreAttention) for core in cores)
        if not turns:
            why = f"{type(self).__name__} has layers without positions, or core attention of its own"
            log.info("kernel of=rotary chosen=separate reason=%s", why)
        return turns

    def _spec(self, vp_stage: int | None) -> Any:
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        spec.layer_norm = Norm
        for layer in spec.layer_specs:  # several layers share one object, so a change must bear repetition
            parts, attention = layer.submodules, layer.submodules.self_attention.submodules
            parts.input_layernorm = parts.pre_mlp_layernorm = Norm
            if self.config.use_te_activation_func:
                parts.mlp.submodules.activation_func = GatedSilu
            attention.core_attention = CORE_ATTENTION[self.kernels.attention]
            if self.config.qk_layernorm:
                for name in _NORM_NAMES:
                    if hasattr(attention, name):
                        setattr(attention, name, FusedHeadNorm if self.kernels.fused_rotary else Norm)
        return spec

    def _get_gptmodel_args(self) -> Arguments:
        hf_config = self.hf_config
        return {
            "vocab_size": hf_config.vocab_size,
            "max_sequence_length": hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": hf_config.rope_theta,
            **rope_arguments(hf_config.rope_parameters),
        }

    # ---- names

    def _adjust_mapping_for_shared_weights(self) -> None:
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        for suffix, hf_name in self._NORMS.items():
            if name.startswith("decoder.layers.") and name.endswith("." + suffix):
                return [hf_name.format(name.split(".")[2])]
        return super()._weight_name_mapping_mcore_to_hf(name)  # type: ignore[misc,no-any-return]

    def names(self, chunk: GPTModel) -> Iterator[tuple[str, str]]:
        """Yield (name in the chunk, name in the whole model) of every weight but the adapters'."""
        for name in chunk.state_dict():
            if "_extra_state" not in name and not is_adapter(name):
                yield name, self._whole_name(chunk, name)

    def _whole_name(self, chunk: GPTModel, name: str) -> str:
        return _LAYER.sub(lambda match: f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.", name)

    # ---- weights in

    @torch.no_grad()
    def load(self, chunks: Sequence[GPTModel], directory: Path) -> None:
        """Load this rank's part of a directory's weights; no collective. Raises ConfigRefused for a missing tensor or
        shape.
        """
        files = ModelFiles(directory)
        for chunk in chunks:
            state = chunk.state_dict()
            for local, name in self.names(chunk):
                names = self._weight_name_mapping_mcore_to_hf(name)
                full_weight = self._weight_to_mcore_format(name, [files.tensor(file_name) for file_name in names])  # type: ignore[attr-defined]
                size, rank = self._split(name)
                part = self._weight_split_across_tp(name, full_weight, state[local], size)[rank]  # type: ignore[attr-defined]
                if part.shape != state[local].shape:
                    raise ConfigRefused(
                        f"{directory}: {', '.join(names)}", f"the shape {tuple(state[local].shape)}", tuple(part.shape)
                    )
                state[local].copy_(part)

    def _split(self, name: str) -> tuple[int, int]:
        """Return the number of ranks over which a weight may be split, and this rank's place among them."""
        return self.mpu.tp_size, self.mpu.tp_rank

    # ---- weights out

    @torch.no_grad()
    def export(self, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights of this pipeline stage under their Hugging Face names, in a fixed order.

        Collective over the tensor-parallel ranks, with experts over the expert-parallel ones. Where nothing is split
        the tensors are views on the live weights: copy a tensor that must outlive the next step.
        """
        for chunk in chunks:
            parameters = dict(chunk.named_parameters())
            state = chunk.state_dict()
            for local, name in self.names(chunk):
                weight = parameters.get(local, state[local])
                if getattr(weight, "shared", False):
                    continue  # the last stage's copy of a tied embedding, which the first stage yields
                for hf_name, full_weight in self._gathered(name, weight):
                    names, tensors = self._weight_to_hf_format(hf_name, full_weight)  # type: ignore[attr-defined]
                    yield from zip(names, tensors, strict=True)

    def _gathered(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield name, self._whole(name, weight, weight.detach())

    def _whole(self, name: str, weight: Tensor, part: Tensor) -> Tensor:
        """Return the whole of a tensor with the layout of ``weight``, whose ``part`` this rank has. Collective."""
        if self.mpu.tp_size == 1 or not getattr(weight, "tensor_model_parallel", False):
            return part
        parts = [torch.empty_like(part) for _ in range(self.mpu.tp_size)]
        dist.all_gather(parts, part.contiguous(), group=self.mpu.tp_group)
        whole: Tensor = self._weight_merge_across_tp(name, parts, weight)  # type: ignore[attr-defined]
        return whole

    def update_matrices(self, name: str, weight: Tensor, part: Tensor, update: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's part of a tensor behind ``update`` of each of its matrices, whole, as the files have them.

        ``name``: in the whole model. ``part``: this rank's part, with the layout of ``weight``. Collective over the
        tensor-parallel ranks, which all compute the same.
        """
        _, matrices = self._weight_to_hf_format(name, self._whole(name, weight, part))  # type: ignore[attr-defined]
        dtype, self.dtype = self.dtype, None  # in which mbridge would return the result
        try:
            whole = self._weight_to_mcore_format(name, [update(matrix.contiguous()) for matrix in matrices])  # type: ignore[attr-defined]
        finally:
            self.dtype = dtype
        size, rank = self._split(name)
        changed: Tensor = self._weight_split_across_tp(name, whole, weight, size)[rank]  # type: ignore[attr-defined]
        return changed


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
