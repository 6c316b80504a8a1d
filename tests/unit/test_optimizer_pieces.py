"""Pieces of the optimizer's state as rectangles of a checkpoint, and the meaning of the settings of replicas."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from tests.refusals import refusal
from tidemill.learner.backends.megatron.groups import Replicas, choose_replicas
from tidemill.learner.backends.megatron.offload import cut
from tidemill.learner.backends.megatron.optimizer_pieces import OptimizerPiece, rectangles, sharded_pieces
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import LearnerConfig


@given(st.integers(1, 7), st.data())
def test_rectangles_cover_a_range_in_its_order(width: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 40))
    last = data.draw(st.integers(first, 60))
    found = rectangles(first, last, width)
    elements = [
        (row + r) * width + column + c
        for row, column, rows, columns in found
        for r in range(rows)
        for c in range(columns)
    ]
    assert elements == list(range(first, last))
    assert len(found) <= 3


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=5), st.integers(1, 20))
def test_blocks_have_every_element_once_and_one_size(ranges: list[tuple[int, int]], size: int) -> None:
    pieces = [OptimizerPiece(torch.empty(40), start, start + length) for start, length in ranges]
    runs = list(cut(pieces, size))
    sizes = [sum(part.end - part.start for part in run) for run in runs]
    assert all(each == size for each in sizes[:-1]) and sizes[-1:] <= [size]

    def elements(parts: list[OptimizerPiece]) -> list[tuple[int, int]]:
        return [(id(part.parameter), at) for part in parts for at in range(part.start, part.end)]

    assert elements([part for run in runs for part in run]) == elements(pieces)


@pytest.mark.parametrize("gated", [False, True], ids=["matrix", "gated"])
@pytest.mark.parametrize("cuts", [(0, 48), (0, 1, 48), (0, 7, 24, 25, 48), (0, 23, 31, 48)])
def test_pieces_of_split_layers_make_the_whole(gated: bool, cuts: tuple[int, ...]) -> None:
    """Two layers, each split over two ranks along its rows, each rank's part in pieces: every element is at its place,
    once.
    """
    whole = torch.full((2, 16, 6), -1.0)
    for layer in range(2):
        for rank in range(2):
            parameter = torch.arange(48.0).view(8, 6) + 1000 * (2 * layer + rank)
            entry: Any = ShardedTensor.from_rank_offsets(
                "w", parameter, (0, layer, 2), (1, rank, 2), replica_id=(0, 0, 1), prepend_axis_num=1
            )
            if gated:
                entry = apply_swiglu_sharded_factory(entry, ((0, layer, 2),))
            for start, end in pairwise(cuts):
                piece = OptimizerPiece(parameter, start, end)
                for part in sharded_pieces({"w": entry}, [(piece, {"exp_avg": piece.of(parameter).clone()})]):
                    assert (part.key, part.global_shape, part.replica_id) == (
                        "optimizer.state.exp_avg.w",
                        (2, 16, 6),
                        (0, 0, 0),
                    )
                    there = whole[part.global_slice()]
                    assert bool((there == -1).all())
                    there.copy_(part.data)
    rows = torch.arange(48.0).view(8, 6)
    for layer in range(2):
        ranks = [rows + 1000 * (2 * layer + rank) for rank in range(2)]
        halves = [rank.chunk(2) for rank in ranks]
        wanted = torch.cat([*(half[0] for half in halves), *(half[1] for half in halves)] if gated else ranks)
        assert torch.equal(whole[layer], wanted)


def here(device: str, **sizes: int) -> Parallel:
    """Return rank 0 of a world with these sizes, and 1 for all others; it has no groups."""
    plain: dict[str, Any] = {one.name: int(one.name.endswith("_size")) for one in dataclasses.fields(Parallel)}
    return Parallel(**{**plain, "device": torch.device(device), **sizes})


@pytest.mark.parametrize(
    ("settings", "device", "wanted"),
    [
        ({}, "cpu", (False, False, False)),
        ({}, "cuda", (False, True, False)),
        ({"distributed_optimizer": True}, "cpu", (True, False, False)),
        ({"distributed_optimizer": True}, "cuda", (True, True, True)),
        ({"distributed_optimizer": True, "overlap_param_gather": "never"}, "cuda", (True, True, False)),
        ({"overlap_grad_reduce": "always"}, "cpu", (False, True, False)),
        ({"overlap_grad_reduce": "never"}, "cuda", (False, False, False)),
    ],
)
def test_the_settings_of_replicas(settings: dict[str, Any], device: str, wanted: tuple[bool, bool, bool]) -> None:
    learner = LearnerConfig(**settings)
    found = choose_replicas(learner, here(device, dp_size=2))
    assert (found.distributed_optimizer, found.overlap_grad_reduce, found.overlap_param_gather) == wanted
    assert choose_replicas(learner, here(device)) == Replicas(), "with one copy of the model there is nothing to share"
    context = choose_replicas(learner, here(device, cp_size=2))
    assert context == found, "context-parallel ranks have copies of the weights too"
    staged = choose_replicas(LearnerConfig(distributed_optimizer=True), here(device, dp_size=2, pp_size=2, vp_size=2))
    assert staged == Replicas(distributed_optimizer=True), "chunks of a stage take turns, so nothing overlaps"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap_grad_reduce": "on"}, {"place": "overlap_grad_reduce", "got": "'on'"}),
        ({"overlap_param_gather": "yes"}, {"place": "overlap_param_gather", "got": "'yes'"}),
        ({"overlap_param_gather": "always"}, {"place": "overlap_param_gather"}),
    ],
)
def test_refused(settings: dict[str, Any], message: dict[str, Any]) -> None:
    with refusal(ValueError, **message):
        LearnerConfig(**settings)
