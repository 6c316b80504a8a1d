"""Optimizer state in shares of the replicas, in host memory, or both: trains as the plain optimizer does, and loads its
checkpoints.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from tests.integration import megatron_sharding
from tests.integration.megatron_sharding import (
    CASES,
    CLIPPED_CASES,
    RARE,
    STEPS,
    UNCLIPPED,
    VOCAB,
    WAYS,
    learner,
    resumes,
    saved,
    take,
)
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.same_metrics import TIMES
from tests.tiny_models import write_tiny_model
from tidemill.learner.backends.megatron import state

DTYPES = ("float32", "bfloat16")


class World:
    """Results of the two ranks, and the directories of their checkpoints."""

    def __init__(self, root: Path) -> None:
        model_dir = write_tiny_model(root / "model", vocab_size=VOCAB)
        self.out, self.of_one = root / "out", root / "of-one"
        self.out.mkdir()
        with one_rank() as here:
            for dtype in DTYPES:
                trainer, policy, optimizer = learner(model_dir, here, dtype, WAYS["plain"], UNCLIPPED)
                take(trainer, STEPS[0], here)
                saved(self.of_one / dtype, policy, optimizer)
        self.ranks = run_ranks(megatron_sharding.main, (model_dir, self.of_one), world=2, out=self.out)
        self.model_dir = model_dir

    def __getitem__(self, name: str) -> Any:
        assert self.ranks[0][name] == self.ranks[1][name] or "metrics" in self.ranks[0][name]
        return self.ranks[0][name]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in TIMES}


@pytest.mark.parametrize(("dtype", "way"), CASES)
def test_the_same_bits_as_the_plain_optimizer(world: World, dtype: str, way: str) -> None:
    """Where no gradient is clipped: each weight's gradient is the sum of the same two numbers, and Adam is element by
    element.
    """
    for rank in world.ranks:
        same_bits(rank, dtype, way)


@pytest.mark.slow
def test_the_same_bits_in_rare_ways(tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "model", vocab_size=VOCAB)
    (tmp_path / "out").mkdir()
    for rank in run_ranks(megatron_sharding.rare, (model_dir,), world=2, out=tmp_path / "out"):
        for dtype, way in RARE:
            same_bits(rank, dtype, way)


def same_bits(rank: dict[str, Any], dtype: str, way: str) -> None:
    chunks = ", chunks" if "chunks" in way else ""  # sums over chunks are in another order
    plain, ours = rank[f"{dtype} plain{chunks}"], rank[f"{dtype} {way}"]
    assert ours["digests"] == plain["digests"] and len(set(plain["digests"])) == len(STEPS)
    for step, wanted in zip(ours["metrics"], plain["metrics"], strict=True):
        norms = {"train/grad_norm", "train/grad_norm_max"}  # sums in another order
        assert {name: step[name] for name in norms} == pytest.approx({name: wanted[name] for name in norms}, rel=1e-6)
        assert {**timeless(step), **dict.fromkeys(norms)} == {**timeless(wanted), **dict.fromkeys(norms)}
    assert (ours["buckets"] > 3) is ("overlap" in way)


@pytest.mark.parametrize(("dtype", "way"), CLIPPED_CASES)
def test_clipped_gradients(world: World, dtype: str, way: str) -> None:
    """The norm of shares is summed in another order, so clipping differs in the last bit of a float32; offload changes
    no bit.
    """
    plain, ours = world[f"clipped {dtype} plain"], world[f"clipped {dtype} {way}"]
    assert plain["metrics"][0]["train/grad_norm"] > 0.05, "nothing was clipped"
    for step, wanted in zip(ours["metrics"], plain["metrics"], strict=True):
        for name in ("train/loss", "train/grad_norm", "offpolicy/kl_rollout"):
            if name in wanted:
                assert step[name] == pytest.approx(wanted[name], rel=2e-5 if dtype == "float32" else 1e-2, abs=1e-6), (
                    name
                )
    assert (
        ours["digests"]
        == world[f"clipped {dtype} {way.removesuffix(', offload').replace('offload', 'plain')}"]["digests"]
    )


@pytest.mark.parametrize(
    ("dtype", "one", "other"), [(dtype, one, other) for dtype in DTYPES for one, other in resumes(dtype)]
)
def test_one_continues_what_the_other_has_saved(world: World, dtype: str, one: str, other: str) -> None:
    unbroken = world[f"{dtype} plain"]
    assert world[f"{dtype} {one} > {other}"]["digest"] == unbroken["digests"][1]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a checkpoint."""
    found = dist_checkpointing.load_plain_tensors(str(directory))
    return {
        name: each for name, each in found.items() if isinstance(each, torch.Tensor)
    }  # the rest are random generators


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, wanted = tensors(one), tensors(other)
    assert ours.keys() == wanted.keys() and any(name.startswith("optimizer.state.exp_avg_sq") for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], wanted[name])] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["distributed", "distributed, offload"])
def test_one_rank_loads_the_shares_of_two(world: World, tmp_path: Path, dtype: str, way: str) -> None:
    """Every moment and main weight, bit for bit; and Adam's step, which the next step shows."""
    with one_rank() as here:
        after = []
        for name in ("plain", way):
            trainer, policy, optimizer = learner(world.model_dir, here, dtype, WAYS["plain"], UNCLIPPED)
            state.load(world.out / f"{dtype} {name}", policy=policy, optimizer=optimizer)
            again = saved(tmp_path / name, policy, optimizer)
            assert_same_tensors(again, world.out / f"{dtype} {way}")
            take(trainer, STEPS[1], here)
            after.append(policy.digest())
        assert after[0] == after[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_load_the_state_of_one_and_ranks_that_share_the_model_load_that_of_two(
    world: World, dtype: str
) -> None:
    with one_rank():
        for way in ("distributed", "distributed, overlap, offload"):
            assert_same_tensors(world.out / f"of one, {dtype} {way}", world.of_one / dtype)
        for way in ("plain", "offload"):
            assert_same_tensors(world.out / f"split, {dtype} {way}", world.out / f"{dtype} distributed")


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(world: World) -> None:
    for rank in world.ranks:
        skips = rank["skips"]
        assert skips["skipped"] == [0, 1, 0]
        assert skips["digests"][0] == skips["digests"][1] != skips["digests"][2] == skips["undisturbed"]
        assert skips["norm_of_spoilt_gradient"] is None and not skips["moved_by_it"]
    assert world.ranks[0]["skips"]["digests"] == world.ranks[1]["skips"]["digests"]
