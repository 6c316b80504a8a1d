"""Two copies of a model, each in two parts by FSDP2, train as one rank does, and as one copy in four parts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import hsdp_ranks
from tests.integration.fsdp_state_ranks import KINDS, SAVED, STEPS, VOCAB, opened, trained, write_model
from tests.integration.hsdp_ranks import COPIES, TRIED, other
from tests.integration.muon_ranks import exact
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.same_metrics import TIMES, assert_same
from tidemill.learner.layout.parallel import Parallel


class World:
    """A model, checkpoints of four ranks, and their results."""

    def __init__(self, root: Path) -> None:
        self.model_dir, self.checkpoints = write_model(root / "model", "qwen3"), root / "checkpoints"
        self.checkpoints.mkdir()
        (root / "out").mkdir()
        arguments = (self.model_dir, self.checkpoints)
        self.ranks: list[dict[str, Any]] = run_ranks(
            hsdp_ranks.main, arguments, world=4, out=root / "out", timeout_s=500
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def here() -> Iterator[Parallel]:
    with one_rank() as parallel, exact():
        yield parallel


def test_each_copy_has_the_whole_model_and_the_first_is_sent(world: World) -> None:
    assert [rank["parts"]["rows"] for rank in world.ranks] == [[VOCAB // 2]] * 4
    assert [rank["parts"]["not sent once"] for rank in world.ranks] == [[]] * 4
    assert [rank["parts"]["exports"] > 0 for rank in world.ranks] == [True, False, False, False]


@pytest.mark.parametrize("division", COPIES)
@pytest.mark.parametrize("name", TRIED)
def test_four_ranks_train_as_one(world: World, here: Parallel, name: str, division: str) -> None:
    kind = KINDS[name]
    metrics = trained(opened(world.model_dir, here, kind), kind, STEPS)
    for rank in world.ranks:
        for ours, wanted in zip(rank[f"{name}, {division}"]["whole"]["metrics"], metrics, strict=True):
            assert_same(ours, wanted)


@pytest.mark.parametrize("division", COPIES)
@pytest.mark.parametrize("name", TRIED)
def test_a_restart_has_the_same_bits(world: World, name: str, division: str) -> None:
    """And so have all copies."""
    digests = [rank[f"{name}, {division}"][run]["digest"] for rank in world.ranks for run in ("whole", "resumed")]
    assert digests == digests[:1] * 8
    for rank in world.ranks:
        whole, resumed = (rank[f"{name}, {division}"][run]["metrics"][-1] for run in ("whole", "resumed"))
        assert {key: whole[key] for key in whole.keys() - TIMES} == {key: resumed[key] for key in whole.keys() - TIMES}


@pytest.mark.parametrize("division", COPIES)
@pytest.mark.parametrize("name", TRIED)
def test_a_checkpoint_continues_in_the_other_division_and_on_one_rank(
    world: World, here: Parallel, name: str, division: str
) -> None:
    wanted = world.ranks[0][f"{name}, {other(division)}"]["whole"]["metrics"][-1]
    for rank in world.ranks:
        assert_same(rank[f"{name}, exchanged"][division]["metrics"][-1], wanted)
    learner = opened(world.model_dir, here, KINDS[name])
    assert learner.load(world.checkpoints / f"{name}, {division}") == SAVED
    [metrics] = trained(learner, KINDS[name], STEPS[2:])
    assert_same(metrics, wanted)
