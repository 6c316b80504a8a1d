"""Episodes in the learner: values of an episode by episode, those of a sequence by sequence, against loops in
float64.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.algorithm_settings import algorithm_of
from tests.data_kit import rules, task
from tests.examples import examples
from tests.learner_steps import make_batches, make_samples, packed_by_ranks
from tests.refusals import refusal
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Plan, Sample, SequenceSize, Span, Turns
from tidemill.bus.wire.task_settings import Budget
from tidemill.learner.algorithms.advantages import ADVANTAGES
from tidemill.learner.algorithms.aggregation import Denominators, aggregate
from tidemill.learner.algorithms.choices import AGGREGATIONS, OF_TURNS
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.algorithms.objective import TurnColumns as StepTurns
from tidemill.learner.algorithms.token_returns import turn_advantages, turn_returns
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.groups import mismatch
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.buffer.step_plan import GENESIS, chain_of
from tidemill.learner.errors import FeedError
from tidemill.learner.feed.feed_messages import decode_batch, encode_batch, unpack
from tidemill.learner.settings.config import LearnerConfig

Turn = tuple[list[int], list[float], int]
"""Sampled ids, their log-probs, version."""


@st.composite
def episodes(draw: st.DrawFn, groups: int = 2, size: int = 3) -> list[list[Turn]]:
    """Draw the turns of every episode of a step."""
    turn = st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(4, 60), min_size=n, max_size=n),
            st.lists(st.floats(-4, -0.125, width=32), min_size=n, max_size=n),
            st.integers(0, 2),
        )
    )
    return [draw(st.lists(turn, min_size=1, max_size=4)) for _ in range(groups * size)]


def cut(turns: Sequence[Turn], borders: Sequence[bool], index: int, of: Any) -> Sample:
    """Return the episode: a new sequence before each turn for which ``borders`` is true, its context repeated, else a
    token of a tool.
    """
    tokens: list[int] = []
    sizes: list[SequenceSize] = []
    region: list[tuple[int, float, int, int]] = []
    at: list[int] = []
    spans: list[Span] = []
    path, begin = list(of.prompt_tokens.tolist()), 0
    for number, (ids, log_probs, version) in enumerate(turns):
        if number and borders[number]:
            tokens += path
            sizes.append(SequenceSize(len(path), len(region) - begin))
            begin = len(region)
            path = [*path, 99]
        elif number:
            region += [(98, 0.0, 0, version)]
            path = [*path, 98]
        at.append(len(region))
        region += [(id, log_prob, 1, version) for id, log_prob in zip(ids, log_probs, strict=True)]
        path = path + ids
    tokens += path
    sizes.append(SequenceSize(len(path), len(region) - begin))
    for size in sizes:
        for _, _, _, version in region[sum(span.num_tokens for span in spans) :][: size.response_length]:
            spans.append(Span(version=version, num_tokens=1))
    return Sample(
        run=of.run,
        task=of.id,
        index=index,
        group_size=of.group_size,
        attempt="a",
        prompt=of.prompt,
        tokens=np.array(tokens, np.int32),
        response_length=len(region),
        response="x",
        rollout_log_probs=np.array([one[1] for one in region], np.float32),
        loss_mask=np.array([one[2] for one in region], np.uint8),
        spans=tuple(spans),
        reward=float(index % 3),
        status="completed",  # type: ignore[arg-type]
        sampling=of.sampling,
        rollout="calc",
        sequences=tuple(sizes),
        turns=Turns(at=np.array(at, np.int32), tokens=np.array([len(ids) for ids, _, _ in turns], np.int32)),
    )


def step(told: Sequence[Sequence[Turn]], borders: Sequence[Sequence[bool]], size: int = 3) -> list[Sample]:
    samples = [
        cut(turns, border, place % size, task(place // size + 1, group_size=size, rollout="calc"))
        for place, (turns, border) in enumerate(zip(told, borders, strict=True))
    ]
    for sample in samples:
        check_sample(sample, vocab_size=100)
    return samples


BORDERS = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=6, max_size=6)
WHOLE = [[False] * 4] * 6


def trainable(batches: Sequence[StepBatch]) -> dict[int, list[tuple[int, float, int]]]:
    """Return (target, log-prob, lag) of every trainable token by sample, sorted."""
    found: dict[int, list[tuple[int, float, int]]] = {}
    for batch in batches:
        for row in batch.micro_batches:
            for at in np.flatnonzero(row.loss_mask_T):
                found.setdefault(int(row.sample_T[at]), []).append(
                    (int(row.targets_T[at]), float(row.rollout_log_probs_T[at]), int(row.lag_T[at]))
                )
    return {sample: sorted(tokens) for sample, tokens in found.items()}


def denominators(batch: StepBatch, minibatch: int = 0) -> Denominators:
    trained = torch.from_numpy(np.where(batch.minibatches_N == minibatch, batch.trainable_N, 0)).long()
    groups = torch.from_numpy(batch.groups_N).long()
    return Denominators(
        tokens=int(trained.sum()),
        sequences=int((trained > 0).sum()),
        trainable_N=trained,
        constant=8.0,
        groups_N=groups,
    )


def total(batches: Sequence[StepBatch], mode: str, minibatches: int) -> list[float]:
    """Return the aggregate of every minibatch over rows and ranks; the loss of a token is its log-prob times its
    sample's advantage.
    """
    weights = torch.from_numpy(batches[0].rewards_N).double() + 1
    found = [0.0] * minibatches
    for batch in batches:
        each = len(batch.micro_batches) // minibatches
        for number, row in enumerate(batch.micro_batches):
            sample_T = torch.from_numpy(row.sample_T).long()
            values_T = torch.from_numpy(row.rollout_log_probs_T).double() * weights[sample_T.clamp(min=0)]
            place = (torch.from_numpy(row.loss_mask_T), sample_T, denominators(batch, number // each))
            found[number // each] += float(aggregate(values_T, *place, mode=mode))
    return found


def by_loop(told: Sequence[Sequence[Turn]], mode: str, groups: Sequence[int]) -> float:
    """Return the aggregate of the episodes of these groups, from their turns alone."""
    losses = [
        [log_prob * (place % 3 + 1) for _, log_probs, _ in turns for log_prob in log_probs]
        for place, turns in enumerate(told)
        if place // 3 in groups
    ]
    if mode == "token_mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if mode == "seq_mean_token_mean":
        return sum(sum(each) / len(each) for each in losses) / len(losses)
    if mode == "prompt_mean":  # a group's three episodes stand one behind the other
        each_group = [losses[first : first + 3] for first in range(0, len(losses), 3)]
        return sum(sum(map(sum, one)) / sum(map(len, one)) for one in each_group) / len(each_group)
    if mode == "token_sum":
        return sum(map(sum, losses))
    return sum(map(sum, losses)) / len(losses) / (8.0 if mode == "constant" else 1.0)


@settings(max_examples=examples(60))
@given(episodes(), BORDERS, st.integers(1, 3), st.integers(1, 2), st.sampled_from([12, 1000]))
def test_no_number_depends_on_how_an_episode_is_cut(
    told: list[list[Turn]], borders: list[list[bool]], ranks: int, minibatches: int, max_tokens: int
) -> None:
    """Over any number of ranks, micro-batches and minibatches: tokens, ages, columns of episodes, and every
    denominator.
    """
    whole = make_batches(step(told, WHOLE))
    split = make_batches(step(told, borders), data_parallel=ranks, max_tokens=max_tokens, minibatches=minibatches)
    assert trainable(split) == trainable(whole)
    for name in (
        "rewards_N",
        "groups_N",
        "sampled_N",
        "trainable_N",
        "turn_samples_C",
        "turn_rewards_C",
        "turn_tokens_C",
    ):
        assert getattr(split[0], name).tolist() == getattr(whole[0], name).tolist(), name
    assert whole[0].sampled_N.tolist() == [sum(len(ids) for ids, _, _ in turns) for turns in told], (
        "tools are not sampled"
    )
    for mode in AGGREGATIONS:
        wanted = [
            by_loop(told, mode, [group for group in (0, 1) if group % minibatches == one]) for one in range(minibatches)
        ]
        assert total(split, mode, minibatches) == pytest.approx(wanted, rel=1e-12), mode


@settings(max_examples=examples(60))
@given(episodes(), BORDERS)
def test_rows_know_their_sequence_and_turn(told: list[list[Turn]], borders: list[list[bool]]) -> None:
    samples = step(told, borders)
    (batch,) = make_batches(samples)
    (row,) = batch.micro_batches
    assert batch.num_sequences == sum(len(sample.sequences) for sample in samples) == len(row.cu_seqlens) - 1
    for number, (begin, end) in enumerate(zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True)):
        here = slice(begin, end)
        assert (
            set(row.sequence_T[here].tolist()) != set()
            and len(set(row.sequence_T[here])) == len(set(row.sample_T[here])) == 1
        ), number
        assert row.position_ids_T[here].tolist() == list(range(end - begin))
        assert not row.loss_mask_T[end - 1], "no target crosses the end of a sequence"
    turns = [turn for turns in told for turn in turns]
    for at in np.flatnonzero(row.loss_mask_T):
        assert int(row.targets_T[at]) in turns[row.turn_T[at]][0]
    assert (row.turn_T[~row.loss_mask_T] == -1).all()
    sizes = np.bincount(row.turn_T[row.turn_T >= 0], minlength=len(turns))
    assert sizes.tolist() == [len(ids) for ids, _, _ in turns] == batch.turn_tokens_C.tolist()
    again = _decoded(batch)
    assert again.num_sequences == batch.num_sequences
    assert again.micro_batches[0].sequence_T.tolist() == row.sequence_T.tolist()


def _decoded(batch: StepBatch) -> StepBatch:
    frames = encode_batch(batch)
    return decode_batch(unpack(bytes(frames[0]), where="a test"), [bytes(memoryview(frame)) for frame in frames[1:]])  # type: ignore[arg-type]


def test_with_one_sequence_the_arrays_are_those_of_the_release_before() -> None:
    """The digest was made by that release: bit for bit, and dtype by dtype."""
    tokens = (
        "tokens_T",
        "targets_T",
        "position_ids_T",
        "cu_seqlens",
        "sample_T",
        "loss_mask_T",
        "rollout_log_probs_T",
        "lag_T",
    )
    columns = (
        "rewards_N",
        "groups_N",
        "response_lengths_N",
        "truncated_N",
        "unended_N",
        "trainable_N",
        "minibatches_N",
    )
    digest = hashlib.sha256()
    for number in (1, 2, 3):
        for ranks in (1, 2):
            for batch in make_batches(make_samples(vocab=64, step=number), step=number, data_parallel=ranks):
                for row in batch.micro_batches:
                    assert row.sequence_T.tolist() == row.sample_T.tolist()
                    for name in tokens:
                        digest.update(np.ascontiguousarray(getattr(row, name)).tobytes())
                for name in columns:
                    array: NDArray[Any] = getattr(batch, name)
                    digest.update(str(array.dtype).encode() + np.ascontiguousarray(array).tobytes())
    assert digest.hexdigest() == "5efb2a906a6e39ae28aa82be0fbada0ab6b504984668789a36ccad608d02cebd"


def test_parts_of_rewards_travel_by_name() -> None:
    rewards: list[float | dict[str, float]] = [
        {"score": 2.0, "b": 1.0, "a": 0.5},
        3.0,
        {"score": 1.0, "b": 4.0},
        {"score": 0.0},
    ]
    samples = [
        replace(sample, reward=reward)
        for sample, reward in zip(make_samples(vocab=64, step=1, groups=1), rewards, strict=True)
    ]
    (batch,) = make_batches(samples, step=1)
    again = _decoded(batch)
    assert again.part_names == batch.part_names == ("a", "b")
    assert again.rewards_N.tolist() == [2.0, 3.0, 1.0, 0.0]
    assert [None if np.isnan(value) else value for value in again.parts_NK.tolist()] == [
        0.5,
        1.0,
        None,
        None,
        None,
        4.0,
        None,
        None,
    ]
    with refusal(FeedError, where="batch 1", got=7):
        _decoded(replace(batch, parts_NK=batch.parts_NK[1:]))
    plain = _decoded(make_batches([replace(sample, reward=1.0) for sample in samples], step=1)[0])
    assert (plain.part_names, plain.parts_NK.tolist()) == ((), [])


# ---- ratios by sequence


WEIGHTED = [
    {"weight": {"level": "sequence"}, "correction": "tis"},
    {"weight": {"level": "geometric"}, "correction": "tis"},
    {"weight": {"level": "prefix"}, "correction": "tis"},
    {"correction": "gspo"},
    {"correction": "topr"},
    {"correction": "vespo"},
    {"correction": "tis", "reject": {"veto": 0.5}},
    {"correction": "tis", "reject": {"opsm": 0.3}},
]


@pytest.mark.parametrize("config", WEIGHTED, ids=str)
def test_ratios_are_local_to_a_sequence(config: dict[str, Any]) -> None:
    """Every sequence as a sample of its own, with the episode's advantage, has the same loss at every token."""
    told: list[list[Turn]] = [
        [([5, 6], [-1.0, -2.0], 2), ([7], [-0.5], 2)],
        [([8], [-3.0], 2), ([9, 4, 5], [-0.25, -1.5, -1.0], 2)],
    ]
    samples = [cut(turns, [False, True], index, task(1, rollout="calc")) for index, turns in enumerate(told)]
    (batch,) = make_batches(samples)
    (row,) = batch.micro_batches
    generator = torch.Generator().manual_seed(0)
    mask_T, rollout_T = torch.from_numpy(row.loss_mask_T), torch.from_numpy(row.rollout_log_probs_T).double()
    log_probs_T = rollout_T.clone()
    log_probs_T[mask_T] += torch.tensor([0.5, 0.2, -1.0, 0.9, -0.5, -0.9, 0.1], dtype=torch.float64)
    sample_T, sequence_T = torch.from_numpy(row.sample_T).long(), torch.from_numpy(row.sequence_T).long()
    shared: dict[str, Any] = {
        "mask_T": mask_T,
        "rollout_T": rollout_T,
        "old_T": torch.where(mask_T, log_probs_T - 0.3 * torch.rand(len(rollout_T), generator=generator), 0.0),
        "lag_T": torch.zeros_like(sample_T),
        "advantages_T": torch.tensor([1.0, -1.0]).double()[sample_T],
    }
    objective = Objective(algorithm_of(**config))
    episodes = Tokens(
        sample_T=sample_T, num_samples=2, sequence_T=sequence_T, num_sequences=batch.num_sequences, **shared
    )
    alone = Tokens(sample_T=sequence_T, num_samples=batch.num_sequences, **shared)
    joined = Tokens(sample_T=sample_T, num_samples=2, **shared)
    losses = [
        objective.token_loss(log_probs_T, tokens, objective.coupled([], **_alone())).loss_T
        for tokens in (episodes, alone, joined)
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    assert not torch.allclose(losses[0], losses[2]), "over whole episodes it would be another loss: the test can tell"


def _alone() -> dict[str, Any]:
    return {"summed": lambda values: values, "gathered": lambda values: values}


# ---- credit by turn


def ordinal_by_loop(
    rewards: Sequence[float], own: Sequence[Sequence[float]], groups: Sequence[int], gamma: float
) -> list[list[float]]:
    """Return the ``rloo`` advantage of every turn."""
    returns = []
    for reward, turns in zip(rewards, own, strict=True):
        each = list(turns)
        each[-1] += reward - sum(turns)
        for place in range(len(each) - 2, -1, -1):
            each[place] += gamma * each[place + 1]
        returns.append(each)
    found = []
    for place, each in enumerate(returns):
        others = [returns[other] for other in range(len(returns)) if other != place and groups[other] == groups[place]]
        found.append(
            [
                value - sum(other[min(at, len(other) - 1)] for other in others) / len(others)
                for at, value in enumerate(each)
            ]
        )
    return found


OWN = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=4), min_size=6, max_size=6)
SIX = st.lists(st.floats(-3, 3), min_size=6, max_size=6)
GROUPS = torch.tensor([1, 1, 1, 7, 7, 7])


