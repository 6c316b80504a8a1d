"""The hook in an SGLang server writes the outputs of each pass under the names of the other implementations; wrong settings are refused."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from actors.config import EngineConfig, SglangConfig
from actors.serving.sglang.inside.tidemill_module_outputs import PATTERNS, hook
from actors.serving.sglang.scoring import score_directory
from launch.cli.main import main
from tests.tiny_models import write_tiny_model

LAYERS, WIDTH = 2, 4


class Choice(NamedTuple):
    """What a router of SGLang returns."""

    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


class Returns(nn.Module):
    """Returns what it is told to."""

    def forward(self, output: Any) -> Any:
        return output


class Model(nn.Module):
    """Modules by SGLang's names, called in the order of a pass. Each number is that of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = Returns(), Returns()
        layers = [{"input_layernorm": Returns(), "self_attn": Attention(), "mlp": Mixture()} for _ in range(LAYERS)]
        self.layers = nn.ModuleList(map(nn.ModuleDict, layers))

    def forward(self, tokens: int) -> None:
        streams = [torch.full((tokens, WIDTH), 100.0 + index) for index in range(LAYERS)]
        self.embed_tokens(torch.full((tokens, WIDTH), 1.0))
        for index, layer in enumerate(self.layers):
            normed = torch.full((tokens, WIDTH), 2.0)
            layer["input_layernorm"](normed if index == 0 else (normed, streams[index - 1]))
            layer["self_attn"](tokens, 10.0 * (index + 1))
            layer["mlp"](tokens, 10.0 * (index + 1))
        self.norm((torch.full((tokens, WIDTH), 3.0), streams[-1]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.attn = Returns(), Returns()

    def forward(self, tokens: int, number: float) -> Tensor:
        value, _ = self.qkv_proj((torch.full((tokens, 3 * WIDTH), number), None))
        value.zero_()  # norms and rotation, in place
        self.attn(torch.full((tokens, 2, WIDTH // 2), number + 1))
        return torch.full((tokens, WIDTH), number + 2)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.topk = Returns()

    def forward(self, tokens: int, number: float) -> Tensor:
        self.topk(Choice(torch.ones(tokens, 2), torch.tensor([[2, 0]] * tokens, dtype=torch.int32), torch.zeros(tokens, 4)))
        return torch.full((tokens, WIDTH), number + 3)


def test_a_pass_is_written_under_the_names_of_the_others(tmp_path: Path) -> None:
    outer = nn.Module()
    outer.model = Model()
    take = hook({"directory": str(tmp_path)})
    for name, module in outer.named_modules():  # as SGLang does
        if any(fnmatch(name, pattern) for pattern in PATTERNS):
            module.register_forward_hook(take)
    for tokens in (3, 1):
        outer.model(tokens)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["000000.safetensors", "000001.safetensors"]
    found = {name.split(".", 1)[1]: value for name, value in sorted(load_file(files[0]).items())}
    in_layer = ("attention.qkv", "attention.core", "attention", "mlp.experts", "mlp")
    layers = [name for layer in range(LAYERS) for name in (*(f"layers.{layer}.{part}" for part in in_layer), f"layers.{layer}")]
    assert list(found) == ["embedding", *layers, "norm"]
    assert {value.shape[0] for value in found.values()} == {3} and {value.dtype for value in found.values()} == {np.dtype(np.float32)}
    numbers = {name: float(value.flat[0]) for name, value in found.items() if not name.endswith("experts")}
    in_layers = [("attention.qkv", 0), ("attention.core", 1), ("attention", 2), ("mlp", 3)]
    of_layers = {f"layers.{layer}.{part}": 10.0 * (layer + 1) + number for layer in range(LAYERS) for part, number in in_layers}
    assert numbers == {"embedding": 1.0, "norm": 3.0, "layers.0": 100.0, "layers.1": 101.0} | of_layers
    assert found["layers.1.mlp.experts"].tolist() == [[1, 0, 1, 0]] * 3
    assert found["layers.0.attention.core"].shape == (3, WIDTH)
    assert {value.shape[0] for value in load_file(files[1]).values()} == {1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arguments": {"tp_size": 2}}, "engine.sglang.arguments.tp_size: want 1, got 2; "),
        ({"arguments": {"pp_size": 4}}, "engine.sglang.arguments.pp_size: want 1, got 4; "),
        ({"url": "http://127.0.0.1:1"}, "engine.sglang.url: want none, .*--engine asks a running one"),
    ],
)
def test_a_server_of_several_ranks_or_of_others_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score_directory(tmp_path, [[1, 2]], "*", EngineConfig(kind="sglang", sglang=SglangConfig(**settings)))


def test_a_server_that_does_not_start_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("[1, 2, 3]\n")
    (tmp_path / "run.yaml").write_text("engine: {sglang: {python: no-such-interpreter}}\n")
    words = ["debug", "score", "--model", str(model), "--prompts", str(tmp_path / "prompts.jsonl"), "--config", str(tmp_path / "run.yaml")]
    assert main([*words, "--by", "learner"]) == 2
    assert "--config: want it with --by sglang, got --by learner" in capsys.readouterr().err
    assert main([*words, "--by", "sglang"]) == 2
    assert "no-such-interpreter" in capsys.readouterr().err
