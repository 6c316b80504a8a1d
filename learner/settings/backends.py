"""Settings that one backend alone has, and Megatron's own arguments by name (``learner.megatron``): which are passed
on, and the reason for which each other one is not.

Loads no torch and no Megatron: the names are read from the source of the installed Megatron's TransformerConfig, which
takes seconds to import.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.learner.errors import ConfigRefused

if TYPE_CHECKING:
    from tidemill.learner.settings.config import LearnerConfig

MEGATRON, FSDP = "megatron", "fsdp"
BACKENDS = ("auto", MEGATRON, FSDP)
"""Choices of ``learner.backend``."""
OF_MEGATRON = {
    "tensor_parallel": "no matrix is split: data_parallel is the number of ranks",
    "sequence_parallel": "no matrix is split",
    "pipeline_parallel": "every rank runs all layers: data_parallel is the number of ranks",
    "virtual_pipeline": "there are no stages",
    "first_stage_layers": "there are no stages",
    "last_stage_layers": "there are no stages",
    "context_parallel": "a row is on one rank (backend: megatron divides the rows of its families)",
    "expert_parallel": "experts are divided like all other weights, and every rank runs all of them",
    "distributed_optimizer": "weights, gradients and the optimizer's state are always divided over the ranks",
    "overlap_grad_reduce": "FSDP overlaps by itself",
    "overlap_param_gather": "FSDP overlaps by itself",
    "moe_aux_loss_coef": "it has no balancing loss",
    "moe_bias_update_rate": "no bias of a router moves",
    "bridge": "a bridge leads to Megatron's layers",
    "fused_activation": "the layers are those of transformers",
    "grouped_experts": "the experts are those of transformers",
    "recompute": "whole layers are computed again (full), or none",
    "fused_rotary": "the layers are those of transformers",
    "megatron": "these are arguments of Megatron",
}
"""Settings that only Megatron has, and the reason why FSDP has none of them."""

NO_MTP = "0 where Megatron trains, which keeps heads for further tokens as they are"
"""Wanted of ``mtp_loss_scaling_factor`` there."""


def megatron_settings(learner: "LearnerConfig") -> dict[str, object]:
    """Return the settings in use that only Megatron has, with the default of each."""
    defaults = {
        name: default() if callable(default := field.default_factory) else field.default
        for name, field in type(learner).__dataclass_fields__.items()
        if name in OF_MEGATRON
    }
    only = {name: default for name, default in defaults.items() if getattr(learner, name) != default}
    if learner.recompute == "full":  # which both have
        only.pop("recompute", None)
    return only


CLASSES = {
    "core/model_parallel_config.py": ("ModelParallelConfig",),
    "core/transformer/transformer_config.py": ("TransformerConfig",),
}
"""Files of Megatron, and their classes with the arguments as fields."""

TRIED: Mapping[str, str] = {
    "deallocate_pipeline_outputs": "a stage of a pipeline frees what it has sent to the next one",
    "config_logger_dir": "Megatron writes the configuration of its model and optimizer to files in this directory",
}
"""Arguments that are passed on, with the effect of each (``tests/integration/test_megatron_effects.py``)."""

_NOTHING = "nothing: "
_TE = "nothing: only layers of Transformer Engine read it, and the learner has layers of its own (docs/decisions/053)"
_REASONS = {
    "learner.tensor_parallel": "tensor_model_parallel_size",
    "learner.sequence_parallel": "sequence_parallel",
    "learner.pipeline_parallel": "pipeline_model_parallel_size",
    "learner.virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "learner.pipeline_parallel, to which it is equal": "microbatch_group_size_per_vp_stage",
    "learner.first_stage_layers": "num_layers_in_first_pipeline_stage account_for_embedding_in_pipeline_split",
    "learner.last_stage_layers": "num_layers_in_last_pipeline_stage account_for_loss_in_pipeline_split",
    "learner.pipeline_parallel, first_stage_layers and last_stage_layers": "pipeline_model_parallel_layout",
    "learner.context_parallel": """
        context_parallel_size cp_comm_type hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank
        hybrid_context_parallel
    """,
    "learner.expert_parallel": "expert_model_parallel_size",
    "learner.moe_aux_loss_coef": "moe_aux_loss_coeff moe_router_load_balancing_type",
    "learner.moe_bias_update_rate": "moe_router_bias_update_rate",
    "learner.routing_replay": "moe_enable_routing_replay",
    "learner.dtype": "params_dtype pipeline_dtype autocast_dtype bf16 fp16 enable_autocast",
    "learner.deterministic": "deterministic_mode",
    "learner.fused_activation": "bias_activation_fusion",
    "learner.recompute": """
        recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations
        moe_layer_recompute
    """,
    "the model's config.json, in model.path": """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization
        layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm add_qkv_bias add_bias_linear gated_linear_unit
        activation_func rotary_interleaved multi_latent_attention num_moe_experts moe_ffn_hidden_size moe_layer_freq
        moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_num_groups moe_router_group_topk
        moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_shared_expert_intermediate_size
        moe_shared_expert_gate
    """,
    "the learner, which depends on its value": """
        expert_tensor_parallel_size moe_token_dispatcher_type moe_router_dtype moe_router_fusion
        moe_shared_expert_overlap moe_z_loss_coeff transformer_impl moe_expert_capacity_factor
        moe_pad_expert_input_to_capacity moe_input_jitter_eps attention_dropout hidden_dropout calculate_per_token_loss
        variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync overlap_p2p_comm_warmup_flush
        use_cpu_initialization perform_initialization masked_softmax_fusion persist_layer_norm mtp_num_layers
        barrier_with_L1_time timers init_model_with_meta_device pipeline_model_parallel_comm_backend
        use_ring_exchange_p2p moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
    """,
    "learner.grouped_experts": "moe_grouped_gemm moe_use_legacy_grouped_gemm",
    "the bridge of the model's family: another value computes another model than the engines serve": """
        glu_linear_offset activation_func_clamp_value qk_l2_norm no_rope_freq attention_output_gate
        apply_residual_connection_post_layernorm mrope_section heterogeneous_block_specs moe_router_force_load_balancing
        moe_apply_probs_on_input moe_latent_size moe_token_dropping moe_router_topk_limited_devices
        moe_token_drop_policy mtp_standalone mtp_loss_scaling_factor experimental_attention_variant dsa_indexer_n_heads
        dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq
        linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
    """,
    "nothing: the weights are those of model.path": """
        init_method init_method_std output_layer_init_method embedding_init_method embedding_init_method_std
    """,
    "the learner, where it is off: the fused kernel needs Transformer Engine, and rounds in another order": """
        moe_permute_fusion
    """,
    "nothing: the learner has its own attention and loss, which do not read it": """
        window_size window_attn_skip_freq softmax_type softmax_scale attention_softmax_in_fp32
        apply_query_key_layer_scaling attention_backend qk_clip log_max_attention_logit flash_decode
        fp8_dot_product_attention fp8_multi_head_attention cross_entropy_loss_fusion cross_entropy_fusion_impl
        defer_embedding_wgrad_compute qk_clip_alpha qk_clip_threshold apply_rope_fusion fused_single_qkv_rope
        wgrad_deferral_limit memory_efficient_layer_norm bias_dropout_fusion use_fused_weighted_squared_relu test_mode
    """,
    _TE: """
        fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_wgrad fp8_amax_history_len
        fp8_amax_compute_algo activation_func_fp8_input_store tp_only_amax_red fp4 fp4_recipe fp4_param
        fp4_quantizer_factory quant_recipe use_kitchen first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 use_kitchen_attention kitchen_attention_backend batch_invariant_mode
        use_te_activation_func moe_router_padding_for_quantization moe_router_padding_for_fp8
        disable_parameter_transpose_cache tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
        tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
        tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
        cpu_offloading cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering fine_grained_activation_offloading offload_modules
        min_offloaded_tensor_size use_te_rng_tracker delay_wgrad_compute symmetric_ar_type
    """,
    "nothing: the rows of a step differ in their lengths, and CUDA graphs of them are not supported": """
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps
    """,
    "nothing: it is a function, which no configuration file can have": """
        finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
    """,
    "nothing: it is about Megatron's own generation, and the learner generates nothing": """
        inference_rng_tracker inference_sampling_seed use_inference_optimized_layers inference_fuse_tp_communication
        mlp_chunks_for_prefill
    """,
    "nothing: of the layers and schedules that the learner has none reads it": """
        async_tensor_model_parallel_allreduce disable_bf16_reduced_precision_matmul moe_extended_tp
        hetereogenous_dist_checkpoint use_mamba_mem_eff_path moe_per_layer_logging
    """,
    "nothing: it has not been tried with the learner": """
        overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release
        num_microbatches_with_partial_activation_checkpoints clone_scatter_output_in_embedding
    """,
    "nothing: Megatron's layers refuse it without Apex's kernels, and it has not been tried with them": """
        gradient_accumulation_fusion
    """,
    "nothing: the learner's norms and layers have one dtype, that of learner.dtype": "fp32_residual_connection",
}
"""Settings that decide about arguments of Megatron, or reasons why these would do nothing, and their names."""
OURS: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Arguments that are not passed on, and the setting or reason of each."""

