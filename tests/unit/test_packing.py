"""Packing: everything placed once, within the budget, balanced, and the same each time."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.learner.buffer.assignment import Assignment, assign, work_of

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 64))
def test_every_micro_batch_is_within_the_budget_or_holds_one_sample(
    lengths: list[int], data_parallel: int, max_tokens: int
) -> None:
    placed = assign(lengths, data_parallel=data_parallel, max_tokens=max_tokens)
    assert placed.ranks.min() >= 0
    assert placed.ranks.max() < data_parallel
    assert placed.micro_batches.min() >= 0
    assert placed.micro_batches.max() < placed.num_micro_batches
    for rank in range(data_parallel):
        for number in range(placed.num_micro_batches):
            rows = np.flatnonzero((placed.ranks == rank) & (placed.micro_batches == number))
            assert len(rows) <= 1 or sum(lengths[row] for row in rows) <= max_tokens


@given(LENGTHS, st.integers(1, 4), st.sampled_from([0, 1, 20]))
def test_ranks_differ_by_at_most_one_sample(lengths: list[int], data_parallel: int, pair_tokens: int) -> None:
    """Longest first: when the last sample goes to the fullest rank, that rank was the emptiest before."""
    placed = assign(lengths, data_parallel=data_parallel, max_tokens=100, pair_tokens=pair_tokens)
    work = [length * pair_tokens + sum(range(length + 1)) if pair_tokens else length for length in lengths]
    loads = [
        sum(load for load, rank in zip(work, placed.ranks, strict=True) if rank == one) for one in range(data_parallel)
    ]
    assert max(loads) - min(loads) <= max(work)


def test_a_long_sequence_counts_with_its_attention() -> None:
    lengths = [8, 4, 4, 2, 2, 2]
    assert assign(lengths, data_parallel=2, max_tokens=100).ranks.tolist() == [0, 1, 1, 0, 1, 0]
    assert assign(lengths, data_parallel=2, max_tokens=100, pair_tokens=1).ranks.tolist() == [0, 1, 1, 1, 1, 1]


@given(LENGTHS)
def test_no_more_micro_batches_than_first_fit_needs(lengths: list[int]) -> None:
    """First fit leaves at most one bin half empty, so its count is below twice the tokens plus one."""
    placed = assign(lengths, data_parallel=1, max_tokens=50)
    assert placed.num_micro_batches <= 2 * sum(lengths) // 50 + 1


def test_micro_batches_of_a_rank_are_levelled() -> None:
    placed = assign([10, 1, 1, 1, 1, 1, 1], data_parallel=1, max_tokens=12)
    loads = [
        sum(length for length, at in zip([10, 1, 1, 1, 1, 1, 1], placed.micro_batches, strict=True) if at == one)
        for one in (0, 1)
    ]
    assert (placed.num_micro_batches, loads) == (2, [10, 6])


def test_an_oversized_sample_is_alone() -> None:
    placed = assign([100, 3, 4], data_parallel=1, max_tokens=10)
    assert placed.num_micro_batches == 2
    assert placed.micro_batches[0] not in placed.micro_batches[1:]


def test_more_ranks_than_samples_leaves_empty_micro_batches() -> None:
    placed = assign([5], data_parallel=3, max_tokens=10)
    assert (placed.num_micro_batches, placed.ranks.tolist()) == (1, [0])


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 64),
)
def test_minibatches_hold_whole_groups_in_turn(
    groups: list[list[int]], data_parallel: int, minibatches: int, max_tokens: int
) -> None:
    """Their micro-batches follow each other, the same number for each; within one the rules are those of a batch of its
    own.
    """
    lengths = [length for group in groups for length in group]
    group_of = [number for number, group in enumerate(groups) for _ in group]
    sizes = [len(group) for group in groups]
    placed = assign(
        lengths, data_parallel=data_parallel, max_tokens=max_tokens, minibatches=minibatches, group_sizes=sizes
    )
    assert placed.num_minibatches == min(minibatches, len(groups))
    count, rest = divmod(placed.num_micro_batches, placed.num_minibatches)
    assert rest == 0
    assert (placed.micro_batches // count).tolist() == [group % placed.num_minibatches for group in group_of]
    for number in range(placed.num_minibatches):
        mine = [row for row, group in enumerate(group_of) if group % placed.num_minibatches == number]
        alone = assign([lengths[row] for row in mine], data_parallel=data_parallel, max_tokens=max_tokens)
        assert placed.ranks[mine].tolist() == alone.ranks.tolist()
        assert (placed.micro_batches[mine] - number * count).tolist() == alone.micro_batches.tolist()


@given(LENGTHS, st.integers(1, 3))
def test_depends_on_nothing_but_its_arguments(lengths: list[int], data_parallel: int) -> None:
    one, other = (assign(list(lengths), data_parallel=data_parallel, max_tokens=30) for _ in range(2))
    assert one.ranks.tolist() == other.ranks.tolist()
    assert one.micro_batches.tolist() == other.micro_batches.tolist()


# ---- prompts that ranks compute once, and sequences that they leave out

PAIR_TOKENS = 4000


def work_done(placed: Assignment, groups: list[tuple[int, list[int]]], idle: list[bool]) -> list[int]:
    """Return the work of each rank: of a prompt once, of the responses behind it, of ``idle`` sequences none."""
    ranks, loads = placed.ranks.tolist(), [0] * (int(placed.ranks.max()) + 1)
    rows = iter(range(len(ranks)))
    for prompt, responses in groups:
        computed = [(ranks[row], response) for response, row in zip(responses, rows, strict=False) if not idle[row]]
        for rank in {rank for rank, _ in computed}:
            loads[rank] += work_of([(0, prompt)], PAIR_TOKENS)
        for rank, response in computed:
            loads[rank] += work_of([(prompt, prompt + response)], PAIR_TOKENS)
    return loads


def placed_groups(
    groups: list[tuple[int, list[int]]], data_parallel: int, idle: list[bool] | None = None, **changes: Any
) -> Assignment:
    sizes = [len(responses) for _, responses in groups]
    settings: dict[str, Any] = {"max_tokens": 8192, "group_sizes": sizes, "pair_tokens": PAIR_TOKENS} | changes
    shared = [prompt for prompt, responses in groups for _ in responses]
    lengths = [prompt + response for prompt, responses in groups for response in responses]
    return assign(lengths, data_parallel=data_parallel, shared=shared, idle=idle, **settings)


def long_tailed(seed: int, *, groups: int, size: int = 8) -> list[tuple[int, list[int]]]:
    """Return groups with prompts three times as long as their responses, whose lengths have a long tail."""
    draws = np.random.default_rng(seed)
    prompts = draws.integers(300, 900, groups).tolist()
    return [(prompt, (1 + prompt / 4 * draws.lognormal(0, 0.8, size)).astype(int).tolist()) for prompt in prompts]


def test_samples_of_a_group_go_to_one_rank_where_ranks_stay_equal() -> None:
    groups = [(100, [10, 20]), (200, [10, 10]), (100, [20, 10]), (200, [10, 10])]
    placed = placed_groups(groups, 2)
    assert [len(set(placed.ranks[2 * group : 2 * group + 2].tolist())) for group in range(4)] == [1] * 4
    first, second = work_done(placed, groups, [False] * 8)
    assert first == second


@pytest.mark.parametrize(("groups", "data_parallel", "most"), [(8, 2, 1.1), (16, 2, 1.04), (16, 4, 1.1), (32, 4, 1.05)])
def test_ranks_do_equal_work_and_hardly_more_than_without_division(
    groups: int, data_parallel: int, most: float
) -> None:
    """Half of the groups have no gradient. By the lengths of whole sequences alone the fullest of 4 ranks has twice the
    work of an equal share, because every rank computes every prompt.
    """
    for seed in range(8):
        shapes = long_tailed(seed, groups=groups)
        idle = [group % 2 == 0 for group, (_, responses) in enumerate(shapes) for _ in responses]
        share = sum(work_done(placed_groups(shapes, 1, idle), shapes, idle)) / data_parallel
        assert max(work_done(placed_groups(shapes, data_parallel, idle), shapes, idle)) <= most * share


@pytest.mark.parametrize("seed", range(6))
def test_few_groups_are_divided_nearly_as_well_as_possible(seed: int) -> None:
    """Against all divisions of two groups of six over two ranks."""
    shapes = long_tailed(seed, groups=2, size=6)
    loads = []
    for number in range(1 << 12):
        ranks = np.array([number >> row & 1 for row in range(12)], np.int32)
        tried = Assignment(ranks=ranks, micro_batches=ranks, num_micro_batches=1, num_minibatches=1)
        loads.append(max(work_done(tried, shapes, [False] * 12)))
    assert max(work_done(placed_groups(shapes, 2), shapes, [False] * 12)) <= 1.1 * min(loads)


def test_sequences_that_are_left_out_are_no_work_and_spread_by_tokens() -> None:
    idle = [True, True, False, False, True, True]
    placed = assign([50, 50, 30, 30, 20, 20], data_parallel=2, max_tokens=100, pair_tokens=1, idle=idle)
    ranks = placed.ranks.tolist()
    assert (ranks[2], ranks[3]) in ((0, 1), (1, 0))
    assert sum(length for length, rank in zip([50, 50, 30, 30, 20, 20], ranks, strict=True) if rank == 0) == 100


def test_micro_batches_have_equal_work_within_the_limit_of_tokens_and_the_largest_comes_first() -> None:
    """Levelled by tokens, the sequence of 60 gets short ones beside it, although its attention costs more than ten."""
    lengths = [8] * 10 + [60]
    by_tokens = assign(lengths, data_parallel=1, max_tokens=100)
    placed = assign(lengths, data_parallel=1, max_tokens=100, pair_tokens=1)

    def work(of: Assignment) -> list[int]:
        return [
            sum(work_of([(0, length)], 1) for length, at in zip(lengths, of.micro_batches, strict=True) if at == one)
            for one in range(2)
        ]

    assert placed.num_micro_batches == by_tokens.num_micro_batches == 2
    assert max(work(placed)) < max(work(by_tokens)) and work(placed) == sorted(work(placed), reverse=True)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(1, 50), min_size=1, max_size=5)), min_size=1),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 200),
    st.data(),
)
def test_divided_groups_are_placed_once_and_within_the_budget(
    groups: list[tuple[int, list[int]]], data_parallel: int, minibatches: int, max_tokens: int, data: st.DataObject
) -> None:
    count = sum(len(responses) for _, responses in groups)
    idle = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    placed = placed_groups(groups, data_parallel, idle, max_tokens=max_tokens, minibatches=minibatches)
    again = placed_groups(groups, data_parallel, idle, max_tokens=max_tokens, minibatches=minibatches)
    assert placed.ranks.tolist() == again.ranks.tolist()
    assert placed.micro_batches.tolist() == again.micro_batches.tolist()
    lengths = np.array([prompt + response for prompt, responses in groups for response in responses])
    assert placed.ranks.min() >= 0 and placed.ranks.max() < data_parallel
    assert placed.micro_batches.min() >= 0 and placed.micro_batches.max() < placed.num_micro_batches
    for rank in range(data_parallel):
        for number in range(placed.num_micro_batches):
            row = lengths[(placed.ranks == rank) & (placed.micro_batches == number)]
            assert len(row) <= 1 or row.sum() <= max_tokens
