"""Mixtures of experts in a world of two, in every layout and with both optimizers: they train as one process does."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration import expert_ranks
from tests.integration.expert_ranks import (
    EFFECTS,
    GRADIENTS,
    GRADIENTS_OF_FOUR,
    MODELS,
    ONE,
    PAIRED,
    RARE_ONE,
    RARE_RUNS,
    RESUMES,
    RUNS,
    RUNS_OF_FOUR,
    STEPS,
    VOCAB,
    WAYS,
    Runs,
    gradients,
    learner,
    resumed,
    same_run,
    take,
    unbroken,
)
from tests.integration.gradients import differing, load
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.same_metrics import assert_same
from tests.tiny_models import write_tiny_model
from tidemill.learner.layout.parallel import Parallel


class World:
    """Results of one process and of the two ranks."""

    def __init__(self, root: Path) -> None:
        self.out, self.of_one = root / "out", root / "of-one"
        self.out.mkdir()
        self._rare: list[dict[str, Any]] = []
        self._four: list[dict[str, Any]] = []
        self.model_dirs = {
            name: write_tiny_model(root / name, family, vocab_size=VOCAB, **changes)
            for name, (family, changes) in MODELS.items()
        }
        with one_rank() as here:
            self.one = self._of_one(ONE, here)
            of_one = dict.fromkeys((family, way) for family, _, way in GRADIENTS)
            self.gradients = {(family, way): gradients(self.model_dirs[family], here, way) for family, way in of_one}
        self.ranks = self._results(2, RUNS, RESUMES, GRADIENTS)

    def _of_one(self, runs: list[tuple[str, str]], here: Parallel) -> dict[tuple[str, str], Any]:
        return {
            (family, way): unbroken(self.model_dirs[family], here, self.of_one / family / way, way)
            for family, way in runs
        }

    def _results(self, world: int, runs: Runs, resumes: Runs, steps: Runs) -> list[dict[str, Any]]:
        args = (self.model_dirs, self.of_one / "qwen3_moe" / "plain", runs, resumes, steps)
        return run_ranks(expert_ranks.main, args, world=world, out=self.out, timeout_s=400)

    def rare(self) -> list[dict[str, Any]]:
        """Return the results of two ranks in the rare runs."""
        if not self._rare:
            with one_rank() as here:
                self.one |= self._of_one(RARE_ONE, here)
            self._rare = self._results(2, RARE_RUNS, [], [])
        return self._rare

    def four(self) -> list[dict[str, Any]]:
        """Return the results of the four ranks."""
        self._four = self._four or self._results(4, RUNS_OF_FOUR, [], GRADIENTS_OF_FOUR)
        return self._four

    def last_of_one(self) -> dict[str, float]:
        metrics: dict[str, float] = self.one["qwen3_moe", "plain"]["metrics"][-1]
        return metrics


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(("family", "layout", "way"), RUNS)
def test_the_numbers_of_one_process(world: World, family: str, layout: str, way: str) -> None:
    """Loss, gradient norm and all metrics of two steps; the weights that the engines would get are those of the file at
    the start.
    """
    _compare(world, world.ranks, family, layout, way)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "way"), RARE_RUNS)
def test_the_numbers_of_one_process_in_other_pairs(world: World, family: str, layout: str, way: str) -> None:
    _compare(world, world.rare(), family, layout, way)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "way"), RUNS_OF_FOUR)
def test_the_numbers_of_one_process_in_four(world: World, family: str, layout: str, way: str) -> None:
    _compare(world, world.four(), family, layout, way)


@pytest.mark.slow
def test_every_layout_resumes_the_checkpoint_of_every_other(tmp_path: Path) -> None:
    """One process, too: each takes the step that an undisturbed process takes."""
    model_dir = write_tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB)
    (tmp_path / "out").mkdir()
    with one_rank() as here:
        wanted = unbroken(model_dir, here, tmp_path / "of-one", "plain")["metrics"][-1]
        args = (model_dir, tmp_path / "of-one")
        ranks = run_ranks(expert_ranks.every_pair, args, world=2, out=tmp_path / "out", timeout_s=400)
        ranks.append({f"{name} > 1": resumed(model_dir, here, tmp_path / "out" / name, "plain") for name in PAIRED})
    assert [len(rank) for rank in ranks] == [len(PAIRED) * (len(PAIRED) + 1)] * 2 + [len(PAIRED)]
    for rank in ranks:
        for found in rank.values():
            assert_same(found["metrics"][-1], wanted)


@pytest.mark.parametrize(("family", "layout", "way"), GRADIENTS)
def test_the_gradients_of_one_process(world: World, family: str, layout: str, way: str) -> None:
    """The gradient of every weight, routers and each expert among them, within 1e-5 of its largest element."""
    _compare_gradients(world, family, layout, way, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "way"), GRADIENTS_OF_FOUR)
def test_the_gradients_of_one_process_in_four(world: World, family: str, layout: str, way: str) -> None:
    world.four()
    _compare_gradients(world, family, layout, way, ranks=4)


def _compare_gradients(world: World, family: str, layout: str, way: str, *, ranks: int) -> None:
    wanted, metrics = world.gradients[family, way]
    for rank in range(ranks):
        gradients, ours = load(world.out, f"{family} {layout} {way}", rank)
        assert differing(gradients, wanted) == {}
        assert_same(ours, metrics)


def test_both_ranks_skip_a_step_that_is_not_finite_on_one(world: World) -> None:
    """Also where only one of the two optimizers has such a gradient, that of experts that the other rank does not
    have.
    """
    for rank in world.ranks:
        skips = rank["skips"]
        assert skips["skipped"] == [0, 1, 0]
        assert skips["digests"][0] == skips["digests"][1] != skips["digests"][2] == skips["undisturbed"]
        assert skips["norm_of_spoilt_gradient"] is None and not skips["moved_by_it"]
    assert world.ranks[0]["skips"]["digests"] == world.ranks[1]["skips"]["digests"]


def _compare(world: World, ranks: list[dict[str, Any]], family: str, layout: str, way: str) -> None:
    for rank in ranks:
        ours = rank[f"{family} {layout} {way}"]
        one = world.one[family, same_run(way)]
        assert ours["began"] == one["began"]
        assert len(ours["metrics"]) == len(STEPS)
        for step, wanted in zip(ours["metrics"], one["metrics"], strict=True):
            assert_same(step, wanted)


@pytest.mark.parametrize(("source", "layout", "way"), RESUMES)
def test_a_layout_goes_on_from_the_checkpoint_of_another(world: World, source: str, layout: str, way: str) -> None:
    for rank in world.ranks:
        [step] = rank[f"{source} > {layout} {way}"]["metrics"]
        assert_same(step, world.last_of_one())


@pytest.mark.parametrize(
    ("layout", "way"),
    [(layout, way) for family, layout, way in RUNS if family == "qwen3_moe" and same_run(way) == "plain"],
)
def test_one_process_goes_on_from_the_checkpoint_of_two(world: World, layout: str, way: str) -> None:
    with one_rank() as here:
        [step] = resumed(world.model_dirs["qwen3_moe"], here, world.out / f"qwen3_moe {layout} {way}", "plain")[
            "metrics"
        ]
    assert_same(step, world.last_of_one())


@pytest.mark.parametrize(("family", "one", "other"), EFFECTS)
def test_the_settings_change_the_numbers(world: World, family: str, one: str, other: str) -> None:
    """Replay, a balancing loss and moving biases are not without effect."""
    ours, wanted = world.one[family, other]["metrics"], world.one[family, one]["metrics"]
    assert abs(ours[-1]["train/loss"] - wanted[-1]["train/loss"]) > 1e-4 * abs(wanted[-1]["train/loss"])


@pytest.mark.parametrize("way", ["balanced", "replayed"])
def test_a_router_of_scores_as_they_are_is_balanced_and_replayed(tmp_path: Path, way: str) -> None:
    """A balancing loss changes the gradient and not the policy's loss; replay changes the loss of later minibatches."""
    model_dir, plain = (
        write_tiny_model(tmp_path, "glm4_moe", vocab_size=VOCAB, norm_topk_prob=False),
        {"balanced": "own rows"}.get(way, "moved"),
    )
    with one_rank() as here:
        [ours], [other] = (take(learner(model_dir, here, WAYS[name]), (3,), here, WAYS[name]) for name in (way, plain))
    assert abs(ours["train/grad_norm"] - other["train/grad_norm"]) > 1e-4 * other["train/grad_norm"]
    assert (ours["train/loss"] == pytest.approx(other["train/loss"], rel=1e-6)) is (way == "balanced")


@pytest.mark.parametrize("finite", [True, False])
def test_a_skipped_step_moves_no_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finite: bool) -> None:
    way = WAYS["biased"]
    with one_rank() as here:
        made = learner(write_tiny_model(tmp_path, "glm4_moe", vocab_size=VOCAB), here, way)
        monkeypatch.setattr(made.optimizer, "_finite", lambda *_: finite)
        began, biases = made.policy.digest(), [bias.clone() for bias in made.policy.moving_biases()]
        [metrics] = take(made, (3,), here, way)
        assert metrics["train/skipped_minibatches"] == (not finite)
        assert (made.policy.digest() == began) is not finite
        moved = [
            not bool((now == before).all()) for now, before in zip(made.policy.moving_biases(), biases, strict=True)
        ]
        assert moved == [finite]
