"""Drawing tokens: the uniform numbers, the inverse of the distribution, its filters, and the independence of rows."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.refusals import refusal
from tidemill.actors.errors import BadRequest
from tidemill.actors.generate_body import RequestLimits, SamplingParams, parse_generate, sampling_params, seeds
from tidemill.actors.serving.builtin.sampler import Sampler, uniforms

CPU = torch.device("cpu")
LIMITS = RequestLimits(vocab_size=100, max_context=64, encode=None)


def draw(
    scores_NV: torch.Tensor, params: list[dict[str, Any]], row_seeds: list[int], position: int = 7
) -> tuple[np.ndarray, np.ndarray]:
    sampler = Sampler([SamplingParams(**each) for each in params], row_seeds, CPU)
    return sampler.draw(scores_NV.clone(), np.full(len(params), position, np.int64))


def test_uniforms_are_splitmix64() -> None:
    """The uniforms agree with plain integers: output of the published function for the seed, then for a counter on top
    of it.
    """

    def mix(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        return state ^ (state >> 31)

    assert mix(1234567) == 6457827717110365317  # first output for this seed in the reference implementation
    for seed, position in ((0, 0), (1, 5), (2**64 - 1, 2**31)):
        want = (mix((mix(seed) + position * 0x9E3779B97F4A7C15) % 2**64) // 2**12 + 0.5) / 2**52
        assert uniforms(np.array([seed], np.uint64), np.array([position]))[0] == want


def test_uniforms_are_uniform_and_neighbours_independent() -> None:
    count = 100_000
    by_seed = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    by_position = uniforms(np.full(count, 3, np.uint64), np.arange(count))
    for found in (by_seed, by_position):
        assert found.min() > 0 and found.max() < 1
        drawn = np.histogram(found, bins=100, range=(0, 1))[0]
        assert (
            (drawn - count / 100) ** 2 / (count / 100)
        ).sum() < 170  # 99 degrees of freedom; by chance once in 100,000
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02
    shifted = uniforms(np.full(count, 4, np.uint64), np.arange(count))
    assert not set(by_position[:1000]) & set(shifted[:1000])


def test_draws_follow_the_distribution() -> None:
    count, probabilities = 40_000, torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    scores = probabilities.log().expand(count, -1)
    tokens, log_probs = draw(scores, [{}] * count, list(range(count)))
    drawn = np.bincount(tokens, minlength=5)
    assert drawn[1] == 0
    want = count * probabilities.numpy()[[0, 2, 3, 4]]
    assert (((drawn[[0, 2, 3, 4]] - want) ** 2) / want).sum() < 21  # 3 degrees of freedom; by chance once in 10,000
    np.testing.assert_allclose(log_probs, probabilities.log().numpy()[tokens], rtol=1e-5)


def test_a_row_does_not_depend_on_other_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 50, generator=generator) * 3
    params = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.5, "temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 9, "top_p": 0.9},
    ]
    row_seeds = [3, 1, 4, 1, 5, 9]
    together = draw(scores, params, row_seeds)
    for row in range(6):
        alone = draw(scores[row : row + 1], params[row : row + 1], row_seeds[row : row + 1])
        assert alone[0][0] == together[0][row]
        np.testing.assert_allclose(alone[1][0], together[1][row], rtol=1e-6)


def test_greedy_takes_the_largest_with_its_untempered_log_prob() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, -2.0]])
    tokens, log_probs = draw(scores, [{"temperature": 0.0, "top_k": 1, "top_p": 0.1}], [1])
    assert tokens[0] == 1
    np.testing.assert_allclose(log_probs[0], scores.log_softmax(-1)[0, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 3}),
        ({"top_p": 0.9999999}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"top_k": 2, "top_p": 0.95}, {0, 1}),
        ({"top_k": 50}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_fewest_tokens_that_reach_top_p(params: dict[str, Any], kept: set[int]) -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.1, 0.2])
    count = 400
    tokens, log_probs = draw(probabilities.log().expand(count, -1), [params] * count, list(range(count)))
    assert set(tokens.tolist()) == kept
    total = sum(probabilities[token].item() for token in kept)
    np.testing.assert_allclose(np.exp(log_probs), probabilities.numpy()[tokens] / total, rtol=1e-5)


def test_of_equal_tokens_the_lower_ids_are_kept() -> None:
    tokens, _ = draw(torch.zeros(300, 40), [{"top_k": 4}] * 300, list(range(300)))
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_the_ends_of_the_distribution_can_be_drawn_and_nothing_beyond() -> None:
    """Zero probability at either end must not be hit by the smallest or largest uniform number."""
    scores = torch.full((2000, 1000), float("-inf"))
    scores[:, 400:402] = torch.tensor([0.0, -30.0])
    tokens, _ = draw(scores, [{}] * 2000, list(range(2000)))
    assert set(tokens.tolist()) <= {400, 401}


def test_scores_that_are_not_finite_show_in_their_log_prob() -> None:
    scores = torch.zeros(2, 5)
    scores[1, 2] = float("nan")
    tokens, log_probs = draw(scores, [{}, {}], [1, 2])
    assert np.isfinite(log_probs).tolist() == [True, False]
    assert (tokens < 5).all()


def test_seeds_are_spread_over_a_group_and_fresh_without_one() -> None:
    body = {
        "input_ids": [[1], [2], [3]],
        "sampling_params": [{"n": 2, "sampling_seed": 5}, {"n": 2}, {"sampling_seed": -1}],
    }
    found = seeds(parse_generate(body, LIMITS))
    assert found[:2] == [5, 6]
    assert found[4] == 2**64 - 1
    assert len({found[2], found[3], *seeds(parse_generate(body, LIMITS))[2:4]}) == 4
    same = {"input_ids": [[1], [2]], "sampling_params": {"n": 2, "sampling_seed": 7}}
    assert seeds(parse_generate(same, LIMITS)) == [7, 8, 7, 8]


def test_none_means_the_default() -> None:
    assert sampling_params({"stop": None, "top_k": None, "sampling_seed": None}) == SamplingParams()
    with refusal(BadRequest, place="sampling_params.top_k", got="1.5"):
        sampling_params({"top_k": 1.5})
