"""Advantages by token from a critic's values: a plain loop over sequences, any split into rows, and identities."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithm_settings import algorithm_of
from tests.examples import examples
from tests.refusals import refusal
from tests.unit.test_algorithms_token_returns import part_of
from tests.unit.test_algorithms_token_returns import row as unvalued
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.gae_vtrace import with_token_advantages
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.settings.config import CriticConfig, LearnerConfig
from tidemill.learner.settings.optimizer import OptimizerConfig

REWARDS_N = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
COEF = 0.3


def config(**changes: Any) -> AlgorithmConfig:
    kl = KLConfig(reward_coef=COEF, reward_by="token")
    return algorithm_of(**({"advantage": "gae", "gamma": 0.9, "lam": 0.7, "kl": kl} | changes))


def row(seed: int) -> Tokens:
    """Return three samples of two, one and three sequences, with some tokens masked; NaN stands there."""
    tokens = unvalued(seed)
    values_T = torch.randn(len(tokens.mask_T), generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return replace(tokens, values_T=torch.where(tokens.mask_T, values_T, math.nan))


def made(rows: list[Tokens], algorithm: AlgorithmConfig) -> list[Tokens]:
    return with_token_advantages(rows, REWARDS_N, algorithm, kl_scale=0.5, summed=lambda values: values)


def by_loop(tokens: Tokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns): backwards over the trainable tokens of each sequence, which ends with its sample's
    reward.
    """
    assert (
        tokens.old_T is not None
        and tokens.reference_T is not None
        and tokens.values_T is not None
        and tokens.sequence_T is not None
    )
    advantages_T, returns_T = torch.zeros_like(tokens.values_T), torch.zeros_like(tokens.values_T)
    advantage = ahead = target = 0.0
    sequence = -1
    for t in reversed(range(len(advantages_T))):
        if not tokens.mask_T[t]:
            continue
        value, reward = float(tokens.values_T[t]), -0.5 * COEF * float(tokens.old_T[t] - tokens.reference_T[t])
        if int(tokens.sequence_T[t]) != sequence:
            sequence, advantage, ahead, target = int(tokens.sequence_T[t]), 0.0, 0.0, 0.0
            reward += float(REWARDS_N[tokens.sample_T[t]])
        if algorithm.advantage == "gae":
            advantage = reward + algorithm.gamma * ahead - value + algorithm.gamma * algorithm.lam * advantage
            advantages_T[t], returns_T[t] = advantage, advantage + value
        else:
            weight = math.exp(min(20.0, max(-20.0, float(tokens.old_T[t] - tokens.rollout_T[t]))))
            advantages_T[t] = reward + algorithm.gamma * target - value
            error = min(weight, algorithm.vtrace.rho) * (reward + algorithm.gamma * ahead - value)
            trace = algorithm.gamma * algorithm.lam * min(weight, algorithm.vtrace.c)
            target = value + error + trace * (target - ahead)
            returns_T[t] = target
        ahead = value
    return advantages_T, returns_T


@settings(deadline=None, max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    advantage=st.sampled_from(["gae", "vtrace"]),
    parts=st.integers(1, 4),
    whiten=st.booleans(),
)
def test_the_definitions_sequence_by_sequence(seed: int, advantage: str, parts: int, whiten: bool) -> None:
    """Advantages do not change if the sequences of an episode are in several rows, in any order."""
    bars = {"vtrace": {"rho": 1.0 + seed % 3, "c": 0.5 + seed % 2 / 2}} if advantage == "vtrace" else {}
    algorithm, whole = config(advantage=advantage, whiten=whiten, **bars), row(seed)
    assert whole.sequence_T is not None
    at = [(whole.sequence_T % parts == part).nonzero()[:, 0] for part in reversed(range(parts))]
    advantages_T, returns_T = by_loop(whole, algorithm)
    if whiten:
        there = advantages_T[whole.mask_T]
        advantages_T = torch.where(
            whole.mask_T, (advantages_T - there.mean()) / (there.var(correction=0) + 1e-8).sqrt(), 0.0
        )
    for place, got in zip(at, made([part_of(whole, one) for one in at], algorithm), strict=True):
        assert got.returns_T is not None
        torch.testing.assert_close(got.advantages_T, advantages_T[place], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got.returns_T, returns_T[place], rtol=1e-9, atol=1e-9)