def columns(own: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    samples = [place for place, each in enumerate(own) for _ in each]
    return torch.tensor([reward for each in own for reward in each], dtype=torch.float64), torch.tensor(samples)


@given(SIX, OWN, st.floats(0, 1))
def test_turn_advantages_are_those_of_the_loop(rewards: list[float], own: list[list[float]], gamma: float) -> None:
    got = turn_advantages(
        torch.tensor(rewards, dtype=torch.float64), GROUPS, *columns(own), advantage="rloo", gamma=gamma
    )
    wanted = [value for each in ordinal_by_loop(rewards, own, GROUPS.tolist(), gamma) for value in each]
    assert got.tolist() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("advantage", OF_TURNS)
@given(rewards=SIX, own=OWN)
def test_without_turn_rewards_and_discount_a_turn_has_the_credit_of_its_episode(
    advantage: str, rewards: list[float], own: list[list[float]]
) -> None:
    """Also where the members of a group have other numbers of turns."""
    objective = Objective(AlgorithmConfig(advantage=advantage))
    none = [[0.0] * len(each) for each in own]
    rewards_C, samples_C = columns(none)
    tokens_C = torch.arange(len(samples_C)) % 5
    tokens_N = torch.zeros(6, dtype=torch.int64).index_add(0, samples_C, tokens_C)
    given_N = torch.tensor(rewards, dtype=torch.float64)
    of_episode = objective.advantages(given_N, GROUPS, tokens_N, tokens_N)[samples_C]
    turns = StepTurns(samples_C=samples_C, rewards_C=rewards_C, trainable_C=tokens_C)
    of_turn = objective.turn_advantages(given_N, GROUPS, turns, gamma=1.0)
    counted = tokens_C > 0  # whitening leaves the others at 0, which no token reads
    torch.testing.assert_close(of_turn[counted], of_episode[counted], rtol=1e-9, atol=1e-9)


def test_the_baseline_of_a_turn_does_not_depend_on_its_own_episode() -> None:
    """The baseline is unbiased: another own reward moves the advantage by exactly as much."""
    own = [[0.5, 0.0], [1.0], [0.0, 0.25, 0.5], [0.0], [0.0], [0.0]]
    rewards = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 0.0]).double()
    one = turn_advantages(rewards, GROUPS, *columns(own), advantage="rloo", gamma=0.9)
    other = turn_advantages(
        rewards + torch.tensor([0, 0, 4.0, 0, 0, 0]), GROUPS, *columns(own), advantage="rloo", gamma=0.9
    )
    assert (other - one)[3:6].tolist() == pytest.approx([4 * 0.81, 4 * 0.9, 4.0])


