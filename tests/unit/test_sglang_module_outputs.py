"""The hook in an SGLang server writes the outputs of each pass under the names of the other implementations; wrong
settings are refused.
"""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.actors.config import EngineConfig, SglangConfig
from tidemill.actors.serving.sglang.inside.tidemill_module_outputs import PATTERNS, hook
from tidemill.actors.serving.sglang.scoring import score_directory
from tidemill.launch.cli.main import main

LAYERS, WIDTH, EXPERTS = 2, 4, 4


class Choice(NamedTuple):
    """A router's choice, as SGLang returns it in its standard format."""

    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


class Postponed(NamedTuple):
    """The output of a router that leaves the choice to the kernel of the experts."""

    hidden_states: Tensor
    router_logits: Tensor


class Returns(nn.Module):
    """A module that returns its input."""

    def forward(self, output: Any) -> Any:
        return output


class Model(nn.Module):
    """Modules under SGLang's names, called in the order of a pass; their outputs are full of numbers that differ."""

    def __init__(self, choice: Any, mixture: str, *, sandwich: bool) -> None:
        super().__init__()
        self.embed_tokens, self.norm, self.choice, self.mixture, self.sandwich = (
            Returns(),
            Returns(),
            choice,
            mixture,
            sandwich,
        )
        names = ("input_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.Module()
            for name in names:
                setattr(layer, name, Returns())
            layer.self_attn = Attention()
            setattr(layer, mixture, Mixture())
            self.layers.append(layer)

    def forward(self, tokens: int) -> None:
        streams = [torch.full((tokens, WIDTH), 100.0 + index) for index in range(LAYERS)]
        self.embed_tokens(torch.full((tokens, WIDTH), 1.0))
        for index, layer in enumerate(self.layers):
            normed, number = torch.full((tokens, WIDTH), 2.0), 10.0 * (index + 1)
            layer.input_layernorm(normed if index == 0 else (normed, streams[index - 1]))
            layer.self_attn(tokens, number)
            if self.sandwich:
                layer.post_self_attn_layernorm(torch.full((tokens, WIDTH), number + 5))
            getattr(layer, self.mixture)(tokens, number, self.choice)
            if self.sandwich:
                layer.post_mlp_layernorm(torch.full((tokens, WIDTH), number + 6))
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

    def forward(self, tokens: int, number: float, choice: Any) -> Tensor:
        self.topk(choice(tokens))
        return torch.full((tokens, WIDTH), number + 3)


def chosen(tokens: int) -> Choice:
    """Return experts 2 and 0 of four for each token, the expert that all tokens share, and padding."""
    return Choice(
        torch.ones(tokens, 4),
        torch.tensor([[2, 0, EXPERTS, -1]] * tokens, dtype=torch.int32),
        torch.zeros(tokens, EXPERTS),
    )


def postponed(tokens: int) -> Postponed:
    return Postponed(torch.zeros(tokens, WIDTH), torch.zeros(tokens, EXPERTS))


@pytest.mark.parametrize(
    ("choice", "mixture", "sandwich"),
    [(chosen, "mlp", False), (chosen, "block_sparse_moe", False), (postponed, "mlp", True)],
)
def test_a_pass_is_written_under_the_names_of_the_others(
    tmp_path: Path, choice: Any, mixture: str, sandwich: bool
) -> None:
    outer = nn.Module()
    outer.model = Model(choice, mixture, sandwich=sandwich)
    take = hook({"directory": str(tmp_path)})
    for name, module in outer.named_modules():  # as SGLang does
        if any(fnmatch(name, pattern) for pattern in PATTERNS):
            module.register_forward_hook(take)
    for tokens in (3, 1):
        outer.model(tokens)
    first, second = sorted(tmp_path.iterdir())
    assert first.suffix == second.suffix == ".safetensors"
    found = {name.split(".", 1)[1]: value for name, value in sorted(load_file(first).items())}
    in_layer = ["attention.qkv", "attention.core", "attention", "mlp"]
    if choice is chosen:
        in_layer.insert(3, "mlp.experts")
    layers = [
        name
        for layer in range(LAYERS)
        for name in (*(f"layers.{layer}.{part}" for part in in_layer), f"layers.{layer}")
    ]
    assert list(found) == ["embedding", *layers, "norm"]
    assert {value.shape[0] for value in found.values()} == {3} and {value.dtype for value in found.values()} == {
        np.dtype(np.float32)
    }
    numbers = {name: float(value.flat[0]) for name, value in found.items() if not name.endswith("experts")}
    in_layers = [
        ("attention.qkv", 0),
        ("attention.core", 1),
        ("attention", 5 if sandwich else 2),
        ("mlp", 6 if sandwich else 3),
    ]
    of_layers = {
        f"layers.{layer}.{part}": 10.0 * (layer + 1) + number for layer in range(LAYERS) for part, number in in_layers
    }
    assert numbers == {"embedding": 1.0, "norm": 3.0, "layers.0": 100.0, "layers.1": 101.0} | of_layers
    assert found["layers.0.attention.core"].shape == (3, WIDTH)
    if choice is chosen:
        assert found["layers.1.mlp.experts"].tolist() == [[1, 0, 1, 0]] * 3
    assert {value.shape[0] for value in load_file(second).values()} == {1}


def test_the_models_of_one_process_do_not_overwrite_each_other(tmp_path: Path) -> None:
    models = [Model(chosen, "mlp", sandwich=False) for _ in range(2)]
    for model in models:
        model.register_forward_hook(hook({"directory": str(tmp_path)}))
    for model in models:
        model(3)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"arguments": {"tp_size": 2}},
            {"place": "engine.sglang.arguments.tp_size", "got": "2: each rank computes a part of the outputs"},
        ),
        (
            {"arguments": {"pp-size": 4}},
            {"place": "engine.sglang.arguments.pp_size", "got": "4: each rank computes a part of the outputs"},
        ),
        (
            {"arguments": {"data-parallel-size": 2}},
            {"place": "engine.sglang.arguments.dp_size", "got": "2: each rank computes a part of the outputs"},
        ),
        (
            {"arguments": {"speculative_algorithm": "STANDALONE"}},
            {"place": "engine.sglang.arguments.speculative_algorithm"},
        ),
        ({"arguments": {"forward-hooks": "[]"}}, {"place": "engine.sglang.arguments.forward_hooks"}),
        ({"url": "http://127.0.0.1:1"}, {"place": "engine.sglang.url"}),
    ],
)
def test_a_server_of_several_ranks_or_of_others_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: dict[str, Any]
) -> None:
    with refusal(ValueError, **message):
        score_directory(tmp_path, [[1, 2]], "*", EngineConfig(kind="sglang", sglang=SglangConfig(**settings)))


def test_what_cannot_be_scored_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "model")
    prompts, config = tmp_path / "prompts.jsonl", tmp_path / "run.yaml"
    prompts.write_text("[1, 2, 3]\n[1, 999999]\n")
    config.write_text("engine: {sglang: {python: unused}}\n")
    monkeypatch.setenv("TIDEMILL_ENGINE__SGLANG__PYTHON", "no-such-interpreter")
    words = ["debug", "score", "--prompts", str(prompts), "--config", str(config)]
    assert main([*words, "--model", str(model), "--by", "learner"]) == 2
    assert "--config: want it with --by sglang, got --by learner" in capsys.readouterr().err
    assert main([*words, "--engine", "http://127.0.0.1:1"]) == 2
    assert "--config: want it with --by sglang, got --engine" in capsys.readouterr().err
    assert main([*words, "--model", str(model), "--by", "sglang"]) == 78
    assert "prompt 1: want tokens below" in capsys.readouterr().err
    prompts.write_text("[1, 2, 3]\n")
    assert main([*words, "--model", str(model), "--by", "sglang"]) == 2
    told = capsys.readouterr().err
    assert (
        "starting SGLang with no-such-interpreter; its output: " in told and "the SGLang server ended with code" in told
    )
