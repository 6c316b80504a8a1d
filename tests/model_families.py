"""Small random models of the families that transformers has, one of each kind of layer and more: two to four layers.

Weights are larger than at the start of a training, so that each part of a model changes its scores.
"""

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = ["linear_attention", "full_attention"] * 2
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
GATED_DELTA = {
    "layer_types": LINEAR,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERTS = EXPERTS | {"shared_expert_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": None,
}
GROUPED = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
# As many heads as released models have: with few, equal scores are frequent, and any of the tokens may be chosen.
INDEXED = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 64}
CAPPED = WINDOWS | {"query_pre_attn_scalar": 16}
MAMBA = {"layer_types": LINEAR, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_chunk_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": GATED_DELTA,
    "qwen3_5_moe_text": GATED_DELTA | SHARED_EXPERTS,
    "qwen3_next": GATED_DELTA | SHARED_EXPERTS,
    "gpt_oss": WINDOWS | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "glm4": {},
    "glm4_moe": GROUPED | {"use_qk_norm": True, "num_nextn_predict_layers": 0},
    "glm4_moe_lite": LATENT | GROUPED,
    "glm_moe_dsa": LATENT | GROUPED | INDEXED | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "deepseek_v3": LATENT | GROUPED | {"num_nextn_predict_layers": 0},
    "deepseek_v32": LATENT | GROUPED | INDEXED,
    "gemma2": CAPPED,
    "gemma3_text": CAPPED,
    "gemma4_text": WINDOWS
    | {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    | {"final_logit_softcapping": 30.0, "global_head_dim": 32},
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "olmo2": {},
    "olmo3": WINDOWS,
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "lfm2": CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1},
    "ministral3": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 1, 1, 0],
        "moe_layers": [1, 3],
    },
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
    },
    "granitemoehybrid": MAMBA
    | {"head_dim": None, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
    | {"logits_scaling": 4.0},
    "kimi_linear": LATENT
    | {"q_lora_rank": None, "layer_types": LINEAR, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    | {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 32}
    | {"linear_head_dim": 16, "linear_num_heads": 4},
    "seed_oss": {},
    "phi3": {"head_dim": None},
}
"""Settings besides ``SIZES`` (None = the family's default) by the name: a ``model_type``, and a word for a variant."""
KINDS = ("gemma3_text", "gemma4_text", "gpt_oss", "llama4_text", "lfm2", "qwen3_5_text", "nemotron_h", "glm4_moe")
"""One family of each kind: windows, shared keys, sinks and fused experts, chunks, convolutions, linear attention, state
spaces, split experts. ``make test`` tries these, ``make test-all`` every family.
"""


def family_model(name: str, *, seed: int = 0) -> Any:
    """Return a model of a family in float32, ready to be evaluated."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = SIZES | FAMILIES[name]
    # These two have None as a value of their own.
    keep = {"sliding_window", "q_lora_rank"} & FAMILIES[name].keys()
    config = AutoConfig.for_model(
        name.split()[0], **{key: value for key, value in values.items() if value is not None or key in keep}
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                is_input = "embed" in key and not config.tie_word_embeddings
                parameter.normal_(0, 0.5 if is_input else 0.08)
            elif "bias" in key and "dt" not in key:
                parameter.normal_(0, 0.05)
    return model.eval()


def write_family_model(directory: Path, name: str, *, seed: int = 0) -> Path:
    """Write a model of a family in the names of its released files. Returns the directory."""
    family_model(name, seed=seed).save_pretrained(directory)
    return directory
