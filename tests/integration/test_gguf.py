"""A GGUF file as a model directory: the weights, the tokenizer and the ends of the model it was made from."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.refusals import refusal
from tidemill.launch.cli.convert import run_convert
from tidemill.learner.checkpoints.gguf import to_directory

HEADS, KV_HEADS, LAYERS = 4, 2, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "In 2024 there were 12 months.",
    " leading blank",
    "a\n\nb\tc",
    "café 模型 🙂",
    "",
    "<|im_start|>user\nHi<|im_end|>",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
Type = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return a byte-level BPE that takes digits one by one, as SmolLM2's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([path.read_text() for path in sorted(Path(__file__).parent.glob("test_g*.py"))], trainer)
    return bpe


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(shape).eval()


def write(path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, quantised: Type = Type.F32, **fields: Any) -> Path:
    """Write a model as llama.cpp's converter does, with ``fields`` in place of its own."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    writer = gguf.GGUFWriter(path, fields.get("architecture", "llama"))
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(LAYERS)
    if fields.get("without") != "feed_forward_length":
        writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(16)
    if fields.get("scaled"):
        writer.add_rope_scaling_factor(8.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.get("rules", "smollm"))
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in SPECIAL else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = HEADS if "q_proj" in name else KV_HEADS
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = quantised if values.ndim == 2 else Type.F32
        writer.add_tensor(gguf_name(name), quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    return f"{names.get_name(name.removesuffix('.weight'))}.weight"


def test_logits_tokens_and_ends_are_those_of_the_model(
    tmp_path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    file = write(tmp_path / "model.gguf", model, tokenizer)
    run_convert(file, tmp_path / "hf", None)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(3, 90)[None]
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, model(ids).logits)
    read = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        ids_of_text = read(text)["input_ids"]
        assert ids_of_text == tokenizer.encode(text, add_special_tokens=False).ids, text
        assert read.decode(ids_of_text) == text
    assert len(read("2024")["input_ids"]) == 4, "digits one by one"
    chat = read.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n"
    assert (read.eos_token_id, converted.config.eos_token_id, converted.generation_config.eos_token_id) == (2, 2, 2)
    assert converted.config.rms_norm_eps == 1e-5 and converted.config.tie_word_embeddings


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1, Type.F16], ids=lambda kind: kind.name)
def test_quantised_tensors_are_expanded_and_not_rounded_again(
    tmp_path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, kind: Type
) -> None:
    to_directory(write(tmp_path / "model.gguf", model, tokenizer, kind), tmp_path / "hf")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, weight in model.state_dict().items():
        if name.endswith(("v_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            expanded = dequantize(quantize(weight.numpy(), kind), kind)
            assert np.array_equal(converted[name].numpy(), expanded), name


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architecture": "qwen2"}, {"got": "qwen2"}),
        ({"rules": "qwen2"}, {"got": "gpt2 qwen2"}),
        ({"without": "feed_forward_length"}, {"got": "none"}),
        ({"scaled": True}, {"got": "llama.rope.scaling.factor"}),
    ],
)
def test_other_models_are_refused_and_leave_nothing(
    tmp_path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, fields: dict[str, Any], reason: dict[str, Any]
) -> None:
    file = write(tmp_path / "model.gguf", model, tokenizer, **fields)
    with refusal(ValueError, **reason):
        to_directory(file, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("size", [0, 3, 40, 5000, -64], ids=lambda size: f"{size} bytes")
def test_a_file_that_is_cut_is_refused(
    tmp_path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, size: int
) -> None:
    file = write(tmp_path / "model.gguf", model, tokenizer)
    file.write_bytes(file.read_bytes()[:size])
    with refusal(ValueError, place=re.compile(r"model\.gguf$")):
        to_directory(file, tmp_path / "hf")


def test_a_conversion_that_was_killed_is_begun_again(
    tmp_path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    """What it had written is in no model directory."""
    (tmp_path / "hf.part").mkdir()
    (tmp_path / "hf.part/tokenizer.json").write_text("{")
    (tmp_path / "hf.part/rest").write_text("")
    file = write(tmp_path / "model.gguf", model, tokenizer)
    to_directory(file, tmp_path / "hf")
    assert not (tmp_path / "hf.part").exists() and not (tmp_path / "hf/rest").exists()
    assert json.loads((tmp_path / "hf/tokenizer.json").read_text())
    with refusal(ValueError, place=f"{file}/hf", got="Not a directory"):
        run_convert(file, file / "hf", None)
