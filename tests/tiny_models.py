"""Tiny random models in Hugging Face format, with a real tokenizer, written where a test needs them.

Knows transformers (to write and to compare), nothing of Tidemill.
"""

import functools
import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("qwen3", "qwen2", "llama")
"""Families for tests of single parts of an engine."""
SERVED = (*FAMILIES, "glm4", "qwen3_moe")
"""Families for the contract of engines."""
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4_moe": {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    },
}
"""Further settings of the families with experts."""
DENSE: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen2": {},
    "llama": {},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
}
"""Further settings of the dense families."""
EOS = "<|im_end|>"
PAD = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "What is three plus four? The answer is seven.",
    "Write the digits from zero to nine: 0 1 2 3 4 5 6 7 8 9.",
    "A tide that never stops, a pond behind the mill, and a wheel that turns.",
)
NUM_MERGES = 40


OF_RENDERERS: dict[str, tuple[str, ...]] = {
    "qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "glm-4.5": (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "kimi-k2": (
        *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "deepseek-v3": tuple(
        f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")
        for name in (
            *("begin of sentence", "end of sentence", "User", "Assistant", "tool sep"),
            *(f"tool {what} {end}" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
        )
    ),
}
"""Tokens that the renderer of a family needs, besides those of the tiny tokenizer."""


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer: 3 special tokens, 256 bytes, ``NUM_MERGES`` merges; decodes every id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=3 + len(alphabet) + NUM_MERGES,
        special_tokens=[PAD, "<|im_start|>", EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tiny_tokenizer(directory: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json with a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def tiny_config(family: str = "qwen3", *, tied: bool = False, **changes: Any) -> Any:
    """Return a transformers configuration: 2 layers, hidden 32, 4 heads over 2 key/value heads, the tokenizer's
    vocabulary, context 256.
    """
    from transformers import AutoConfig

    tokenizer = tiny_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "initializer_range": 0.3,
    }
    # transformers writes into the dictionaries that it is given.
    return AutoConfig.for_model(family, **deepcopy(settings | (DENSE | EXPERTS)[family] | changes))


def tiny_model(family: str = "qwen3", *, seed: int = 0, tied: bool = False, **changes: Any) -> Any:
    """Return the transformers model, fp32, in eval mode; norms and biases are random too, so that a test notices a
    missing one.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, tied=tied, **changes), attn_implementation="sdpa")
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            elif "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.05)
    return model.float().eval()


def named_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a model by the names in its files, without the alias of a tied embedding: parameters, and
    the buffers that files have (biases of routers).
    """
    from transformers.core_model_loading import revert_weight_conversion

    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return list(revert_weight_conversion(model, dict(model.named_parameters()) | buffers).items())


def write_tiny_model(
    directory: Path, family: str = "qwen3", *, seed: int = 0, tied: bool = False, **changes: Any
) -> Path:
    """Write a model directory that transformers, SGLang and the built-in engine can load; return it."""
    write_tiny_tokenizer(directory)
    tiny_model(family, seed=seed, tied=tied, **changes).save_pretrained(directory)
    return directory


def as_released(directory: Path) -> dict[str, torch.Tensor]:
    """Give the dense layers of a kimi_linear the names of its releases: transformers writes ``block_sparse_moe`` for
    them, too. Returns the tensors.
    """
    file, wrong, right = directory / "model.safetensors", "layers.0.block_sparse_moe.", "layers.0.mlp."
    tensors = load_file(file)
    assert any(wrong in name for name in tensors)
    tensors = {name.replace(wrong, right): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def as_transformers_4(directory: Path, into: Path) -> Path:
    """Copy a model directory, with config.json as transformers 4 wrote it; return the copy."""
    shutil.copytree(directory, into)
    file = into / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    rope = values.pop("rope_parameters")
    values |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if values["model_type"] == "qwen3_moe":
        values["num_experts"] = values.pop("num_local_experts")
    file.write_text(json.dumps(values), encoding="utf-8")
    return into


def with_tokenizer_of_5(directory: Path, into: Path) -> Path:
    """Copy a model directory, with tokenizer_config.json and the chat template as transformers 5 writes them; return
    the copy.
    """
    shutil.copytree(directory, into)
    file = into / "tokenizer_config.json"
    words = json.loads(file.read_text(encoding="utf-8"))
    if template := words.pop("chat_template", None):
        (into / "chat_template.jinja").write_text(template, encoding="utf-8")
    words |= {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_start|>"]}
    file.write_text(json.dumps(words), encoding="utf-8")
    return into


def as_pond(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a qwen2 model as the files of ``model_type: pond`` have them
    (docs/examples/extending/my_bridge.py).
    """
    names = {
        "input_layernorm.weight": "norm_before_attention.weight",
        "post_attention_layernorm.weight": "norm_before_mlp.weight",
        "mlp.down_proj.weight": "mlp.down.weight",
    }
    found = dict(weights)
    for name in [name for name in weights if name.endswith("gate_proj.weight")]:
        both = [found.pop(name), found.pop(name.replace("gate_proj", "up_proj"))]
        found[name.replace("gate_proj", "gate_and_up")] = torch.cat(both)
    for old, new in names.items():
        found = {name.replace(old, new): weight for name, weight in found.items()}
    return found


def write_tiny_pond(directory: Path, **changes: Any) -> Path:
    """Write the tiny qwen2 model as a ``pond``, a family that transformers and the learner do not know; return its
    directory.
    """
    write_tiny_model(directory, "qwen2", **changes)
    save_file(as_pond(load_file(directory / "model.safetensors")), directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "pond"}))
    return directory
