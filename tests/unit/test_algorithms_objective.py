"""The objective as a whole: which policy, which tokens and which lengths each part of it sees."""

import math
import re
from collections.abc import Callable
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
from tidemill.learner.algorithms.aggregation import Denominators
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.correction import bounded, geometric_means
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.algorithms.tokens import RewardParts, Tokens

N, EACH = 4, 6


def row(seed: int, spread: float = 0.4) -> tuple[Tensor, Tokens]:
    """Return log-probs of the trained policy, and a row of four samples with some masked tokens; float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(5, N * EACH, generator=generator, dtype=torch.float64)
    rollout_T = -draw[0].abs() - 0.3
    tokens = Tokens(
        mask_T=draw[4] < 0.8,
        sample_T=torch.repeat_interleave(torch.arange(N), EACH),
        num_samples=N,
        rollout_T=rollout_T,
        lag_T=torch.zeros(N * EACH, dtype=torch.int64),
        advantages_T=torch.randn(N, generator=generator, dtype=torch.float64).repeat_interleave(EACH),
        old_T=rollout_T + spread * draw[1],
        reference_T=rollout_T + spread * draw[2],
    )
    return rollout_T + spread * draw[3], tokens


def rejected(log_probs_T: Tensor, tokens: Tokens, **changes: Any) -> dict[str, Tensor]:
    objective = Objective(algorithm_of(**changes))
    coupled = objective.coupled([tokens], summed=lambda x: x, gathered=lambda x: x)
    return dict(objective.token_loss(log_probs_T, tokens, coupled).rejected)


@settings(deadline=None, max_examples=examples(60))
@given(seed=st.integers(0, 10_000), limit=st.sampled_from([1e-4, 0.04, 0.1, 0.3, 10.0]), band=st.booleans())
def test_m2po_of_harmful_tokens_is_its_definition(seed: int, limit: float, band: bool) -> None:
    """Reference: the largest squares of the harmful tokens go, until the mean of those left is below the limit."""
    log_probs_T, tokens = row(seed)
    assert tokens.old_T is not None
    bounds = {} if band else {"keep_low": 0.0, "keep_high": 0.0}
    got = rejected(log_probs_T, tokens, correction="m2po_harmful", m2={"limit": limit, **bounds})["m2"].tolist()
    delta = (tokens.old_T - tokens.rollout_T).tolist()
    bad = [
        t
        for t, (d, a) in enumerate(zip(delta, tokens.advantages_T.tolist(), strict=True))
        if tokens.mask_T[t] and d * a > 0
    ]
    kept = sorted(bad, key=lambda t: abs(delta[t]))
    while kept and sum(delta[t] ** 2 for t in kept) / len(kept) >= limit:
        kept.pop()
    gone = {t for t in bad if t not in kept and not (band and 0.7 <= math.exp(delta[t]) <= 1.5)}
    assert {t for t, flag in enumerate(got) if flag} == gone


def test_m2po_of_harmful_tokens_never_rejects_a_pull_back_towards_mu() -> None:
    log_probs_T, tokens = row(3)
    assert tokens.old_T is not None
    towards_T = (tokens.old_T - tokens.rollout_T) * tokens.advantages_T < 0
    assert rejected(log_probs_T, tokens, correction="m2po", m2={"limit": 0.01})["m2"][towards_T].any()
    assert not rejected(log_probs_T, tokens, correction="m2po_harmful", m2={"limit": 0.01})["m2"][towards_T].any()


def test_opsm_follows_the_policy_as_it_is_now() -> None:
    """From the second minibatch on the policy is no longer the one that the step started from."""
    _, tokens = row(1)
    tokens = replace(tokens, advantages_T=-torch.ones_like(tokens.rollout_T), old_T=tokens.rollout_T - 0.45)
    now = rejected(tokens.rollout_T - 0.53, tokens, correction="opsm", reject={"opsm": 0.5})["opsm"]
    assert bool(now[tokens.mask_T].all())
    before = rejected(
        tokens.rollout_T - 0.45, replace(tokens, old_T=tokens.rollout_T - 0.53), correction="opsm", reject={"opsm": 0.5}
    )
    assert not before["opsm"].any()


def test_distillation_follows_the_policy_as_it_is_now() -> None:
    """The mean of ``A grad log pi`` is the gradient of KL(pi || teacher) of the current policy, not of the one before
    the step.
    """
    objective = Objective(algorithm_of(correction="tis", advantage="reinforce", distill={"coef": 0.5}))
    assert not objective.config.needs_old(minibatches=2, published_every=2), "it needs no pass of its own"
    log_probs_T, tokens = row(2)
    assert tokens.reference_T is not None
    got_T = objective.advised(tokens, log_probs_T.requires_grad_()).advantages_T
    assert not got_T.requires_grad
    wanted_T = tokens.advantages_T + torch.where(tokens.mask_T, 0.5 * (tokens.reference_T - log_probs_T.detach()), 0.0)
    torch.testing.assert_close(got_T, wanted_T, atol=1e-12, rtol=0)
    assert Objective(AlgorithmConfig()).advised(tokens, log_probs_T) is tokens


def parts(**columns: list[float]) -> RewardParts:
    names = tuple(sorted(columns))
    return RewardParts(names=names, values_NK=torch.tensor([columns[name] for name in names], dtype=torch.float64).T)


def weighed(given: RewardParts | None, **weights: float) -> list[float]:
    """Return the advantages of two groups of two, not whitened; the scores are all equal."""
    objective = Objective(algorithm_of(advantage="gdpo", gdpo={"weights": weights}, whiten=False))
    place = (torch.ones(4, dtype=torch.float64), torch.tensor([1, 1, 2, 2]), torch.full((4,), 9), torch.full((4,), 9))
    return objective.advantages(*place, parts=given).tolist()


def test_gdpo_weighs_the_parts_by_name() -> None:
    """Half of the square root of 2 = a difference between two samples by its standard deviation."""
    half, nan = 0.5**0.5, math.nan
    given = parts(form=[0.0, 8.0, 1.0, 1.0], right=[1.0, 0.0, nan, nan], **{"right.speed": [5.0, 6.0, 7.0, 9.0]})
    assert weighed(given) == pytest.approx([0.0, 0.0, 0.0, 0.0], abs=1e-5), "form and right, which contains right.speed"
    assert weighed(given, form=3.0, right=1.0) == pytest.approx([-2 * half, 2 * half, 0.0, 0.0], abs=1e-5)
    assert weighed(given, right=-1.0) == pytest.approx([-half, half, 0.0, 0.0], abs=1e-5)
    assert weighed(given, form=1.0, **{"right.speed": 1.0}) == pytest.approx(
        [-2 * half, 2 * half, -half, half], abs=1e-5
    )
    assert weighed(given, form=1.0, later=1.0) == pytest.approx([-half, half, 0.0, 0.0], abs=1e-5), (
        "no task of this step has it"
    )


def test_gdpo_of_parts_that_no_sample_has_ends_the_run() -> None:
    for some in (None, parts(form=[0.0, 1.0, 0.0, 1.0])):
        with refusal(ValueError, place=re.compile(r"gdpo\.weights$"), got="['rigth']"):
            weighed(some, rigth=1.0)


def test_gdpo_is_whitened_and_of_one_part_it_is_grpo() -> None:
    rewards_N, groups_N = torch.tensor([1.0, 0.0, 5.0, 2.0, 0.0], dtype=torch.float64), torch.tensor([1, 1, 2, 2, 2])
    place = (groups_N, torch.full((5,), 9), torch.tensor([9, 1, 3, 3, 3]))
    one_N = Objective(AlgorithmConfig(advantage="gdpo")).advantages(
        torch.zeros(5), *place, parts=parts(only=rewards_N.tolist())
    )
    for some in (None, RewardParts(names=(), values_NK=torch.zeros(5, 0))):
        alone_N = Objective(AlgorithmConfig(advantage="gdpo")).advantages(rewards_N, *place, parts=some)
        torch.testing.assert_close(alone_N, one_N)
    torch.testing.assert_close(one_N, Objective(AlgorithmConfig(whiten=True)).advantages(rewards_N, *place))


def test_opo_weighs_by_trainable_tokens() -> None:
    """Three samples of one turn, and one with 900 tokens of tool output: rewards 1, 0, 0, 0 have the baseline 1/4."""
    rewards_N, groups_N = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    lengths_N, trainable_N = torch.tensor([1000, 100, 100, 100]), torch.full((4,), 100)
    got_N = Objective(AlgorithmConfig(advantage="opo")).advantages(rewards_N, groups_N, lengths_N, trainable_N)
    assert got_N.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def gate(ratio: Tensor, advantage: float) -> Tensor:
    tau = 1.0 if advantage > 0 else 1.05
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage


def squared(delta: Tensor, advantage: float, *, outside: bool) -> Tensor:
    return (torch.zeros_like(delta) if outside else -delta.exp() * advantage) + 1e-3 * delta.square()


def by_definition(preset: str, log_probs_T: Tensor, tokens: Tokens) -> Tensor:
    """Return the loss of a preset as its sources compute it, response by response and token by token.

    sapo: arXiv:2511.20347, equation 5 (verl and TRL alike). dppo_tv, ipo: the losses of prime-rl at their defaults.
    gmpo: arXiv:2507.20673, times the geometric mean of the bounded token weights of a response (verl's geo_mean).
    """
    assert tokens.old_T is not None
    responses, everything = [], []
    for sample in range(N):
        at = [t for t in range(N * EACH) if tokens.sample_T[t] == sample and tokens.mask_T[t]]
        if not at:
            continue
        advantage = float(tokens.advantages_T[at[0]])
        losses = []
        for t in at:
            delta = log_probs_T[t] - tokens.rollout_T[t]
            if preset == "sapo":
                losses.append(gate(delta.exp(), advantage))
                continue
            moved = float(log_probs_T[t].detach().exp() - tokens.rollout_T[t].exp())
            outside = moved > 0.1 or moved < -0.1
            if preset == "dppo_tv":
                outside = (advantage > 0 and moved > 0.2) or (advantage <= 0 and moved < -0.2)
            losses.append(squared(delta, advantage, outside=outside))
        if preset == "gmpo":
            change = torch.stack([log_probs_T[t] - tokens.old_T[t] for t in at])
            held = change.clamp(max=0.4) if advantage > 0 else change.clamp(min=-0.4)
            weights = torch.stack([tokens.old_T[t] - tokens.rollout_T[t] for t in at]).exp().clamp(max=2.0)
            losses = [-held.mean().exp() * advantage * weights.prod() ** (1 / len(at))]
        responses.append(torch.stack(losses).mean())
        everything += losses
    return torch.stack(responses if preset in ("sapo", "gmpo") else everything).mean()


@pytest.mark.parametrize("preset", ["sapo", "dppo_tv", "ipo", "gmpo"])
@pytest.mark.parametrize("seed", range(3))
def test_a_preset_computes_the_loss_of_the_source_that_it_is_named_after(preset: str, seed: int) -> None:
    start_T, tokens = row(seed, spread=0.8)
    objective = Objective(AlgorithmConfig(correction=preset))
    trainable_N = torch.zeros(N, dtype=torch.int64).index_add(0, tokens.sample_T, tokens.mask_T.long())
    denominators = Denominators(
        tokens=int(trainable_N.sum()),
        sequences=int((trainable_N > 0).sum()),
        trainable_N=trainable_N,
        constant=1.0,
        groups_N=torch.zeros(N),
    )
    coupled = objective.coupled([tokens], summed=lambda x: x, gathered=lambda x: x)

    def made(compute: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        log_probs_T = start_T.clone().requires_grad_()
        loss = compute(log_probs_T)
        return loss.detach(), torch.autograd.grad(loss, log_probs_T)[0]

    got = made(
        lambda log_probs_T: objective.total(log_probs_T, torch.zeros(N * EACH), tokens, denominators, coupled)[0]
    )
    torch.testing.assert_close(
        got, made(lambda log_probs_T: by_definition(preset, log_probs_T, tokens)), rtol=1e-12, atol=1e-14
    )


def test_a_masked_weight_takes_its_token_out_of_the_geometric_mean() -> None:
    weights = bounded(torch.tensor([0.25, 1.0, 9.0, 3.0]), torch.ones(4, dtype=torch.bool), high=4.0, action="mask")
    made = geometric_means(weights, torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 0, 1]), 2)
    torch.testing.assert_close(made.weight_T, torch.tensor([0.5, 0.5, 0.0, 3.0]))
