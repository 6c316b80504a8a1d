"""Random conversations through the gateway: tokens, masks and log-probs of a sample are those that were sampled, and a
forward pass's.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from tests.episode_kit import Client, stage, task
from tests.random_talks import Kept, Talk, write_talking_model
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Sample

AT_ONCE = 16
"""Conversations beside each other: the engine decodes them in one batch."""
TEMPERATURES = (0.7, 1.0, 1.3)
PASS_TOKENS = 1 << 14
"""Tokens of one forward pass, padding included."""
HAPPENED = {
    "branch",
    "cut_short",
    "compact",
    "rewrite",
    "both",
    "ids",
    "stream",
    "whole",
    "tool_call",
    "hung_up",
    "extends",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_talking_model(tmp_path_factory.mktemp("talks") / "model")


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
async def test_each_sample_is_what_was_sampled_with_the_log_probs_of_a_forward_pass(
    model_dir: Path, count: int
) -> None:
    """The driver keeps each answer's ids and log-probs. A third account is transformers' forward pass of the
    sequences.
    """
    talks = [Talk(seed) for seed in range(count)]
    samples = await talked(model_dir, talks)
    happened = sum((Counter(talk.did) for talk in talks), Counter[str]())
    assert happened.keys() == HAPPENED and min(happened.values()) >= count / 20, happened
    masks = [check_kept(sample, talk.kept) for sample, talk in zip(samples, talks, strict=True)]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    wanted = await asyncio.to_thread(log_probs_of_samples, model, samples)
    for number, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        np.testing.assert_allclose(
            sample.rollout_log_probs[mask], wanted[number][mask], atol=1e-4, rtol=0, err_msg=f"conversation {number}"
        )
    assert sum(len(sample.sizes) > 1 for sample in samples) > count / 3, "branches are there"
    assert sum(len(sample.turns.at) > len(sample.sizes) for sample in samples if sample.turns) > count / 3, (
        "and sequences of several turns"
    )


async def talked(model_dir: Path, talks: Sequence[Talk]) -> list[Sample]:
    """Return the samples of conversations, at temperatures in turn."""
    room = asyncio.Semaphore(AT_ONCE)

    async def program(client: Client) -> float:
        return await talks[client.task["task"] - 1](client)

    async with stage(model_dir, program) as scene:

        async def one(number: int) -> Sample:
            given = task(seed=number, temperature=TEMPERATURES[number % len(TEMPERATURES)])
            async with room:
                return (await scene.rollout.sample(replace(given, id=number + 1), 0, "n0")).sample

        async with asyncio.TaskGroup() as group:
            making = [group.create_task(one(number)) for number in range(len(talks))]
    return [each.result() for each in making]


def check_kept(sample: Sample, kept: Sequence[Kept]) -> NDArray[np.bool_]:
    """Compare a sample with the answers that its program kept; return the trained places of the R axis, as the program
    knows them.
    """
    check_sample(sample)
    assert sample.turns is not None
    wanted = {turn.id: turn for turn in kept if turn.trained and turn.tokens}
    assert len(sample.turns.id) == len(set(sample.turns.id)) and set(sample.turns.id) == set(wanted)
    assert sample.turns.agent == tuple(wanted[id].agent for id in sample.turns.id)
    places = [(row.ids, row.first + place) for row in rows_of(0, sample) for place in range(len(row.ids) - row.first)]
    mask = np.zeros(len(sample.loss_mask), bool)
    for id, at, count in zip(sample.turns.id, sample.turns.at.tolist(), sample.turns.tokens.tolist(), strict=True):
        turn, (ids, before) = wanted[id], places[at]
        tokens = ids[before : before + count]
        assert tuple(tokens[: len(turn.tokens)]) == turn.tokens and (turn.cut or count == len(turn.tokens))
        assert turn.prompt is None or tuple(ids[:before]) == turn.prompt, "trained behind the very ids that were asked"
        assert turn.prompt is None or turn.prompt[: len(turn.behind)] == turn.behind, (
            "an answer that comes back has the ids that were sampled"
        )
        delivered = sample.rollout_log_probs[at : at + len(turn.tokens)]
        np.testing.assert_allclose(delivered, turn.log_probs, atol=1e-5, rtol=0)
        assert not mask[at : at + count].any(), "trained once"
        mask[at : at + count] = True
    np.testing.assert_array_equal(sample.loss_mask == 1, mask)
    assert not sample.rollout_log_probs[~mask].any()
    return mask


def log_probs_of_samples(model: Any, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
    """Return the log-probs [R] of each sample by full forward passes of its sequences, those of like length in one
    pass.
    """
    found = [np.zeros(len(sample.loss_mask), np.float32) for sample in samples]
    rows = sorted(
        (row for number, sample in enumerate(samples) for row in rows_of(number, sample)), key=lambda row: len(row.ids)
    )
    while rows:
        count = max(1, PASS_TOKENS // len(rows[-1].ids))
        for row, log_probs in zip(rows[-count:], forward(model, rows[-count:]), strict=True):
            found[row.number][row.region] = log_probs[row.first - 1 :]
        del rows[-count:]
    return found


class Row(NamedTuple):
    """One sequence of a sample."""

    number: int
    """Number of the sample."""
    ids: list[int]
    first: int
    """Place of the first response token among the ids."""
    region: slice
    """Its part of the R axis."""
    temperature: float


def rows_of(number: int, sample: Sample) -> Iterator[Row]:
    at = done = 0
    for size in sample.sizes:
        ids = sample.tokens[at : at + size.num_tokens].tolist()
        region = slice(done, done + size.response_length)
        yield Row(number, ids, size.num_tokens - size.response_length, region, sample.sampling.temperature)
        at, done = at + size.num_tokens, done + size.response_length


@torch.inference_mode()
def forward(model: Any, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
    """Return the log-probs of the ids behind the first, by one pass; padding is behind all that a causal model
    reads.
    """
    longest = max(len(row.ids) for row in rows)
    ids_BL = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in rows])
    temperatures_B11 = torch.tensor([row.temperature for row in rows])[:, None, None]
    log_probs_BLV = (model(ids_BL).logits[:, :-1].float() / temperatures_B11).log_softmax(-1)
    log_probs_BL = log_probs_BLV.gather(2, ids_BL[:, 1:, None])[..., 0].numpy()
    return [log_probs[: len(row.ids) - 1] for row, log_probs in zip(rows, log_probs_BL, strict=True)]
