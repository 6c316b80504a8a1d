"""A model file in GGUF (llama.cpp's format) as a directory in Hugging Face format.

Quantised tensors are expanded to their values, in float32: a learner trains them, and no later step rounds them again.
Knows the architecture ``llama`` (Llama, SmolLM2) with a byte-level BPE tokenizer, and refuses every other with a
reason: a guessed tokenizer is wrong without an error.

Source: GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.bus.system.files import write_whole

if TYPE_CHECKING:
    import numpy as np
    import torch

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a layer, from the names of GGUF to the names of transformers."""
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL = 3  # token type of a token that text never has: ``<|im_end|>``
_PRE_TOKENIZERS: Mapping[str, Sequence[Mapping[str, object]]] = {
    # llama.cpp's names of the rules by which a text is cut before the merges, src/llama-vocab.cpp
    "smollm": (
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ),
    "gpt-2": ({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},),
}


def to_directory(file: Path, out: Path, compare: Callable[[Path], None] | None = None) -> int:
    """Write configuration, tokenizer and float32 weights of ``file`` to ``out``. Returns the number of parameters.

    ``compare`` gets the directory without its weights, and raises what it has against it. Raises ValueError for another
    format, architecture or tokenizer, and tensors without a place.
    """
    from safetensors.torch import save_file

    fields, tensors = _read(file)
    try:
        config = _config(fields, file)
        tokenizer, tokenizer_config = _tokenizer(fields, file)
    except KeyError as error:
        raise ValueError(f"{file}: want the field {error.args[0]}, got none") from error
    weights = _weights(tensors, config, file)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    part = out.with_name(f"{out.name}.part")  # a conversion that is killed leaves no directory that looks whole
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    for name, content in {
        "config.json": config,
        "generation_config.json": ends | {"pad_token_id": config["pad_token_id"]},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        write_whole(part / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    if compare is not None:
        compare(part)
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    part.rename(out)
    return sum(tensor.numel() for tensor in weights.values())


def _read(file: Path) -> "tuple[dict[str, Any], list[Any]]":
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, OSError, IndexError) as error:
        raise ValueError(f"{file}: want a whole GGUF file, got one that cannot be read: {error}") from error
    return {name: field.contents() for name, field in reader.fields.items()}, list(reader.tensors)


def _config(fields: Mapping[str, Any], file: Path) -> dict[str, Any]:
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"{file}: want the architecture llama, got {architecture}; use the model's safetensors")
    unknown = [name for name in fields if name.startswith(("llama.rope.scaling", "llama.expert"))]
    if unknown:
        raise ValueError(f"{file}: want plain rotary positions and no experts, got {', '.join(unknown)}")
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": fields["llama.context_length"],
        # The file has float32: 1e-5 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "rope_scaling": None,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
        "use_cache": True,
    }


def _tokenizer(fields: Mapping[str, Any], file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    kind, rules = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "")
    if kind != "gpt2" or rules not in _PRE_TOKENIZERS:
        want = f"a byte-level BPE (gpt2) that cuts texts by the rules of {' or '.join(_PRE_TOKENIZERS)}"
        raise ValueError(f"{file}: tokenizer: want {want}, got {kind} {rules}; use the model's own tokenizer.json")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [
        {"id": token_id, "content": tokens[token_id], "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token_id, token_type in enumerate(types)
        if token_type == _CONTROL
    ]
    rules_of_bytes = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_PRE_TOKENIZERS[rules])},
        # No template adds a first token: chats have it from their own template, plain text has none.
        "post_processor": None,
        "decoder": rules_of_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    return tokenizer, _tokenizer_config(fields, added)


def _tokenizer_config(fields: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    special = {
        f"{name}_token": fields["tokenizer.ggml.tokens"][fields[key]]
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in fields
    }
    config = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
    }
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _weights(tensors: Sequence[Any], config: Mapping[str, Any], file: Path) -> "dict[str, torch.Tensor]":
    import torch
    from gguf.quants import dequantize

    expand: Callable[..., np.ndarray[Any, Any]] = dequantize
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in _named(tensors, file):
        values = torch.from_numpy(expand(tensor.data, tensor.tensor_type).copy()).float()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2], "")
        weights[name] = _without_permutation(values, config[heads]) if heads else values
    return weights


def _named(tensors: Sequence[Any], file: Path) -> Iterator[tuple[str, Any]]:
    for tensor in tensors:
        module, _, suffix = tensor.name.rpartition(".")
        block = module.split(".")
        if module in _MODEL:
            yield f"{_MODEL[module]}.{suffix}", tensor
        elif len(block) == 3 and block[0] == "blk" and block[2] in _LAYER:
            yield f"model.layers.{block[1]}.{_LAYER[block[2]]}.{suffix}", tensor
        else:
            raise ValueError(f"{file}: want tensors of a Llama model, got {tensor.name}")


def _without_permutation(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Return a projection [heads * d, hidden] with its rows in the order of transformers.

    llama.cpp rotates neighbouring elements, transformers the halves of a head; its converter permutes the rows of
    queries and keys (``LlamaModel.permute`` in convert_hf_to_gguf.py). This is the inverse.
    """
    return (
        weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )
