"""``debug score --by sglang``: a real server agrees with the learner in every module, and the layer with a fault is
named.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.launched import Ended, run_tidemill
from tests.sglang.server import OVERLAY
from tests.tiny_models import write_tiny_model
from tidemill.learner.debug.train_file import read_modules

PROMPTS = [[5, 9, 33, 77, 120, 4, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe")


class Scene:
    """A directory with a model, prompts and dumps."""

    def __init__(self, root: Path, family: str) -> None:
        self.root, self.model = root, write_tiny_model(root / "model", family)
        (root / "prompts.jsonl").write_text("".join(f"{tokens}\n" for tokens in PROMPTS))

    def score(self, by: str, *words: str) -> Ended:
        prompts, dump = self.root / "prompts.jsonl", self.root / by
        score = [
            "debug",
            "score",
            "--model",
            str(self.model),
            "--prompts",
            str(prompts),
            "--by",
            by,
            "--out",
            str(dump),
            "--names",
            "*",
        ]
        return run_tidemill(*score, *words)

    def compare(self) -> Ended:
        return run_tidemill("debug", "compare", str(self.root / "learner"), str(self.root / "sglang"))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("qwen2", "llama", "mistral", "mixtral", "glm4", "glm4_moe")
        ),
    ],
)
def test_it_agrees_in_every_module_and_a_fault_is_named(python: str, tmp_path: Path, family: str) -> None:
    scene = Scene(tmp_path, family)
    (tmp_path / "server.yaml").write_text(
        f"engine: {{sglang: {{python: {Path(python).absolute()}, log: {tmp_path / 'log'}}}}}\n"
    )
    for done in (
        scene.score("sglang", "--config", str(OVERLAY), "--config", str(tmp_path / "server.yaml")),
        scene.score("learner"),
    ):
        assert done.returncode == 0, done.output
        assert "prompt 1: 11 tokens, mean log-prob" in done.out
    found = scene.compare()
    assert (found.returncode, found.out.count("\n")) == (0, 1), found.output  # no module is in one dump only
    mixture = family in MIXTURES
    layer = [
        f"layers.1{part}"
        for part in (".attention.qkv", ".attention.core", ".attention", *[".mlp.experts"] * mixture, ".mlp", "")
    ]
    theirs = read_modules(tmp_path / "sglang")
    assert [name for name in theirs.outputs if name.startswith("1.layers.1")] == [f"1.{name}" for name in layer]
    assert theirs.dtype == "float32"

    tensors = load_file(scene.model / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] += 0.01 * torch.ones(1)
    save_file(tensors, scene.model / "model.safetensors", metadata={"format": "pt"})
    assert scene.score("learner").returncode == 0
    found = scene.compare()
    assert found.returncode == 1 and "DIFFERS first in layers.1.attention: " in found.out, found.output
