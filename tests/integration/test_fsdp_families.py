"""Every family of ``tests.families`` under fully_shard: a row of sequences is what transformers computes for each one
alone, gradients included, and the export is the files bit for bit.

``make test-families`` tries all of them, ``make test`` one of each kind.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples import THOROUGH
from tests.families import (
    FAMILIES,
    KINDS,
    LENGTHS,
    PAGE,
    config_of,
    one_place,
    page_rows,
    plain_model,
    sequences,
    table_row,
    write_family,
)
from tests.integration import fsdp_family_ranks
from tests.integration.fsdp_family_ranks import LORA, AdaptedModel, adapted, measured, routed, row_pass
from tests.learner_steps import run_ranks
from tests.refusals import refusal
from tidemill.actors.config import EngineConfig
from tidemill.actors.serving.builtin.engine import open_model as open_engine
from tidemill.actors.serving.builtin.input_scores import Scoring
from tidemill.actors.serving.builtin.weights import load_from_bucket
from tidemill.bus.wire.model_values import language_values
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.backends.fsdp.lora import add_adapters
from tidemill.learner.backends.fsdp.model import Place, open_model
from tidemill.learner.backends.fsdp.opening import Transformer, build, without_noise
from tidemill.learner.backends.fsdp.policy import Replay
from tidemill.learner.backends.fsdp.self_test import TOLERANCE, Alone, randomize
from tidemill.learner.errors import ConfigRefused
from tidemill.weightstore.format.manifest import Bucket, spec_of

TRIED = list(FAMILIES) if THOROUGH else list(KINDS)
ROUTED = [name for name, cells in page_rows(PAGE.read_text()).items() if cells[4] == "yes"]
"""Families with experts, whose routing can be replayed."""
LOG_PROBS, GRADIENTS = 5e-5, 2e-5
"""Largest differences in float32: of a log-prob, in nats, and of a gradient relative to the largest."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of the families by their names."""
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(root / name, name) for name in TRIED}


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with one_place() as here:
        yield here


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the models that two ranks export, by their names."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(directories: dict[str, Path], exports: Path) -> list[dict[str, Any]]:
    """Results of two ranks, which compute the layers again in the backward pass."""
    return run_ranks(fsdp_family_ranks.main, (list(directories.values()),), world=2, out=exports)


def assert_close(result: dict[str, Any]) -> None:
    assert result["log_probs"] < LOG_PROBS
    assert result["gradients"] < GRADIENTS
    assert result["export"] == []


@pytest.mark.parametrize("name", TRIED)
def test_a_row_is_what_each_sequence_is_alone(name: str, directories: dict[str, Path], place: Place) -> None:
    model, result = measured(directories[name])
    assert_close(result)
    assert table_row(name, model, directories[name]) == page_rows(PAGE.read_text())[name][:-2]


@pytest.mark.parametrize("name", TRIED)
def test_two_ranks_sum_the_gradients_of_their_rows(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_close(rank[name])


def assert_adapted(result: dict[str, Any]) -> None:
    assert result["log_probs"] < LOG_PROBS
    assert result["gradients"] < GRADIENTS
    assert result["export"] < 1e-6
    assert (result["trained"], result["dtypes"], result["adapters"], result["not counted"]) == ([], [], [], 0)


@pytest.mark.parametrize("name", [name for name in TRIED if page_rows(PAGE.read_text())[name][4]])
def test_adapters_of_experts_are_the_merged_weights(name: str, ranks: list[dict[str, Any]]) -> None:
    """On two ranks, in passes and gradients, in the export, and in files as PEFT has them, which the model begins
    with.
    """
    for rank in ranks:
        assert_adapted(rank[name]["adapted"])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.usefixtures("place")
def test_adapters_are_in_every_implementation_of_experts(name: str, experts: str, tmp_path: Path) -> None:
    assert_adapted(adapted(write_family(tmp_path / name, name), experts=experts))


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_no_sum_of_weights_and_adapters_is_kept_for_the_backward_pass(experts: str, tmp_path: Path) -> None:
    """Of the size of the experts of a layer only their own weights are."""
    model = plain_model(write_family(tmp_path, "qwen3_moe"))
    add_adapters(model, config=replace(LORA, targets=("experts.gate_up_proj", "experts.down_proj")))
    model.set_experts_implementation(experts)
    randomize(model)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    size = min(weight.numel() for name, weight in model.named_parameters() if name.endswith("experts.down_proj"))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=sequences()[0][None], use_cache=False).logits.sum().backward()
    large = [tensor for tensor in kept if tensor.untyped_storage().nbytes() >= size * tensor.element_size()]
    assert large and all(tensor.untyped_storage().data_ptr() in weights for tensor in large)
    assert all((weight.grad is not None) is (".lora_" in name) for name, weight in model.named_parameters())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.usefixtures("place")