def test_returns_run_in_order_of_delivery() -> None:
    returns = turn_returns(torch.tensor([2.0]), torch.tensor([0.5, 0.0, 0.25]), torch.tensor([0, 0, 0]), gamma=0.5)
    assert returns.tolist() == [[0.5 + 0.25 * 1.5, 0.5 * 1.5, 1.5]]


@settings(max_examples=examples(40))
@given(SIX, BORDERS, episodes())
def test_the_baseline_of_an_episode_does_not_see_its_sequences(
    rewards: list[float], borders: list[list[bool]], told: list[list[Turn]]
) -> None:
    samples = [replace(sample, reward=reward) for sample, reward in zip(step(told, borders), rewards, strict=True)]
    (batch,) = make_batches(samples)
    trainable_N = torch.from_numpy(batch.trainable_N)
    further: dict[str, dict[str, Any]] = {"opo": {"trainable_N": trainable_N}, "pass_at_k": {"k": 2}}
    for name, estimator in ADVANTAGES.items():
        values = further.get(name, {})
        got = estimator(torch.from_numpy(batch.rewards_N).double(), torch.from_numpy(batch.groups_N), **values)
        rewards_N = torch.tensor(np.array(rewards, np.float32)).double()
        wanted = estimator(rewards_N, torch.tensor([1, 1, 1, 2, 2, 2]), **values)
        assert got.tolist() == wanted.tolist(), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"credit": "token"}, "credit: want episode or turn"),
        ({"credit": "turn"}, "credit: turn needs algorithm.advantage grpo_no_std"),
        ({"credit": "turn", "algorithm": AlgorithmConfig(advantage="opo")}, "got 'opo'"),
        ({"credit": "turn", "algorithm": AlgorithmConfig(advantage="tests.enumerated:x")}, "credit: turn needs"),
        ({"credit": "turn", "algorithm": AlgorithmConfig(correction="sft")}, "sft has no advantages"),
        ({"credit_gamma": 0.9}, "credit_gamma: not used with credit: episode"),
        (
            {"credit": "turn", "credit_gamma": 1.1, "algorithm": AlgorithmConfig(advantage="rloo")},
            "credit_gamma: want <= 1, got 1.1",
        ),
    ],
)
def test_a_credit_without_meaning_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LearnerConfig(**changes)


