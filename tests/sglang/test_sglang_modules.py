"""``debug score --by sglang``: a real server agrees with the built-in engine in every module, and the layer with a fault is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.serving.builtin.scoring import score_directory
from launch.cli.main import main
from learner.debug.comparison import Comparison, compare_modules
from learner.debug.module_file import ModuleDump, read_modules
from tests.sglang.server import OVERLAY
from tests.tiny_models import SERVED, write_tiny_model

PROMPTS = [[5, 9, 33, 77, 120, 4, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def compared(model: Path, theirs: ModuleDump) -> Comparison:
    ours = ModuleDump(source="built-in", dtype="float32", prompts=PROMPTS, outputs=score_directory(model, PROMPTS))
    return compare_modules(ours, theirs)


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(one, marks=pytest.mark.slow) for one in SERVED if one != "qwen3_moe")])
def test_it_agrees_in_every_module_and_a_fault_is_named(
    python: str, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(OVERLAY.parents[2])  # paths in the overlay start there
    model = write_tiny_model(tmp_path / "model", family)
    (tmp_path / "prompts.jsonl").write_text("".join(f"{tokens}\n" for tokens in PROMPTS))
    (tmp_path / "server.yaml").write_text(f"engine: {{sglang: {{python: {python}, log: {tmp_path / 'log'}}}}}\n")
    words = ["--by", "sglang", "--config", str(OVERLAY), "--config", str(tmp_path / "server.yaml"), "--out", str(tmp_path / "dump")]
    assert main(["debug", "score", "--model", str(model), "--prompts", str(tmp_path / "prompts.jsonl"), *words]) == 0, capsys.readouterr()
    assert "prompt 1: 11 tokens, mean log-prob" in capsys.readouterr().out
    theirs = read_modules(tmp_path / "dump")
    found = compared(model, theirs)
    assert (found.first, found.notes) == (None, [])
    parts = ("attention.qkv", "attention.core", "attention", *(["mlp.experts"] if family == "qwen3_moe" else []), "mlp")
    assert [name for name in found.compared if name.startswith("layers.1")] == [*(f"layers.1.{part}" for part in parts), "layers.1"]

    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] += 0.01 * torch.ones(1)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    first = compared(model, theirs).first
    assert first is not None and first.name == "layers.1.attention"
