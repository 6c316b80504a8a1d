"""Sequences of a row as a tree: every sequence is found again along its prefix, and no token is computed twice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.gpu_kit import environment, fake_nvidia_smi
from tests.learner_steps import make_batches, make_samples, with_long_prompts
from tests.unit.test_truncation import of_one_rank
from tidemill.launch.run.feeder_process import shares_prompts
from tidemill.launch.settings.config_loader import load
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.batch.shared_prompts import computed_spans, num_computed, num_needed, packings, repacked, tree_of
from tidemill.learner.buffer.assignment import SHARED_FROM, work_of
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.debug.config import DebugConfig
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feeder_settings import FeederPlaces, FeederSettings, ModelFacts
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.trainer.rows import rows_of

DIGITS = Path(__file__).parents[2] / "launch/configs/digits.yaml"


def row_of(sequences: list[list[int]], trained: list[int]) -> MicroBatch:
    """Return a row of sequences, each with one trainable target, which the token at ``trained`` predicts."""
    whole = make_batches(make_samples(vocab=50, groups=1, group_size=1))[0].micro_batches[0]
    bounds = np.cumsum([0, *map(len, sequences)])
    mask_T = np.zeros(bounds[-1], np.bool_)
    mask_T[bounds[:-1] + trained] = True
    return replace(
        whole,
        tokens_T=np.concatenate(sequences).astype(np.int64),
        cu_seqlens=bounds.astype(np.int32),
        loss_mask_T=mask_T,
    )


def branching(generator: np.random.Generator) -> tuple[list[list[int]], list[int]]:
    """Return sequences of which each may begin as the one before it does, or as another, to any length, its own
    included; and the place of a trained token in each.
    """
    sequences: list[list[int]] = []
    for _ in range(generator.integers(2, 7)):
        begin = sequences[generator.integers(-1, len(sequences))] if sequences else []
        kept = begin[: generator.integers(len(begin) // 2, len(begin) + 1)]
        sequences.append(kept + generator.integers(0, 3, generator.integers(0 if kept else 1, 60)).tolist())
    return sequences, [int(generator.integers(len(sequence) // 2, len(sequence))) for sequence in sequences]


def test_every_sequence_is_found_along_its_prefix() -> None:
    num_trees = num_deep = 0
    for seed in range(examples(300)):
        sequences, trained = branching(np.random.default_rng(seed))
        row = row_of(sequences, trained)
        tree = tree_of(row)
        if tree is None:
            continue
        num_trees, num_deep = num_trees + 1, num_deep + any(len(runs) > 1 for runs in tree.prefixes)
        assert len(np.unique(tree.take_P)) == len(tree.take_P) == sum(tree.lengths)
        starts = np.cumsum([0, *tree.lengths])
        paths = {
            (*(place for begin, length in runs for place in range(begin, begin + length)), *range(start, start + own))
            for runs, start, own in zip(tree.prefixes, starts, tree.lengths, strict=False)
        }
        for start, sequence, last in zip(row.cu_seqlens, sequences, trained, strict=False):
            needed = last + 1
            path = tree.source_T[start : start + needed]
            assert row.tokens_T[tree.take_P[path]].tolist() == sequence[:needed]
            assert any(other[:needed] == tuple(path) for other in paths), "a token attends to what is before it"
            assert (tree.source_T[start + needed : start + len(sequence)] == -1).all()
    assert num_trees > examples(300) / 3 and num_deep > 3


def test_a_short_beginning_is_not_shared() -> None:
    begin = [0] * (SHARED_FROM - 1)
    assert tree_of(row_of([[*begin, 1, 1], [*begin, 2, 2]], [15, 15])) is None
    tree = tree_of(row_of([[0, *begin, 1, 1], [0, *begin, 2, 2]], [17, 17]))
    assert tree is not None
    assert (tree.lengths, tree.prefixes) == ((18, 2), ((), ((0, SHARED_FROM),)))


def sequences_of(batch: StepBatch) -> list[int]:
    return sorted(
        int(row.sequence_T[start])
        for row in batch.micro_batches
        for start in row.cu_seqlens[:-1]
        if row.sequence_T[start] >= 0
    )


@settings(deadline=None, max_examples=examples(60))
@given(
    groups=st.integers(1, 5),
    size=st.integers(1, 5),
    max_tokens=st.integers(1, 400),
    minibatches=st.integers(1, 2),
    skipped=st.sets(st.integers(0, 24)),
)
def test_rows_by_prompt_have_the_sequences_of_the_batch(
    groups: int, size: int, max_tokens: int, minibatches: int, skipped: set[int]
) -> None:
    """All of them but the skipped ones, in their minibatches; computed tokens fit into the longest row of the batch."""
    samples = with_long_prompts(make_samples(vocab=50, groups=groups, group_size=size), vocab=50)
    batch = make_batches(samples, max_tokens=max_tokens, minibatches=minibatches)[0]
    skipped_N = np.isin(np.arange(len(samples)), list(skipped))
    packed = packings(batch, skipped_N, by_prompt=True)
    counts = [max(1, len(packing)) for packing in packed]
    after = repacked(batch, packed, counts, pad_to=1)
    assert sequences_of(after) == np.flatnonzero(~skipped_N).tolist()
    assert len(after.micro_batches) == sum(counts)
    capacity = max(len(row.tokens_T) for row in batch.micro_batches)
    for number, packing in enumerate(packed):
        for row in packing:
            assert {int(batch.minibatches_N[part.sample_T[0]]) for part in row} == {number}
            assert num_computed(row) <= capacity
            assert all(num_needed(part) == len(part.tokens_T) - 1 for part in row)


def test_rows_read_the_trained_tokens_alone_where_no_prefix_is_shared() -> None:
    [batch] = make_batches(make_samples(vocab=50), max_tokens=64)
    rows = [rows_of(batch, of_one_rank(), trained_only=only) for only in (False, True)]
    for row, read in zip(*rows, strict=True):
        hidden_T, mask_T = torch.arange(1.0, len(row.tokens_T) + 1), row.seen.mask_T
        assert torch.equal(read.read(hidden_T), hidden_T[mask_T]) and torch.equal(row.read(hidden_T), hidden_T)
        assert torch.equal(read.read_row(row.targets_T), row.targets_T[mask_T])
        assert torch.equal(read.spread(read.read(hidden_T)), torch.where(mask_T, hidden_T, 0.0))


def test_rows_by_prompt_have_equal_work_and_fill_the_rows_of_other_ranks() -> None:
    """One long tree and many short ones: by tokens the long one has others beside it; another rank has three rows."""
    samples = [
        replace(
            sample, tokens=np.concatenate([np.full(60 if sample.task == 1 else 0, 7), sample.tokens]).astype(np.int32)
        )
        for sample in with_long_prompts(make_samples(vocab=50, groups=7, group_size=2), vocab=50)
    ]
    [batch] = make_batches(samples, max_tokens=250)
    none_N = np.zeros(len(samples), np.bool_)

    def largest(**options: Any) -> tuple[int, list[int]]:
        [packing] = packings(batch, none_N, by_prompt=True, max_tokens=400, **options)
        assert all(num_computed(row) <= 400 for row in packing)
        work = [work_of(computed_spans(row), 1) for row in packing]
        return max(work), work

    by_tokens, by_work, spread = largest(), largest(pair_tokens=1), largest(pair_tokens=1, counts=[3])
    assert len(by_tokens[1]) == len(by_work[1]) == 2 and len(spread[1]) == 3
    assert spread[0] < by_work[0] < by_tokens[0]
    assert spread[1] == sorted(spread[1], reverse=True)


@pytest.mark.parametrize(
    ("settings", "devices", "expected"),
    [
        ("data_parallel=2", 0, True),
        ("pipeline_parallel=2", 0, True),
        ("data_parallel=2", 1, False),
        ("data_parallel=2 learner.device=cpu", 1, True),
        ("data_parallel=2 learner.device=cuda", 1, False),
        ("data_parallel=2 learner.dtype=float32", 1, True),
        ("data_parallel=2 learner.attention=sdpa", 1, True),
        ("data_parallel=2 learner.context_parallel=2", 0, False),
        ("data_parallel=2 learner.routing_replay=rollout", 0, False),
        ("data_parallel=1", 0, False),
    ],
)
def test_plans_expect_prompts_once_where_ranks_have_no_obstacle(
    tmp_path: Path, settings: str, devices: int, expected: bool
) -> None:
    config = load(DIGITS, [f"learner.{settings}".split()[0], *settings.split()[1:]]).config
    assert shares_prompts(config, environment(fake_nvidia_smi(tmp_path, devices))) is expected


def test_devices_that_cannot_be_read_end_no_feeder(tmp_path: Path) -> None:
    """They decide the balance of the ranks alone."""
    config = load(DIGITS, ["learner.data_parallel=2"]).config
    assert not shares_prompts(config, environment(fake_nvidia_smi(tmp_path, script="exit 1")))


def test_plans_know_the_samples_that_ranks_leave_out(tmp_path: Path) -> None:
    """From the third step on, where advantages of groups decide; a single rank plans as before."""
    places = FeederPlaces(run="r", bus_url="", listen="", keys=FeedKeys.new(), checkpoints=tmp_path)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "p", "label": 1}\n')
    prompts = PromptFile(path, tokenize=lambda prompt: [1], max_tokens=8)

    def rules(pair_tokens: int = 9, debug: DebugConfig | None = None, **learner: Any) -> DataRules:
        facts = ModelFacts(pair_tokens=pair_tokens, shares_prompts=pair_tokens > 0)
        settings = FeederSettings(
            places=places, model=facts, learner=LearnerConfig(steps=5, **learner), debug=debug or DebugConfig()
        )
        return settings.data_rules(prompts)

    assert (rules().leaves_out_from, rules().shares_prompts) == (3, True)
    assert (rules(0).leaves_out_from, rules(0).digest) == (0, replace(rules(0), shares_prompts=False).digest)
    for other in (
        {"credit": "turn", "algorithm": AlgorithmConfig(advantage="rloo")},
        {"moe_aux_loss_coef": 0.1},
        {"algorithm": AlgorithmConfig(advantage="reinforce")},
        {"debug": DebugConfig(save_train=str(tmp_path / "{step}-{rank}"))},
    ):
        assert rules(**other).leaves_out_from == 0, other