def test_every_estimator_that_knows_turns_may_have_them() -> None:
    for advantage in OF_TURNS:
        LearnerConfig(credit="turn", credit_gamma=0.9, algorithm=AlgorithmConfig(advantage=advantage))


# ---- taking in, planning


def test_an_episode_is_held_against_its_task() -> None:
    asked = task(1, rollout="calc", budget=Budget(total_tokens=30))
    one = cut([([5, 6], [-1.0, -2.0], 0), ([7], [-0.5], 0)], [False, True], 0, asked)
    assert mismatch(asked, index_of(1, one), max_context=7) == ""
    assert mismatch(asked, index_of(1, one), max_context=6) == "length"
    assert mismatch(replace(asked, budget=Budget(total_tokens=11)), index_of(1, one), max_context=0) == "length"
    assert mismatch(asked, index_of(1, replace(one, rollout="")), max_context=0) == "rollout"
    assert mismatch(task(1), index_of(1, one), max_context=0) == "rollout"
    assert mismatch(task(1), index_of(1, replace(one, rollout="")), max_context=0) == "sequences"
    assert (
        mismatch(asked, index_of(1, replace(one, prompt=[{"role": "user", "content": "another"}])), max_context=0)
        == "prompt"
    )
    empty = np.zeros(0, np.int32)
    nothing = replace(one, tokens=empty, response_length=0, sequences=(), spans=(), turns=None)
    assert mismatch(asked, index_of(1, nothing), max_context=0) == "response_length"


