"""Learners on FSDP2 continue from their checkpoints: with the same bits on as many ranks, and with the same numbers on
others.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import fsdp_state_ranks
from tests.integration.fsdp_state_ranks import (
    BASE,
    KINDS,
    LORA,
    OF_EXPERTS,
    OPTIMIZER,
    OTHER_FAMILIES,
    SAVED,
    STEPS,
    TRIED,
    WITH_HEADS,
    Kind,
    beside_torch,
    opened,
    trained,
    write_model,
)
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.refusals import refusal
from tests.same_metrics import assert_same
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.exports import write_adapter

FAMILIES = ("qwen3", "qwen3_moe", "lfm2")
"""Of the tests of refused settings."""
LOOSE = ("bfloat16", "muon", "muon of experts")
"""Kinds that compute in bfloat16 (Muon its updates), which rounds a last digit of float32 to other neighbours."""


class World:
    """Checkpoints of two ranks, their results, and models."""

    def __init__(self, root: Path) -> None:
        self.models = {
            family: write_model(root / family, family)
            for family in {*FAMILIES, *(kind.family for kind in TRIED.values())}
        }
        self.root, self.checkpoints = root, root / "checkpoints"
        self.checkpoints.mkdir()
        (root / "out").mkdir()
        arguments = (self.models, self.checkpoints)
        self.ranks: list[dict[str, Any]] = run_ranks(
            fsdp_state_ranks.main, arguments, world=2, out=root / "out", timeout_s=400
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def here() -> Iterator[Parallel]:
    with one_rank() as parallel:
        yield parallel


@pytest.mark.parametrize("name", TRIED)
def test_a_restart_on_as_many_ranks_has_the_same_bits(world: World, name: str) -> None:
    for rank in world.ranks:
        whole, resumed = rank[name]["whole"], rank[name]["resumed"]
        assert resumed["digest"] == whole["digest"]
        assert _values(resumed["metrics"][-1]) == _values(whole["metrics"][-1])


@pytest.mark.parametrize("name", [name for name in TRIED if name not in LOOSE])
def test_one_rank_trains_as_two(world: World, here: Parallel, name: str) -> None:
    kind = KINDS[name]
    learner = opened(world.models[kind.family], here, kind)
    for metrics, wanted in zip(trained(learner, kind, STEPS), world.ranks[0][name]["whole"]["metrics"], strict=True):
        assert_same(metrics, wanted)


@pytest.mark.parametrize("name", [name for name in LOOSE if name in TRIED])
def test_one_rank_trains_nearly_as_two(world: World, here: Parallel, name: str) -> None:
    kind = KINDS[name]
    learner = opened(world.models[kind.family], here, kind)
    for metrics, wanted in zip(trained(learner, kind, STEPS), world.ranks[0][name]["whole"]["metrics"], strict=True):
        for metric in ("train/loss", "train/grad_norm", "train/entropy"):
            assert metrics[metric] == pytest.approx(wanted[metric], rel=0.02, abs=0.002)


@pytest.mark.parametrize("name", [name for name in TRIED if name not in LOOSE])
def test_one_rank_continues_what_two_have_saved(world: World, here: Parallel, name: str) -> None:
    kind = KINDS[name]
    learner = opened(world.models[kind.family], here, kind)
    assert learner.load(world.checkpoints / name) == SAVED
    [metrics] = trained(learner, kind, STEPS[2:])
    assert_same(metrics, world.ranks[0][name]["whole"]["metrics"][-1])


SHARED = [
    name for name, kind in TRIED.items() if kind.family not in (*OTHER_FAMILIES, WITH_HEADS) and name not in LOOSE
]


@pytest.mark.parametrize("name", SHARED)
def test_both_backends_train_every_kind_the_same(world: World, here: Parallel, name: str) -> None:
    kind = KINDS[name]
    learner = opened(world.models[kind.family], here, kind, MegatronBackend())
    for metrics, wanted in zip(trained(learner, kind, STEPS), world.ranks[0][name]["whole"]["metrics"], strict=True):
        assert_same(metrics, wanted)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(world: World) -> None:
    assert [rank["poisoned"] for rank in world.ranks] == [{"skipped": 1.0, "stayed": True, "next": 0.0}] * 2


def test_every_tensor_has_one_sender(world: World) -> None:
    assert [rank["not sent once"] for rank in world.ranks] == [[], []]


def test_muon_of_torch_makes_the_same_update(world: World, here: Parallel) -> None:
    """Also of matrices that are divided over two ranks."""
    for difference in (beside_torch(world.models["qwen3"], here), *(rank["beside torch"] for rank in world.ranks)):
        assert difference < 1e-6


def test_adapters_are_those_of_megatron(world: World, here: Parallel, tmp_path: Path) -> None:
    """Their matrices by PEFT's names, the merged weights, and a run that begins with them."""
    kind = KINDS["lora"]
    ours, theirs = (opened(world.models["qwen3"], here, kind, backend) for backend in (None, MegatronBackend()))
    for learner in (ours, theirs):
        trained(learner, kind, STEPS[:2])
    for export in ("export_adapters", "export"):
        found, wanted = (dict(getattr(learner.policy, export)()) for learner in (ours, theirs))
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], atol=1e-5, rtol=1e-5)
    write_adapter(tmp_path / "adapter", dict(ours.policy.export_adapters()), LORA, world.models["qwen3"])
    beginning = replace(kind, learner=replace(kind.learner, lora=replace(LORA, adapter=str(tmp_path / "adapter"))))
    again = opened(world.models["qwen3"], here, beginning)
    assert again.policy.begins_apart
    assert again.policy.digest() == ours.policy.digest()


@pytest.mark.parametrize(
    ("family", "changes", "place"),
    [
        ("qwen3_moe", {"optimizer": replace(OPTIMIZER, freeze=(r"experts\.0\.",))}, "learner.optimizer.freeze"),
        ("qwen3", {"optimizer": replace(OPTIMIZER, freeze=("",))}, "learner.optimizer.freeze"),
        ("qwen3", {"routing_replay": "old"}, "learner.routing_replay"),
        ("lfm2", {"lora": LORA}, "learner.lora.targets"),
        ("qwen3", {"lora": OF_EXPERTS}, "learner.lora.targets"),
    ],
)
def test_settings_that_a_model_cannot_have_are_refused(
    world: World, here: Parallel, family: str, changes: dict[str, Any], place: str
) -> None:
    with refusal(ConfigRefused, place=place):
        opened(world.models[family], here, Kind(learner=replace(BASE, **changes)))


def test_a_checkpoint_of_the_other_backend_is_refused(world: World, here: Parallel, tmp_path: Path) -> None:
    kind = KINDS["offload"]
    ours, theirs = (opened(world.models["qwen3"], here, kind, backend) for backend in (None, MegatronBackend()))
    with refusal(ConfigRefused, place="learner.backend", got="megatron"):
        theirs.load(world.checkpoints / "offload")
    theirs.save(tmp_path, SAVED)
    with refusal(ConfigRefused, place="learner.backend", got="fsdp"):
        ours.load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(world: World, here: Parallel) -> None:
    learner = opened(write_model(world.root / "wide", "qwen3", intermediate_size=96), here, KINDS["offload"])
    with refusal(ConfigRefused, place="model.path"):
        learner.load(world.checkpoints / "offload")


def _values(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "second" not in name}
