"""Families of transformers at tiny sizes: a model of each, and its row in the table of ``docs/models.md``.

``python -m tests.families [PYTHON]`` prints the table anew; ``PYTHON``: the interpreter of an environment with SGLang.
"""

import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tidemill.actors.config import SglangConfig
from tidemill.actors.serving.builtin.shape import ModelShape, choose_runner
from tidemill.actors.serving.sglang.arguments import NEWEST, written
from tidemill.actors.serving.sglang.registry import Registry, read_registry
from tidemill.learner.backends.fsdp.model import FsdpModel, Place, open_model
from tidemill.learner.backends.fsdp.opening import build, without_noise
from tidemill.learner.backends.fsdp.self_test import randomize

VOCAB = 512
LENGTHS = (23, 1, 40, 17, 2)
"""Tokens of the sequences of a row: longer and shorter than windows and chunks."""
GAIN = 0.5
"""Factor of random matrices: with larger ones states amplify rounding to 5e-4 nats (nemotron_h)."""
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
# As many heads as released models have: with few, equal scores are frequent, and any of the tokens may be chosen.
_SPARSE = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 64}
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
_OF_GPT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "head_dim": None}
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
            "global_head_dim": 32,
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
OTHERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    name: (name, settings)
    for names, settings in (
        ("apertus arcee cohere diffllama doge ernie4_5 gemma helium hunyuan_v1_dense nanochat nemotron olmo", {}),
        ("bitnet internlm3 jais2 jetmoe persimmon qwen2 stablelm starcoder2", {}),
        ("cohere2 cwm exaone4", _WINDOWS),
        ("granitemoe granitemoe_swa phimoe", _LOCAL_EXPERTS),
        ("cohere2_moe", {**_LOCAL_EXPERTS, **_WINDOWS}),
        ("flex_olmo olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
        ("hy_v3", _EXPERTS),
        ("exaone_moe", {**_GROUPED_EXPERTS, "num_experts": 8}),
        ("deepseek_v2", {**_LATENT, **_GROUPED_EXPERTS}),
        ("minicpm3", _LATENT),
        ("olmo_hybrid", _DELTA),
        ("falcon phi", {"head_dim": None}),
        (
            "afmoe",
            {
                **_WINDOWS,
                **_EXPERTS,
                "num_dense_layers": 1,
                "num_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
            },
        ),
        ("bamba", {**_MAMBA, "attn_layer_indices": [1, 3], "head_dim": None}),
        ("bloom", {"n_layer": 4, "n_head": 4, "head_dim": None}),
        ("codegen", {**_OF_GPT, "rotary_dim": 8}),
        ("dots1 solar_open", _GROUPED_EXPERTS),
        ("ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1}),
        ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 128}),
        ("falcon_mamba", {"state_size": 16}),
        ("gpt2 gpt_bigcode", _OF_GPT),
        ("gpt_neox", {"num_key_value_heads": None, "head_dim": None}),
        ("gptj", {**_OF_GPT, "rotary_dim": 8}),
        ("granitemoeshared", {**_LOCAL_EXPERTS, "shared_intermediate_size": 32}),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "num_shared_expert": 1, "moe_intermediate_size": 32}),
        (
            "jamba",
            {
                "mamba_d_state": 16,
                "mamba_dt_rank": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "use_mamba_kernels": False,
                "head_dim": None,
            },
        ),
        ("mamba2", {"num_heads": 16, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16}),
        ("minimax", {**_LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "head_dim": None}),
        ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
        (
            "longcat_flash",
            {
                **_LATENT,
                "head_dim": 8,
                "num_hidden_layers": None,
                "num_layers": 2,
                "n_routed_experts": 8,
                "zero_expert_num": 2,
                "moe_topk": 2,
                "expert_ffn_hidden_size": 32,
            },
        ),
        ("recurrent_gemma", {"lru_width": 64, "attention_window_size": 16}),
        ("vaultgemma", {**_WINDOWS, "query_pre_attn_scalar": 16}),
        (
            "zamba2",
            {
                "layers_block_type": ["linear_attention", "hybrid"] * 2,
                "n_mamba_heads": 8,
                "mamba_d_state": 16,
                "chunk_size": 16,
                "head_dim": None,
            },
        ),
        (
            "xlstm",
            {
                "num_heads": 4,
                "norm_eps": 1e-3,
                "head_dim": None,
                "num_attention_heads": None,
                "num_key_value_heads": None,
            },
        ),
        ("xglm", {"d_model": 64, "ffn_dim": 96, "num_layers": 4, "attention_heads": 4, "head_dim": None}),
    )
    for name in names.split()
}
"""Families for which nothing was written, or one file: those of ``docs/families.md``."""
KINDS = ("qwen3, tied", "qwen3_5_moe", "gpt_oss", "gemma4", "glm_moe_dsa", "granitemoehybrid", "lfm2", "llama4")
"""One family of each kind: dense, linear attention with experts, sinks and windows, caps and shared keys, sparse
attention, states, convolutions, chunks.
"""