def test_an_engine_computes_with_pushed_adapters_of_experts(name: str, tmp_path: Path) -> None:
    """The decoder, and the runner of transformers, receive merged weights by the names of the files."""
    directory = write_family(tmp_path / name, name)
    ours, tokens = AdaptedModel(directory), sequences()[LENGTHS.index(max(LENGTHS))]
    wanted_TV, _ = row_pass(ours.model)
    first = sum(LENGTHS[: LENGTHS.index(max(LENGTHS))])
    wanted = wanted_TV[first : first + len(tokens) - 1].gather(1, tokens[1:, None])[:, 0]
    engine = open_engine(directory, EngineConfig(device="cpu", kv_tokens=64))
    scoring = Scoring(tokens=tokens.numpy().astype(np.int32), start=0, temperature=1.0, top_k=0)
    (before,) = engine.runner.scores([scoring], 0)
    pushed = engine.weights.empty_copy(())
    for name_in_file, tensor in ours.exported().items():
        spec, message = spec_of(name_in_file, tensor), tensor.contiguous().flatten().view(torch.uint8)
        load_from_bucket(pushed, Bucket(specs=(spec,), num_bytes=len(message)), message)
    pushed.finalize()
    engine.runner.weights = pushed
    (scores,) = engine.runner.scores([scoring], 1)
    np.testing.assert_allclose(scores.log_probs_P, wanted, atol=LOG_PROBS, rtol=0)
    assert np.abs(scores.log_probs_P - before.log_probs_P).max() > 0.05


@pytest.mark.parametrize("name", TRIED)
def test_every_exported_tensor_has_one_sender(name: str, ranks: list[dict[str, Any]]) -> None:
    senders = Counter(tensor for rank in ranks for tensor in rank[name]["sent"])
    assert set(senders.values()) == {1}
    assert all(rank[name]["sent"] for rank in ranks)


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.usefixtures("ranks")
def test_transformers_and_the_engine_load_the_export_of_two_ranks(
    name: str, directories: dict[str, Path], exports: Path
) -> None:
    tokens = sequences()[LENGTHS.index(max(LENGTHS))]
    with torch.inference_mode():
        logits = [plain_model(path)(input_ids=tokens[None]).logits[0] for path in (directories[name], exports / name)]
        scoring = Scoring(tokens=tokens.numpy().astype(np.int32), start=0, temperature=1.0, top_k=0)
        (scores,) = open_engine(exports / name, EngineConfig(device="cpu", kv_tokens=64)).runner.scores([scoring], 0)
    assert torch.equal(*logits)
    wanted = logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    np.testing.assert_allclose(scores.log_probs_P, wanted, atol=LOG_PROBS, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ROUTED, "longcat_flash"])  # whose router has experts that do nothing, too
def test_routers_take_known_experts(name: str, place: Place, tmp_path: Path) -> None:
    assert_routed(routed(open_model(write_family(tmp_path, name), dtype="float32", place=place, recompute=True)))


@pytest.mark.parametrize("name", [name for name in ROUTED if name in TRIED])
def test_routers_of_two_ranks_take_known_experts(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_routed(rank[name]["routed"])


def assert_routed(changes: dict[str, float]) -> None:
    """Experts of the router's own choice change no bit of log-probs and gradients, nor do unknown ones; others do. A
    row of sequences has the experts of each one alone, recorded and given.
    """
    assert changes["own"] == changes["unknown"] == changes["recorded"] == 0.0
    assert changes["others"] > 1e-3
    assert changes["alone"] < LOG_PROBS


@pytest.mark.parametrize("name", ROUTED)
def test_an_engine_and_the_learner_number_the_same_layers_with_experts(name: str) -> None:
    config = config_of(name)
    with torch.device("meta"):
        model = build(without_noise(config), packed=False).model
    routers = [path for path, module in model.named_modules() if type(module).__name__.lower().endswith("router")]
    shape = RoutedShape.of(language_values(json.loads(config.to_json_string())))
    assert shape is not None and shape.num_layers == config.num_hidden_layers
    assert list(shape.layers) == [int(re.findall(r"layers\.(\d+)", path)[0]) for path in routers]
    assert (shape.num_experts, shape.top_k) in {(8, 2), (4, 2), (4, 1)}
    for other in (replace(shape, layers=(*shape.layers[:-1], 7)), replace(shape, num_experts=9)):
        with refusal(ConfigRefused, field="learner.routing_replay"):
            Replay(model, replays=True, given=other)
    routing = Replay(model, replays=True, given=shape)
    assert len(routing.own(torch.zeros(5, len(shape.layers), shape.top_k))) == len(routers)
    with refusal(ConfigRefused, place="learner.routing_replay"):
        routing.own(torch.zeros(5, len(shape.layers) + 1, shape.top_k))


def test_the_page_has_every_family() -> None:
    assert list(page_rows(PAGE.read_text())) == list(FAMILIES)


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoehybrid", "qwen3_next", "lfm2", "kimi_linear"])
def test_rows_that_transformers_packs_by_position_ids_leak(name: str) -> None:
    """The reason for packed attention and for mixers by bucket: without them the sequences of a row read each other,
    and nothing says so.
    """
    torch.manual_seed(0)
    config = without_noise(config_of(name))
    plain = build(config, packed=False)
    randomize(plain.model)
    leaking = Transformer(plain.model, plain.row, plain.mixers, packed=True)
    alone = Alone.of(plain, sequences())
    assert alone.difference(plain) < TOLERANCE["cpu"] / 10
    assert alone.difference(leaking) > 100 * TOLERANCE["cpu"]
