"""Tensors that no backend trains (heads for further tokens, images) are in every directory of a trained model."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.examples import THOROUGH
from tests.mtp_models import NAMED, NUMBERED, files_of, rewrite, write_with_heads
from tests.tiny_models import write_tiny_model
from tidemill.launch.cli.main import main
from tidemill.learner.layout.model_files import beside_text_in, mtp_in
from tidemill.learner.trainer.exports import KeptTensors, digest, write_model
from tidemill.weightstore.format.manifest import Manifest

FAMILIES = (*NUMBERED, *NAMED) if THOROUGH else ("deepseek_v3", "qwen3_5_moe")
NAMES = {
    "deepseek_v3": "model.layers.2.eh_proj.weight",
    "glm_ocr": "model.language_model.layers.2.enorm.weight",
    "bailing_hybrid": "model.layers.3.final_layernorm.weight",
    "glm5_next": "model.layers.2.shared_head.norm.weight",
    "deepseek_v4": "mtp.0.e_proj.weight",
    "ernie4_5_moe": "model.mtp_linear_proj.0.weight",
    "hy_v4": "model.mtp_layers.0.eh_proj.weight",
    "inkling": "model.mtp.layers.0.hidden_norm.weight",
    "longcat_flash": "model.mtp.layers.0.eh_proj.weight",
    "mistral_large4": "mtp_dspark.proj.weight",
    "nemotron3_5_transcribe": "llm.mtp.layers.0.weight",
    "minimax_m3_vl": "language_model.mtp.0.weight",
}
"""A tensor of each kind of names in transformers 5.24 and the releases, of models with two layers."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the variables that the command sets for its process."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    yield


def converted(model: Path, root: Path, backend: str) -> Path:
    """Return the directory that a model becomes by way of a checkpoint."""
    checkpoint, there = root / f"{backend}-checkpoint", root / backend
    assert main(["convert", str(model), str(checkpoint), "--backend", backend]) == 0
    assert main(["convert", str(checkpoint), str(there), "--model", str(model)]) == 0
    return there


def assert_same(there: Path, files: dict[str, Tensor]) -> None:
    """Names, dtypes, shapes and bits."""
    tensors = files_of(there)
    assert tensors.keys() == files.keys()
    assert [name for name, tensor in tensors.items() if tensor.dtype != files[name].dtype] == []
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, files[name])] == []


@pytest.mark.parametrize(
    ("family", "backend"),
    [*((family, "fsdp") for family in FAMILIES), ("deepseek_v3", "megatron"), ("glm4_moe", "megatron")],
)
def test_a_model_with_heads_has_the_same_files_after_a_checkpoint(family: str, backend: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if backend == "fsdp" else torch.float32  # Megatron has biases of routers in float32 alone
    model = write_with_heads(tmp_path / "model", family, dtype=dtype)
    files = files_of(model)
    assert mtp_in(model)
    assert_same(converted(model, tmp_path, backend), files)


@pytest.mark.parametrize(
    ("backend", "family", "norm"),
    [("fsdp", "qwen3_5", "mtp.norm.weight"), ("megatron", "deepseek_v3", "model.layers.4.shared_head.norm.weight")],
)
def test_a_checkpoint_goes_with_the_heads_of_its_own_model(
    backend: str, family: str, norm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of another model are refused: the checkpoint has a digest of them."""
    model = write_with_heads(tmp_path / "model", family)
    converted(model, tmp_path, backend)
    files = files_of(model)
    rewrite(model, files | {norm: files[norm] + 1})
    checkpoint, out = tmp_path / f"{backend}-checkpoint", tmp_path / "out"
    capsys.readouterr()
    assert main(["convert", str(checkpoint), str(out), "--model", str(model)]) == 2
    assert "--model: want a model whose tensors beside the trained ones (MTP, images)" in capsys.readouterr().err


def trained_of(model: Path) -> dict[str, Tensor]:
    """Return the tensors of a model of text, twice as large."""
    beside = beside_text_in(model)
    return {name: 2 * tensor for name, tensor in files_of(model).items() if name not in beside}


def test_images_are_kept_and_shared_copies_are_those_of_the_trained_model(tmp_path: Path) -> None:
    """DeepSeek's heads have copies of the embedding and the output layer, which are shared while they are trained."""
    model = write_with_heads(tmp_path / "model", "deepseek_v3")
    rewrite(model, files_of(model) | {"model.visual.blocks.7.attn.qkv.weight": torch.ones(3, 2)})
    trained = trained_of(model)
    manifest = Manifest.of(trained.items())
    write_model(tmp_path / "there", trained, version=3, step=3, model_dir=model, manifest=manifest)
    shared = {
        "model.layers.4.embed_tokens.weight": trained["model.embed_tokens.weight"],
        "model.layers.4.shared_head.head.weight": trained["lm_head.weight"],
    }
    assert_same(tmp_path / "there", files_of(model) | trained | shared)


def test_encoded_heads_are_plain_in_a_plain_model(tmp_path: Path) -> None:
    """config.json of a trained model has no encoding: loaders would take numbers in FP8 without their factors."""
    model = write_with_heads(tmp_path / "model", "deepseek_v3", dtype=torch.bfloat16)
    name = "model.layers.4.eh_proj.weight"
    files = files_of(model)
    trained = trained_of(model)
    encoded = (files[name].float() * 8).to(torch.float8_e4m3fn)
    files |= {name: encoded, f"{name}_scale_inv": torch.full((1, 1), 0.125)}
    rewrite(model, files, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    kept = KeptTensors(model, trained, Manifest.of(trained.items()))
    assert f"{name}_scale_inv" not in kept
    assert torch.equal(kept[name], (encoded.float() / 8).bfloat16())
    assert {spec.dtype for spec in kept.specs} == {"bfloat16"}


def test_a_start_reads_the_beginning_of_each_head(tmp_path: Path) -> None:
    """Every start computes the digest, also of a head (here a sparse file) that takes minutes to read."""
    write_tiny_model(tmp_path, "qwen3")
    digests = set()
    for value in (b"a", b"b"):
        size = 1 << 40
        tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        header = json.dumps({"mtp.fc.weight": tensor}).encode()
        with (tmp_path / "mtp.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header + value)
            file.truncate(8 + len(header) + size)
        digests.add(digest(tmp_path))
    assert len(digests) == 2


@pytest.mark.parametrize("family", NAMES)
def test_the_heads_of_every_family_are_known_by_their_names(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3")
    tensors = dict.fromkeys(["model.layers.1.self_attn.q_proj.weight", "visual.layers.7.weight"], torch.ones(1))
    rewrite(tmp_path, {name: tensor.clone() for name, tensor in (tensors | {NAMES[family]: torch.ones(1)}).items()})
    assert list(mtp_in(tmp_path)) == [NAMES[family]]
    assert sorted(beside_text_in(tmp_path)) == sorted([NAMES[family], "visual.layers.7.weight"])