def config_of(name: str, **sizes: int) -> Any:
    """Return the configuration of a family at a tiny size, but for ``sizes``."""
    kind, settings = {**OTHERS, **FAMILIES}[name]
    both = {**_DENSE, **settings, **sizes}
    present = {key: value for key, value in both.items() if value is not None or key == "q_lora_rank"}
    return AutoConfig.for_model(kind, **present)


def family_model(name: str, *, seed: int = 0, **sizes: int) -> Any:
    """Return a random model of a family in float32, without dropout, ready to be evaluated."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(without_noise(config_of(name, **sizes)), packed=False).model
        randomize(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(GAIN if parameter.dim() > 1 else 1.0)
    return model.eval()


def write_family(
    directory: Path, name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int
) -> Path:
    """Write a random model of a family, tiny but for ``sizes``, in the names of its released files. Returns its
    directory.
    """
    family_model(name, seed=seed, **sizes).to(dtype).save_pretrained(directory)
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


PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SGLANG = written(NEWEST)
"""The release of SGLang that the tests run."""
_SINCE = {
    "0.3.0": "llama gemma2 mistral mixtral phi3",
    "0.3.6.post3": "olmo2",
    "0.4.0.post2": "granite",
    "0.4.1": "deepseek_v3",
    "0.4.5": "gemma3 llama4",
    "0.4.5.post2": "qwen3 qwen3_moe",
    "0.4.8": "glm4",
    "0.4.9.post5": "glm4_moe",
    "0.5.1": "gpt_oss",
    "0.5.2": "qwen3_next",
    "0.5.3": "deepseek_v32",
    "0.5.3.post2": "nemotron_h",
    "0.5.4.post2": "minimax_m2 kimi_linear",
    "0.5.6.post2": "ministral3",
    "0.5.8": "glm4_moe_lite",
    "0.5.9": "glm_moe_dsa granitemoehybrid lfm2 lfm2_moe",
    "0.5.11": "gemma4",
    "0.5.17": "qwen3_5 qwen3_5_moe",
}
SGLANG_SINCE = {name: release for release, names in _SINCE.items() for name in names.split()}
"""First release of SGLang with the architecture, of the 54 wheels that were read on 2026-11-30: each release from 0.4.1
to 0.5.22 but for some ``.post``, four before. Its name is in an ``EntryClass`` in ``sglang/srt/models``.
"""
ON_CPU = (
    *("llama", "qwen3", "qwen3, tied", "qwen3_moe", "glm4", "gemma3"),
    *("granite", "ministral3", "mixtral", "olmo2", "phi3", "glm4_moe"),
)
"""Families whose exports and pushes are tried with SGLang on a CPU, without its kernels."""
HEADER = (
    *("family", "`model_type`", "rows", "states", "experts", "tied", "logits", "common prompts once"),
    *("built-in engine", "SGLang since", "SGLang on CPU"),
)


def table_row(name: str, model: FsdpModel, directory: Path) -> list[str]:
    """Return the cells of a family in the table of the documentation, but those of SGLang."""
    experts = any("expert" in parameter for parameter, _ in model.transformer.named_parameters())
    scale, cap = model.head
    logits = [f"x {scale:g}"] * (scale != 1) + [f"cap {cap:g}"] * (cap != 0)
    shape, _ = choose_runner("auto", lambda: ModelShape.read(directory))
    return [
        name,
        f"`{FAMILIES[name][0]}`",
        "packed" if model.findings.packed else "padded",
        "yes" if model.findings.mixers else "",
        "yes" if experts else "",
        "yes" if model.transformer.all_tied_weights_keys else "",
        ", ".join(logits),
        "" if model.prefix_obstacle else "yes",
        "transformers" if shape is None else "decoder",
    ]


def sglang_cells(name: str, registry: Registry) -> list[str]:
    """Return the last cells of a family: the first release of SGLang that has code for it, if an installation has it,
    too, and whether a test runs it.
    """
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FAMILIES[name][0]]
    refused = registry.refusal({"architectures": [architecture]}, context=0)
    return ["" if refused else SGLANG_SINCE[name.split(",")[0]], "yes" if name in ON_CPU else ""]


def page_rows(page: str, header: Sequence[str] = HEADER) -> dict[str, list[str]]:
    """Return the cells of the table in a page by family."""
    lines = page.splitlines()
    first = lines.index(_line(header)) + 2
    of_table = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in of_table]
    return {cells[0]: cells for cells in rows}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table. Without SGLang its columns are empty."""
    registry = read_registry(SglangConfig(python=sys.argv[1])) if len(sys.argv) > 1 else None
    print(_line(HEADER) + "\n|" + "---|" * len(HEADER))
    with tempfile.TemporaryDirectory() as directory, one_place() as place:
        for name in FAMILIES:
            model_dir = write_family(Path(directory) / name, name)
            cells = table_row(name, open_model(model_dir, dtype="float32", place=place), model_dir)
            print(_line([*cells, *(sglang_cells(name, registry) if registry else ("", ""))]))


if __name__ == "__main__":
    main()
