"""Training with the experts that an engine has chosen (R3): every token goes to them, in every pass, layer and layout
of two ranks.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.integration import routing_ranks
from tests.integration.routing_ranks import ONE, RUNS, USED, VOCAB, train
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.same_metrics import assert_same
from tests.tiny_models import write_tiny_model


class World:
    """Results of one process and of the two ranks."""

    def __init__(self, root: Path) -> None:
        (root / "out").mkdir()
        dirs = {
            name: write_tiny_model(root / name, family, vocab_size=VOCAB, **changes)
            for name, (family, changes) in USED.items()
        }
        with one_rank() as here:
            self.one = {(family, way): train(dirs[family], here, way) for family, way in ONE}
        self.ranks = run_ranks(routing_ranks.main, (dirs,), world=2, out=root / "out", timeout_s=400)

    def results(self, family: str, layout: str, way: str) -> list[dict[str, Any]]:
        return [self.one[family, way]] if layout == "1" else [rank[f"{family} {layout} {way}"] for rank in self.ranks]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


ALL = [*((family, "1", way) for family, way in ONE if way != "moved"), *RUNS]


@pytest.mark.parametrize(("family", "layout", "way"), ALL)
def test_every_token_goes_to_the_experts_that_its_sample_has(world: World, family: str, layout: str, way: str) -> None:
    """100 %: in the pass for old log-probs, in training, and where a layer is computed again. The others go where the
    router sends them.
    """
    for rank in world.results(family, layout, way):
        known = sum(row["known"] for row in rank["rows"])
        without = (
            layout == "PP2 VP2" and rank is world.ranks[0][f"{family} {layout} {way}"]
        )  # its two layers have no experts
        assert (known > 0) is (way != "unknown" and not without)
        for row in rank["rows"]:
            wanted = 2 + way.endswith("full")
            assert (
                row["passes"] == wanted if row["known"] > 3 else row["passes"] >= wanted
            )  # few tokens may have the experts of others
            if family != "glm4_moe" and (
                row["known"] > 3 or way == "unknown"
            ):  # the scores of glm4_moe are not the logits alone
                assert row["own"] == row["others"]
        assert rank["routers_moved"], "the shares of the experts are the router's, with a gradient"


@pytest.mark.parametrize(("family", "layout", "way"), RUNS)
def test_the_numbers_of_one_process(world: World, family: str, layout: str, way: str) -> None:
    wanted = world.one[family, "given" if way == "given, full" else way]["metrics"]
    for rank in world.ranks:
        assert_same(rank[f"{family} {layout} {way}"]["metrics"], wanted)


def test_the_experts_in_the_samples_change_the_numbers(world: World) -> None:
    ours, wanted = (world.one["qwen3_moe", way]["metrics"] for way in ("given", "moved"))
    assert abs(ours["train/loss"] - wanted["train/loss"]) > 1e-4 * abs(wanted["train/loss"])
    assert 0.5 < ours["train/routing_known"] < 0.9


def test_without_any_known_expert_nothing_is_replayed(world: World) -> None:
    ours, wanted = (world.one["qwen3_moe", way]["metrics"] for way in ("unknown", "moved"))
    assert ours["train/routing_known"] == 0
    assert "train/routing_known" not in wanted
    assert_same(ours, {**wanted, "train/routing_known": 0.0})


def test_a_bias_follows_the_replayed_tokens(world: World) -> None:
    """All tokens are sent to the first experts, so their biases move down, beside those of experts without tokens."""
    for result in (world.one["glm4_moe", "given, biased"], world.ranks[0]["glm4_moe EP2 given, biased"]):
        assert result["biases_moved"]
        assert all(moved < 0 for moved in result["biases_moved"])