_TYPES = {"bool": bool, "int": int, "float": (int, float), "str": str, "List": list, "list": list, "Literal": str}


def refuse_untried(arguments: JsonMapping) -> None:
    """Raise ValueError for an argument that the learner sets itself, or that has no effect here."""
    for name in arguments:
        if reason := OURS.get(name, ""):
            why = (
                reason.replace(_NOTHING, "it has no effect: ")
                if reason.startswith(_NOTHING)
                else f"it is set by {reason}"
            )
            raise ValueError(f"megatron.{name}: not passed to Megatron; {why}; remove it")


def refusals(arguments: JsonMapping) -> list[ConfigRefused]:
    """Return an error for each argument that the installed Megatron lacks, that is not tried, or of another type."""
    types, refused = annotations(), []
    for name, value in arguments.items():
        if name not in types:
            near = get_close_matches(name, types, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            refused.append(
                ConfigRefused(f"learner.megatron.{name}", f"an argument of Megatron's TransformerConfig{meant}", name)
            )
        elif name not in TRIED:
            refused.append(
                ConfigRefused(
                    f"learner.megatron.{name}", f"an argument with a known effect ({', '.join(TRIED)})", value
                )
            )
        elif not _fits(types[name], value):
            refused.append(ConfigRefused(f"learner.megatron.{name}", f"a value of type {types[name]}", value))
    return refused


@functools.cache
def annotations() -> Mapping[str, str]:
    """Return the type of each argument of the installed Megatron, as its source has it; empty without Megatron."""
    spec = importlib.util.find_spec("megatron")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    types: dict[str, str] = {}
    for file, classes in CLASSES.items():
        for root in roots:
            if (root / file).exists():
                body = ast.parse((root / file).read_text(encoding="utf-8")).body
                owners = [
                    statement for statement in body if isinstance(statement, ast.ClassDef) and statement.name in classes
                ]
                types |= {name: kind for owner in owners for name, kind in _fields(owner)}
    return types


def _fields(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement in owner.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, ast.unparse(statement.annotation)


def _fits(annotation: str, value: Any) -> bool:
    """Return whether a value of a configuration file fits a type like ``Optional[int]`` or ``Union[bool, str]``."""
    words = {word.id for word in ast.walk(ast.parse(annotation)) if isinstance(word, ast.Name)}
    if value is None:
        return "Optional" in words or "None" in annotation
    if isinstance(value, bool):
        return "bool" in words
    return any(word in words and isinstance(value, kind) for word, kind in _TYPES.items())  # type: ignore[arg-type]
