"""Packing: everything placed once, within the budget, balanced, and the same each time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidemill.learner.buffer.step_plan import assign

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
