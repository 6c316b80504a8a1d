"""REINFORCE++ by token: a plain reference over episodes of several sequences, any split into rows, and the exact
gradient.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithm_settings import algorithm_of, loss_by
from tests.enumerated import MASK_T, RESPONSES, SAMPLE_T, Policy, expected, gradient, per_token
from tests.examples import examples
from tests.refusals import refusal
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.settings.config import LearnerConfig

OWNERS = [0, 0, 1, 2, 2, 2]
"""Sample of each sequence."""
EACH = 5


def config(**changes: Any) -> AlgorithmConfig:
    return algorithm_of(kl=KLConfig(reward_coef=0.3, reward_by="token"), **changes)


def row(seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    size = len(OWNERS) * EACH
    draw = torch.randn(4, size, generator=generator, dtype=torch.float64)
    sequence_T = torch.arange(len(OWNERS)).repeat_interleave(EACH)
    sample_T = torch.tensor(OWNERS)[sequence_T]
    return Tokens(
        mask_T=draw[0] < 0.7,
        sample_T=sample_T,
        num_samples=3,
        sequence_T=sequence_T,
        num_sequences=len(OWNERS),
        rollout_T=-draw[1].abs(),
        lag_T=torch.zeros(size, dtype=torch.int64),
        advantages_T=torch.randn(3, generator=generator, dtype=torch.float64)[sample_T],
        old_T=torch.where(draw[0] < 0.7, draw[2], math.nan),
        reference_T=torch.where(draw[0] < 0.7, draw[3], math.nan),
    )


def part_of(whole: Tokens, at: Tensor) -> Tokens:
    """Return the tokens at these places, as a row of their own."""
    values: dict[str, Any] = {name: getattr(whole, name) for name in Tokens.__slots__}
    values |= {name: value[at] for name, value in values.items() if torch.is_tensor(value)}
    return Tokens(**values)


def by_loop(tokens: Tokens, coef: float, *, whiten: bool, gamma: float = 1.0) -> list[float]:
    """Return the advantages: backwards over all tokens of an episode, then less the mean and by the deviation of all of
    them.

    The outcome is the reward of the episode's last trainable token; a masked token is no step.
    """
    found, ahead, sample = [0.0] * len(tokens.mask_T), 0.0, -1
    for t in reversed(range(len(found))):
        if not tokens.mask_T[t]:
            continue
        gap = (
            float(tokens.old_T[t] - tokens.reference_T[t])
            if tokens.old_T is not None and tokens.reference_T is not None
            else 0.0
        )
        if int(tokens.sample_T[t]) != sample:
            sample = int(tokens.sample_T[t])
            ahead = float(tokens.advantages_T[t])
        else:
            ahead *= gamma
        ahead -= coef * gap
        found[t] = ahead
    if not whiten:
        return found
    there = [value for t, value in enumerate(found) if tokens.mask_T[t]]
    mean = sum(there) / len(there)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in there) / len(there) + 1e-8)
    return [(value - mean) / deviation if tokens.mask_T[t] else 0.0 for t, value in enumerate(found)]


@settings(deadline=None, max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    advantage=st.sampled_from(["reinforce_pp", "reinforce_pp_baseline", "rloo"]),
    parts=st.integers(1, 4),
)
def test_a_token_is_charged_for_the_rest_of_its_episode(seed: int, advantage: str, parts: int) -> None:
    """Returns do not change if the sequences of an episode are in several rows, in any order."""
    whole = row(seed)
    assert whole.sequence_T is not None
    at = [(whole.sequence_T % parts == part).nonzero()[:, 0] for part in reversed(range(parts))]
    rows = [part_of(whole, one) for one in at]
    made = Objective(config(advantage=advantage)).with_token_returns(rows, kl_scale=0.5, summed=lambda values: values)
    got_T = torch.zeros(len(whole.mask_T), dtype=torch.float64)
    for one, tokens in zip(at, made, strict=True):
        got_T[one] = tokens.advantages_T
    wanted = by_loop(whole, 0.15, whiten=advantage != "rloo")
    at_T = whole.mask_T
    torch.testing.assert_close(got_T[at_T], torch.tensor(wanted, dtype=torch.float64)[at_T], atol=1e-10, rtol=1e-10)


@settings(deadline=None, max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    advantage=st.sampled_from(["reinforce_pp", "reinforce"]),
    parts=st.integers(1, 4),
    gamma=st.sampled_from([0.0, 0.3, 0.9, 0.999]),
    charged=st.booleans(),
)
def test_a_return_is_discounted_by_each_trainable_token_of_the_episode(
    seed: int, advantage: str, parts: int, gamma: float, charged: bool
) -> None:
    """Without the divergence no other policy is needed; tokens of tools are skipped, in rows of any order."""
    whole = row(seed)
    settings_of = (
        config(advantage=advantage, gamma=gamma) if charged else AlgorithmConfig(advantage=advantage, gamma=gamma)
    )
    if not charged:
        whole = replace(whole, old_T=None, reference_T=None)
    assert whole.sequence_T is not None
    at = [(whole.sequence_T % parts == part).nonzero()[:, 0] for part in reversed(range(parts))]
    objective = Objective(settings_of)
    assert objective.by_token
    made = objective.with_token_returns([part_of(whole, one) for one in at], kl_scale=0.5, summed=lambda values: values)
    got_T = torch.zeros(len(whole.mask_T), dtype=torch.float64)
    for one, tokens in zip(at, made, strict=True):
        got_T[one] = tokens.advantages_T
    wanted = by_loop(whole, 0.15, whiten=advantage == "reinforce_pp", gamma=gamma)
    at_T = whole.mask_T
    torch.testing.assert_close(got_T[at_T], torch.tensor(wanted, dtype=torch.float64)[at_T], atol=1e-9, rtol=1e-9)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_a_discount_of_almost_1_is_the_sum_without_one(seed: int) -> None:
    whole = row(seed)
    (plain,) = Objective(config(advantage="reinforce")).with_token_returns(
        [whole], kl_scale=1.0, summed=lambda values: values
    )
    near = Objective(config(advantage="reinforce", gamma=1 - 1e-9))
    (made,) = near.with_token_returns([whole], kl_scale=1.0, summed=lambda values: values)
    torch.testing.assert_close(made.advantages_T[whole.mask_T], plain.advantages_T[whole.mask_T], atol=1e-6, rtol=1e-6)


def test_only_estimators_without_a_baseline_are_discounted() -> None:
    """A baseline of whole rewards times gamma to the number of tokens that follow would depend on the response."""
    for advantage in ("grpo", "grpo_no_std", "rloo", "reinforce_pp_baseline", "opo", "my.module:own"):
        with refusal(ValueError, place="gamma"):
            AlgorithmConfig(advantage=advantage, gamma=0.99)
    assert not Objective(AlgorithmConfig(advantage="reinforce_pp")).by_token
    with refusal(ValueError, place="algorithm.gamma", got="0.9"):
        LearnerConfig(credit="turn", algorithm=AlgorithmConfig(advantage="reinforce_pp", gamma=0.9))


def test_the_mean_gradient_is_that_of_the_divergence_in_the_reward_of_samples() -> None:
    """Divergences before a token do not depend on it: leaving them out changes the variance and not the mean."""
    policy = Policy(Policy.random(3).logits_PV.requires_grad_())
    reference = Policy.random(4, like=policy, spread=0.7)
    rewards_N = torch.rand(len(RESPONSES), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gap_T = (policy.log_probs_T - reference.log_probs_T).detach()
    tokens = Tokens(
        mask_T=MASK_T,
        sample_T=SAMPLE_T,
        num_samples=len(RESPONSES),
        rollout_T=policy.log_probs_T.detach(),
        lag_T=torch.zeros_like(SAMPLE_T),
        advantages_T=per_token(rewards_N),
        old_T=policy.log_probs_T.detach(),
        reference_T=reference.log_probs_T,
    )
    (made,) = Objective(config(advantage="reinforce")).with_token_returns(
        [tokens], kl_scale=1.0, summed=lambda values: values
    )
    summed_T = per_token(rewards_N - 0.3 * gap_T.view(len(RESPONSES), -1).sum(1))
    assert not torch.allclose(made.advantages_T, summed_T)
    got, wanted = (
        gradient(
            expected(loss_by("reinforce", policy.log_probs_T, policy.log_probs_T, advantages_T, MASK_T).loss_T, policy),
            policy,
        )
        for advantages_T in (made.advantages_T, summed_T)
    )
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_the_divergence_of_tokens_does_not_go_with_advantages_of_turns() -> None:
    with refusal(ValueError, place="credit"):
        LearnerConfig(credit="turn", algorithm=config(advantage="rloo"))
    assert LearnerConfig(algorithm=config(advantage="rloo")).credit == "episode"
