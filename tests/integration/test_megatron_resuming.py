"""A checkpoint of any layout continues in any other: tensor, pipeline, data, context parallel, one rank. All pairs:
``make test-all``.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.integration import megatron_resuming
from tests.integration.megatron_resuming import LAYOUTS, SKIPPING, VOCAB, Learner, saved
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.same_metrics import different
from tests.tiny_models import write_tiny_model


class World:
    """Results of one rank, of two ranks in every layout, and the directory of their checkpoints."""

    def __init__(self, root: Path, *, every: bool, tied: bool) -> None:
        self.model_dir = write_tiny_model(root / "model", vocab_size=VOCAB, num_hidden_layers=4, tied=tied)
        self.out = root / "out"
        self.out.mkdir()
        with one_rank() as here:
            self.one = saved(Learner(self.model_dir, here), root / "of-one")
            self.pairs = len(LAYOUTS) * (1 + len(LAYOUTS)) if every else 3 * len(LAYOUTS) - 1
            self.ranks = run_ranks(
                megatron_resuming.main, (self.model_dir, root / "of-one", every), world=2, out=self.out, timeout_s=900
            )
            self.in_one = {name: Learner(self.model_dir, here).resume(self.out / name) for name in LAYOUTS}


PAIRS = ["neighbours", *(pytest.param(name, marks=pytest.mark.slow) for name in ("every pair", "every pair, tied"))]


@pytest.fixture(scope="module", params=PAIRS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return the results. Tied embeddings have one more tensor that two stages share."""
    return World(tmp_path_factory.mktemp("world"), every="every" in request.param, tied="tied" in request.param)


def assert_same(ours: dict[str, float], others: dict[str, float], where: str) -> None:
    wrong = different(ours, others)
    assert not wrong, f"{where}: {wrong}"


def test_every_layout_trains_what_one_rank_does(world: World) -> None:
    for rank in world.ranks:
        for name in LAYOUTS:
            assert_same(rank[f"saved {name}"]["metrics"][0], world.one["metrics"][0], name)
            assert_same(rank[f"saved {name}"]["second"], world.one["second"], name)


def test_the_first_stage_may_have_fewer_layers(world: World) -> None:
    assert [[rank[f"saved {name}"]["layers"] for rank in world.ranks] for name in ("pp2", "pp2, 1 and 3 layers")] == [
        [2, 2],
        [1, 3],
    ]


def test_every_rank_has_the_log_probs_of_its_rows(world: World) -> None:
    """Also where another stage computes them, or each of two ranks a part of every row."""
    for rank in world.ranks:
        for name in LAYOUTS.keys() - {"dp2"}:
            assert rank[f"saved {name}"]["log_probs"] == pytest.approx(world.one["log_probs"], rel=1e-4), name


def test_every_layout_continues_the_checkpoint_of_every_other(world: World) -> None:
    """And of one rank, and that of theirs: the same weights to the bit, and the next step as it would have been."""
    pairs = [name for name in world.ranks[0] if " <- " in name]
    assert len(pairs) == world.pairs
    for rank in world.ranks:
        for pair in pairs:
            by = pair.split(" <- ")[1]
            digest = world.one["digest"] if by == "1" else rank[f"saved {by}"]["digest"]
            assert rank[pair]["digest"] == digest, pair
            assert_same(rank[pair]["metrics"], world.one["second"], pair)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_rank_continues_the_checkpoint_of_every_layout(world: World, name: str) -> None:
    assert world.in_one[name]["digest"] == world.ranks[0][f"saved {name}"]["digest"]
    assert_same(world.in_one[name]["metrics"], world.one["second"], name)


@pytest.mark.parametrize("name", SKIPPING)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(world: World, name: str) -> None:
    results: list[Any] = [rank[f"skips {name}"] for rank in world.ranks]
    for rank in results:
        assert rank["skipped"] == [0, 1, 0]
        assert rank["digests"][0] == rank["digests"][1] != rank["digests"][2] == rank["undisturbed"]
        assert rank["norm_of_spoilt_gradient"] is None and not rank["moved_by_it"]
    assert results[0]["digests"] == results[1]["digests"]
