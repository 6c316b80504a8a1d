"""Snapshots: ordinary model directories, whole or absent, and torn or changed files are named."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.receiver_app import tiny_tensors, write_tiny_companions
from tests.refusals import refusal
from tests.tiny_models import tiny_model, write_tiny_model
from tidemill.weightstore.errors import SnapshotBroken
from tidemill.weightstore.format.manifest import ITEM_BYTES, Manifest
from tidemill.weightstore.store import snapshot_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_companions(tmp_path / "model")


def test_safetensors_own_reader_finds_every_tensor_bit_for_bit(tmp_path: Path, model: Path) -> None:
    tensors = tiny_tensors(1) | {f"x.{name}": torch.zeros(3, dtype=getattr(torch, name)) for name in ITEM_BYTES}
    tensors |= {"empty": torch.empty(0, 4), "transposed": torch.randn(4, 6).t()}
    info = snapshot_files.write(tmp_path / "v3", tensors, version=3, step=7, model_dir=model)
    found = load_file(tmp_path / "v3" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(
            found[name].contiguous().reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        ), name
    with safe_open(tmp_path / "v3" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (info.version, info.step, info.digest) == (3, 7, Manifest.of(tensors.items()).digest)
    assert sorted(info.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert snapshot_files.verify(tmp_path / "v3") == info
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "v3"]


@pytest.mark.parametrize("shard_bytes", [snapshot_files.SHARD_BYTES, 40_000])
def test_transformers_loads_it_as_a_model_directory(tmp_path: Path, shard_bytes: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = write_tiny_model(tmp_path / "source", seed=1)
    want = tiny_model(seed=2)
    tensors = {name: tensor.detach() for name, tensor in want.state_dict().items()}
    snapshot_files.write(tmp_path / "export", tensors, version=1, step=1, model_dir=source, shard_bytes=shard_bytes)
    assert (tmp_path / "export" / "model.safetensors.index.json").exists() == (shard_bytes == 40_000)
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").eos_token == "<|im_end|>"
    snapshot_files.verify(tmp_path / "export")


def test_the_configuration_of_plain_tensors_names_no_encoding(tmp_path: Path) -> None:
    """A model that was trained from FP8 files has plain weights: a loader would look for the scales."""
    model_dir = write_tiny_model(tmp_path / "model")
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8"}, "text_config": {"quantization_config": None}}
    (model_dir / "config.json").write_text(json.dumps(config))
    snapshot_files.write(tmp_path / "saved", tiny_tensors(1), version=1, step=1, model_dir=model_dir)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in saved
    assert saved["text_config"] == {}


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
@pytest.mark.parametrize(
    ("named", "saved"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32"), ("float32", "float32")],
)
def test_the_configuration_names_the_dtype_of_the_tensors(tmp_path: Path, field: str, named: str, saved: str) -> None:
    """A loader with dtype="auto" casts to the dtype named there: exported weights would lose bits that the run had."""
    source = write_tiny_model(tmp_path / "source", seed=1)
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype", None), config.pop("torch_dtype", None)
    text = json.dumps(config | {field: named, "vision_config": {field: named, "name": "é"}})
    (source / "config.json").write_text(text)
    dtype = getattr(torch, saved)
    tensors = {
        "weight": torch.randn(64, 64).to(dtype),
        "router": torch.randn(3),
        "bias": torch.zeros(2, dtype=torch.int64),
    }
    snapshot_files.write(tmp_path / "export", tensors, version=1, step=1, model_dir=source)
    written = (tmp_path / "export" / "config.json").read_text()
    assert json.loads(written) == config | {field: saved, "vision_config": {field: saved, "name": "é"}}
    assert (written == text) == (named == saved), "an equal file stays as it is, byte for byte"
    snapshot_files.verify(tmp_path / "export")


def test_a_configuration_without_a_dtype_stays_as_it_is(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text('{"a":  1}')
    snapshot_files.write(tmp_path / "export", tiny_tensors(1), version=1, step=1, model_dir=model)
    assert (tmp_path / "export" / "config.json").read_text() == '{"a":  1}'


NAMED = '{"format": 1, "version": 1, "step": 1, "digest": "", "files": {"a\\u0000": {"bytes": 1, "sha256": ""}}}'


@pytest.mark.parametrize("text", ["[" * 100_000, NAMED])
def test_a_manifest_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SnapshotBroken):
        snapshot_files.SnapshotInfo.parse("there", text)


def test_shards_hold_every_tensor_once(tmp_path: Path) -> None:
    tensors = tiny_tensors(1)
    info = snapshot_files.write(tmp_path / "v1", tensors, version=1, step=1, shard_bytes=10_000)
    index = json.loads((tmp_path / "v1" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == Manifest.of(tensors.items()).num_bytes
    found = {
        name: (file, tensor)
        for file in set(index["weight_map"].values())
        for name, tensor in load_file(tmp_path / "v1" / file).items()
    }
    assert {name: file for name, (file, _) in found.items()} == index["weight_map"]
    assert all(torch.equal(found[name][1], tensor) for name, tensor in tensors.items())
    assert set(index["weight_map"].values()) < set(info.files)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, model: Path, name: str, damage: str) -> None:
    snapshot_files.write(tmp_path / "v1", tiny_tensors(1), version=1, step=1, model_dir=model)
    path = tmp_path / "v1" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "changed":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(SnapshotBroken, match=name):
        snapshot_files.verify(tmp_path / "v1")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 99}', '{"format": 1, "version": 1, "step": 1, "digest": "", "files": {"a": 1}}']
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    snapshot_files.write(tmp_path / "v1", tiny_tensors(1), version=1, step=1)
    (tmp_path / "v1" / snapshot_files.MANIFEST).write_text(text)
    with refusal(SnapshotBroken, file=re.compile(r"manifest\.json$")):
        snapshot_files.verify(tmp_path / "v1")
    with refusal(SnapshotBroken, file=re.compile(r"manifest\.json$")):
        snapshot_files.read_info(tmp_path / "nowhere")


def test_a_write_that_is_broken_off_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    class Torn(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            raise OSError("no space left on device")

    snapshot_files.write(tmp_path / "v1", tiny_tensors(1), version=1, step=1)
    for name in ("v1", "v2"):
        with pytest.raises(OSError, match="no space"):
            snapshot_files.write(tmp_path / name, Torn(tiny_tensors(2)), version=2, step=2)
    assert not (tmp_path / "v2").exists()
    assert snapshot_files.verify(tmp_path / "v1").version == 1
    snapshot_files.write(tmp_path / "v1", tiny_tensors(3), version=3, step=3)
    assert snapshot_files.verify(tmp_path / "v1").version == 3 and not (tmp_path / "v1.part").exists()


def test_a_model_directory_can_be_put_up_as_it_is(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", seed=1)
    info = snapshot_files.adopt(source, tmp_path / "v0", version=0, step=0, digest="d")
    assert snapshot_files.verify(tmp_path / "v0") == info and (info.version, info.digest) == (0, "d")
    assert {path.name for path in source.iterdir()} == set(info.files)
