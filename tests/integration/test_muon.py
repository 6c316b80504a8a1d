"""Muon takes the same steps on Megatron, in every layout, as on FSDP2; its state continues in others, to the same bits
in its own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import muon_ranks
from tests.integration.fsdp_state_ranks import write_model
from tests.integration.muon_ranks import RUNS, STEPS, exact, opened, train, weights
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.same_metrics import assert_same
from tidemill.learner.backends.fsdp.backend import FsdpBackend
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.layout.parallel import Parallel

COMPARED = [name for name, run in RUNS.items() if run.dtype == "float32"]


class World:
    """Results of two ranks, their checkpoints, and models."""

    def __init__(self, root: Path) -> None:
        self.models = {family: write_model(root / family, family) for family in {run.family for run in RUNS.values()}}
        self.checkpoints, out = root / "checkpoints", root / "out"
        self.checkpoints.mkdir()
        out.mkdir()
        arguments = (self.models, self.checkpoints)
        self.ranks: list[dict[str, Any]] = run_ranks(muon_ranks.main, arguments, world=2, out=out, timeout_s=400)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def here() -> Iterator[Parallel]:
    with one_rank() as parallel, exact():
        yield parallel


@pytest.mark.parametrize("name", COMPARED)
def test_megatron_takes_the_steps_of_fsdp(world: World, here: Parallel, name: str) -> None:
    run = RUNS[name]
    learner = opened(world.models[run.family], here, run.alone, FsdpBackend(), run.dtype)
    wanted = [train(learner, step) for step in STEPS]
    for rank in world.ranks:
        for metrics, wanted_metrics in zip(rank[name]["metrics"], wanted, strict=True):
            assert_same(metrics, wanted_metrics)
        assert rank[name]["weights"] == pytest.approx(weights(learner), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_a_restart_has_the_same_bits(world: World, name: str) -> None:
    for rank in world.ranks:
        unbroken, resumed = rank[name]["digests"]
        assert resumed == unbroken


@pytest.mark.parametrize("name", COMPARED)
def test_one_rank_continues_what_two_have_saved(world: World, here: Parallel, name: str) -> None:
    run = RUNS[name]
    learner = opened(world.models[run.family], here, run.alone, MegatronBackend(), run.dtype)
    assert learner.load(world.checkpoints / name) == STEPS[0]
    assert_same(train(learner, STEPS[1]), world.ranks[0][name]["metrics"][1])
    assert weights(learner) == pytest.approx(world.ranks[0][name]["weights"], rel=1e-5, abs=1e-5)