def test_episodes_are_planned_by_sequence_and_settled_once() -> None:
    """A plan over a group of 2 and 1 sequences: applied again by a restart, to the same chain."""
    histories = []
    for _ in range(2):
        source = DataSource(rules(groups_per_step=1, data_parallel=2, max_tokens_per_micro_batch=8))
        source.version(0, 0)
        source.published(0, 0)
        asked = task(1, rollout="calc", budget=Budget(tokens=40))
        source.issued(asked, 0.0)
        two = cut([([5, 6], [-1.0, -2.0], 0), ([7], [-0.5], 0)], [False, True], 0, asked)
        one = cut([([5], [-1.0], 0)], [False], 1, asked)
        for seq, sample in enumerate((two, one, replace(two, attempt="b")), start=1):
            source.add(index_of(seq, sample), 0.0)
        plan = source.plan(0.0)
        assert isinstance(plan, Plan)
        assert plan.rows is not None
        assert (plan.seqs.tolist(), plan.rows.tolist(), len(plan.ranks), len(plan.micro_batches)) == (
            [1, 2],
            [2, 1],
            3,
            3,
        )
        assert source.token_limits(plan) == {1: 40}
        batches = build_batches(plan, [two, one], token_limits=source.token_limits(plan))
        assert {batch.max_new_tokens for batch in batches} == {40}
        for batch, again in zip(batches, packed_by_ranks(plan, [two, one]), strict=True):
            assert batch.turn_tokens_C.tolist() == again.turn_tokens_C.tolist() == [2, 1, 1]
            for row, row_again in zip(batch.micro_batches, again.micro_batches, strict=True):
                assert row.turn_T.tolist() == row_again.turn_T.tolist()
                assert row.sequence_T.tolist() == row_again.sequence_T.tolist()
        assert (
            sum(int(row.loss_mask_T.sum()) for batch in batches for row in batch.micro_batches)
            == batches[0].num_tokens
            == 4
        )
        source.apply(plan, 1)
        accounting = source.accounting()
        assert (accounting.trained, accounting.duplicate, accounting.buffered) == (2, 1, 0)
        histories.append((plan.chain, source.cursor()))
    assert histories[0] == histories[1]


def test_the_chain_covers_rows_only_where_one_is_not_1() -> None:
    (batch,) = make_batches(make_samples(vocab=64))
    assert batch.num_sequences == 16
    plan = Plan(
        epoch=1,
        step=2,
        tasks=np.array([4]),
        seqs=np.array([7, 8]),
        group_sizes=np.array([2], np.int32),
        ranks=np.array([0, 1], np.int32),
        micro_batches=np.array([0, 0], np.int32),
        version_steps={3: 1},
        oldest_step=None,
        data_parallel=2,
        num_micro_batches=1,
        config_digest="d",
        chain="c",
    )
    before = "f3042991559aaedb471c5c324d98c77ace0b7e6c3c6f4d66f8a5b01fd58dd6df"
    assert chain_of(GENESIS, plan) == chain_of(GENESIS, replace(plan, rows=np.array([1, 1], np.int32))) == before
    chains = {chain_of(GENESIS, replace(plan, rows=np.array(rows, np.int32))) for rows in ([1, 2], [2, 1])}
    assert len(chains | {before}) == 3