def test_gae_whitens_unless_it_is_switched_off_and_vtrace_does_not() -> None:
    for advantage, whiten, wanted in (
        ("gae", None, True),
        ("gae", False, False),
        ("vtrace", None, False),
        ("vtrace", True, True),
    ):
        (got,) = made([row(3)], config(advantage=advantage, whiten=whiten))
        there = got.advantages_T[got.mask_T]
        assert (abs(float(there.mean())) < 1e-9 and abs(float(there.var(correction=0)) - 1) < 1e-4) is wanted


def test_on_policy_vtrace_targets_are_those_of_gae() -> None:
    tokens = row(5)
    assert tokens.old_T is not None
    tokens = replace(tokens, rollout_T=tokens.old_T)
    gae, vtrace = (made([tokens], config(advantage=advantage))[0].returns_T for advantage in ("gae", "vtrace"))
    assert gae is not None and vtrace is not None
    torch.testing.assert_close(gae, vtrace)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, "gamma: want <= 1, got 1.5"),
        ({"lam": -0.1}, "lam: want >= 0, got -0.1"),
        ({"advantage": "vtrace", "vtrace": {"c": 2.0}}, "vtrace.c: want <= rho = 1.0"),
        ({"advantage": "vtrace", "vtrace": {"c": 0.0}}, "vtrace.c: want > 0, got 0.0"),
        (
            {"vtrace": {"rho": 2.0}},
            "vtrace.rho: not used by advantage gae; want advantage: vtrace, or 1.0 here, got 2.0",
        ),
        (
            {"advantage": "rloo"},
            "gamma: not used by advantage rloo; want advantage: gae | vtrace | reinforce | reinforce_pp, or 1.0",
        ),
        ({"correction": "a3po", "advantage": "vtrace", "kl": KLConfig()}, "loglinear saves the forward pass"),
        ({"correction": "sft", "gamma": 1.0, "lam": 1.0, "kl": KLConfig()}, "advantage: sft has no advantages"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("|", r"\|")):
        config(**changes)


def adam_critic() -> CriticConfig:
    return CriticConfig(optimizer=OptimizerConfig(name="adam"))


def test_a_critic_has_adam() -> None:
    assert adam_critic().optimizer.name == "adam"
    for name in ("sgd", "muon"):
        with refusal(ValueError, place="optimizer.name", got=f"'{name}'"):
            CriticConfig(optimizer=OptimizerConfig(name=name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"critic": CriticConfig(warmup_steps=3)},
            {"place": "critic"},
        ),
        ({"credit": "turn", "algorithm": AlgorithmConfig(advantage="gae")}, {"place": "credit"}),
        (
            {"steps": 5, "critic": CriticConfig(warmup_steps=5), "algorithm": AlgorithmConfig(advantage="gae")},
            {"place": "critic.warmup_steps", "got": "5: no step trains the policy"},
        ),
        (
            {"offload_optimizer": True, "critic": adam_critic(), "algorithm": AlgorithmConfig(advantage="gae")},
            {"place": "offload_optimizer", "got": "true"},
        ),
    ],
)
def test_a_critic_where_none_can_be_is_refused(changes: dict[str, Any], message: dict[str, Any]) -> None:
    with refusal(ValueError, **message):
        LearnerConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference_every": -1}, {"place": "reference_every", "got": "-1"}),
        ({"reference_ema": 1.0}, {"place": "reference_ema", "got": "1.0"}),
        ({"reference_ema": 0.9, "reference_every": 2}, {"place": "reference_ema"}),
    ],
)
def test_a_reference_moves_by_one_rule(changes: dict[str, Any], message: dict[str, Any]) -> None:
    with refusal(ValueError, **message):
        KLConfig(coef=0.1, **changes)
    with refusal(ValueError, place="kl.reference_every"):
        AlgorithmConfig(kl=KLConfig(reference_every=2))


def test_a_critic_needs_no_groups() -> None:
    assert LearnerConfig(group_size=1, algorithm=AlgorithmConfig(advantage="gae")).group_size == 1
