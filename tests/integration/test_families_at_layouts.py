"""Every family of models in every layout of two ranks: scores and steps of one process, files and checkpoints bit for
bit.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.integration import family_ranks
from tests.integration.expert_ranks import VOCAB, learner, take
from tests.integration.family_ranks import MODELS, RARE_RUNS, RUNS, STEPS, scores, way_of
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.same_metrics import assert_same
from tests.tiny_models import write_tiny_model
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.ranks.conversion import Conversion


class World:
    """Results of one process, and of two ranks in ``runs``."""

    def __init__(self, root: Path, runs: list[tuple[str, str]]) -> None:
        self.root, self.runs, self.one = root, runs, dict[str, dict[str, Any]]()
        self.model_dirs, self.checkpoints = dict[str, Path](), dict[str, Path]()
        names = sorted({name for name, _ in runs})
        with one_rank() as here:
            for name in names:
                family, changes = MODELS[name]
                self.model_dirs[name] = write_tiny_model(root / name, family, vocab_size=VOCAB, **changes)
                self.checkpoints[name] = root / f"{name}, checkpoint"
                Conversion(MegatronBackend(), here).to_checkpoint(self.model_dirs[name], self.checkpoints[name])
                made = learner(self.model_dirs[name], here, way_of("1"))
                self.one[name] = {"log_probs": scores(made, here), "metrics": take(made, STEPS, here, way_of("1"))}

    @cached_property
    def ranks(self) -> list[dict[str, Any]]:
        (out := self.root / "out").mkdir()
        return run_ranks(
            family_ranks.main, (self.model_dirs, self.checkpoints, self.runs), world=2, out=out, timeout_s=400
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), RUNS)


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("rare"), RARE_RUNS)


@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_a_family_at_a_layout(world: World, name: str, layout: str) -> None:
    _check(world, name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), RARE_RUNS)
def test_another_family_at_a_layout(rare: World, name: str, layout: str) -> None:
    _check(rare, name, layout)


def _check(world: World, name: str, layout: str) -> None:
    """Compare log-probs and the metrics of two steps with one process; exports, and conversions both ways, with the
    files.

    For pushes, every tensor is sent by one rank, whole.
    """
    one, replicas = world.one[name], 2 if layout in ("EP2", "DP2, distributed") else 1
    for rank in world.ranks:
        ours = rank[f"{name} {layout}"]
        assert ours["exported"] == ours["sent"] == []
        assert ours["loaded"] == []
        if replicas == 1:
            assert len(ours["log_probs"]) == len(one["log_probs"]) > 1
            for found, wanted in zip(ours["log_probs"], one["log_probs"], strict=True):
                np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
        for found, wanted in zip(ours["metrics"], one["metrics"], strict=True):
            assert_same(found, wanted)
    out = world.root / "out" / f"{name} {layout}"
    with one_rank() as here:
        assert (
            Conversion(MegatronBackend(), here).to_model(out / "saved", out / "model", world.model_dirs[name])
            == STEPS[-1]
        )
    found, wanted = load_file(out / "model" / "model.safetensors"), load_file(out / "weights.safetensors")
    assert found.keys() == wanted.keys()
    assert [weight for weight in found if not torch.equal(found[weight], wanted[weight])] == []
    before = load_file(world.model_dirs[name] / "model.safetensors")
    assert not any(torch.equal(before[weight], found[weight]) for weight in found if weight.endswith("proj.weight")), (
        "it was trained"
    )
