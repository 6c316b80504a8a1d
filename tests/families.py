"""Families of transformers at tiny sizes: a model of each, and its row in the table of ``docs/models.md``.

``python -m tests.families`` prints the table anew.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from tidemill.learner.backends.fsdp.model import FsdpModel, Place, open_model
from tidemill.learner.backends.fsdp.opening import build, without_noise
from tidemill.learner.backends.fsdp.self_test import randomize

VOCAB = 512
LENGTHS = (23, 1, 40, 17, 2)
"""Tokens of the sequences of a row: longer and shorter than windows and chunks."""
_DENSE = {
    "vocab_size": VOCAB,
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
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
_GROUPED_EXPERTS = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": None,
    "num_key_value_heads": 4,
}
_SPARSE = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MIXED_EXPERTS = {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_chunk_size": 16}

FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", _MIXED_EXPERTS),
    "qwen3_next": ("qwen3_next", _MIXED_EXPERTS),
    "gpt_oss": ("gpt_oss", {**_LOCAL_EXPERTS, **_WINDOWS}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {**_GROUPED_EXPERTS, "use_qk_norm": True, "num_nextn_predict_layers": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_GROUPED_EXPERTS}),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**_LATENT, **_GROUPED_EXPERTS, **_SPARSE, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    ),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, **_GROUPED_EXPERTS, "num_nextn_predict_layers": 1}),
    "deepseek_v32": ("deepseek_v32", {**_LATENT, **_GROUPED_EXPERTS, **_SPARSE}),
    "gemma2": ("gemma2", {**_WINDOWS, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {**_WINDOWS, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma4": (
        "gemma4_text",
        {
            **_WINDOWS,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 30.0,
            "num_kv_shared_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": None,
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
    ),
    "minimax_m2": ("minimax_m2", _LOCAL_EXPERTS),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 1, 1, 0],
            "moe_layers": [1, 3],
        },
    ),
    "granite": (
        "granite",
        {
            "logits_scaling": 4.0,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "head_dim": None,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "logits_scaling": 4.0,
        },
    ),
    "lfm2": ("lfm2", {**_CONVOLUTIONS, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}),
    "lfm2_moe": ("lfm2_moe", {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1, "tie_word_embeddings": True}),
    "kimi_linear": (
        "kimi_linear",
        {
            **_LATENT,
            **_EXPERTS,
            "q_lora_rank": None,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts_per_token": 2,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 16}),
    "ministral3": ("ministral3", {}),
    "mixtral": ("mixtral", _LOCAL_EXPERTS),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _WINDOWS),
    "phi3": ("phi3", {"head_dim": None}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True}),
}
"""A name -> ``model_type`` and settings of transformers that differ from those of a small dense model."""
KINDS = ("qwen3, tied", "qwen3_5_moe", "gpt_oss", "gemma4", "glm_moe_dsa", "granitemoehybrid", "lfm2", "llama4")
"""One family of each kind: dense, linear attention with experts, sinks and windows, caps and shared keys, sparse
attention, states, convolutions, chunks.
"""


def config_of(name: str, **sizes: int) -> Any:
    """Return the configuration of a family at a tiny size, but for ``sizes``."""
    kind, settings = FAMILIES[name]
    both = {**_DENSE, **settings, **sizes}
    present = {key: value for key, value in both.items() if value is not None or key == "q_lora_rank"}
    return AutoConfig.for_model(kind, **present)


def write_family(
    directory: Path, name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int
) -> Path:
    """Write a random model of a family by transformers, tiny but for ``sizes``. Returns its directory."""
    torch.manual_seed(seed)
    model = build(without_noise(config_of(name, **sizes)), packed=False).model
    randomize(model)
    model.to(dtype).save_pretrained(directory)
    return directory


def plain_model(directory: Path) -> Any:
    """Return the model of a directory as transformers has it, in float32."""
    config = without_noise(AutoConfig.from_pretrained(directory))
    return AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32).train()


def sequences(lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    """Return the tokens of random sequences."""
    return [torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]


@contextmanager
def one_place() -> Iterator[Place]:
    """Form a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield place_here()
    finally:
        dist.destroy_process_group()


def place_here() -> Place:
    """Return the place of this rank of the world, on the CPU."""
    assert dist.group.WORLD is not None
    return Place(device=torch.device("cpu"), group=dist.group.WORLD)


HEADER = ("family", "`model_type`", "rows", "states", "experts", "tied", "logits", "common prompts once")


def table_row(name: str, model: FsdpModel) -> str:
    """Return the row of a family in the table of the documentation."""
    experts = any("expert" in parameter for parameter, _ in model.transformer.named_parameters())
    scale, cap = model.head
    logits = [f"x {scale:g}"] * (scale != 1) + [f"cap {cap:g}"] * (cap != 0)
    cells = (
        name,
        f"`{FAMILIES[name][0]}`",
        "packed" if model.findings.packed else "padded",
        "yes" if model.findings.mixers else "",
        "yes" if experts else "",
        "yes" if model.transformer.all_tied_weights_keys else "",
        ", ".join(logits),
        "" if model.prefix_obstacle else "yes",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    with tempfile.TemporaryDirectory() as directory, one_place() as place:
        for name in FAMILIES:
            model_dir = write_family(Path(directory) / name, name)
            print(table_row(name, open_model(model_dir, dtype="float32", place=place)))


if __name__ == "__main__":
    main()
