"""RAE: the published moving average reward by reward, and a state that order, other roles and restarts leave to the bit
as it is.
"""

import json
import math
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithm_settings import algorithm_of, loss_by
from tests.enumerated import MASK_T, RESPONSES, Policy, expected, gradient, per_token
from tests.refusals import refusal
from tidemill.learner.algorithms.advantages import MOST_ROLES, over_baselines, roles_of
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.settings.config import LearnerConfig

Sample = tuple[str, float]
"""(role, reward)."""

REWARDS = st.floats(-5, 5)
SAMPLES = st.tuples(st.sampled_from(["first", "second", ""]), REWARDS)
STEPS = st.lists(st.lists(SAMPLES, max_size=8), max_size=6)
DECAYS = st.sampled_from([0.0, 0.5, 0.95, 0.999])


def step(samples: Sequence[Sample], baselines: dict[str, float], decay: float) -> tuple[list[float], dict[str, float]]:
    rewards_N = torch.tensor([reward for _, reward in samples], dtype=torch.float64)
    advantages_N, after = over_baselines(rewards_N, [role for role, _ in samples], baselines, decay=decay)
    return advantages_N.tolist(), after


def run(
    steps: Sequence[Sequence[Sample]], decay: float, baselines: dict[str, float] | None = None
) -> tuple[list[list[float]], dict[str, float]]:
    found, baselines = [], dict(baselines or {})
    for samples in steps:
        advantages, baselines = step(samples, baselines, decay)
        found.append(advantages)
    return found, baselines


def by_loop(samples: Sequence[Sample], decay: float) -> tuple[list[float], dict[str, float]]:
    """The source: each reward is compared with its role's average, which it moves then."""
    average: dict[str, float] = {}
    found = []
    for role, reward in samples:
        found.append(reward - average.get(role, 0.0))
        average[role] = decay * average.get(role, 0.0) + (1 - decay) * reward
    return found, average


@settings(deadline=None)
@given(samples=st.lists(SAMPLES, max_size=20), decay=DECAYS)
def test_steps_of_one_sample_are_the_published_average(samples: list[Sample], decay: float) -> None:
    found, baselines = run([[sample] for sample in samples], decay)
    wanted, average = by_loop(samples, decay)
    assert [advantage for (advantage,) in found] == pytest.approx(wanted, abs=1e-12)
    assert baselines == pytest.approx(average, abs=1e-12)


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=6), reward=REWARDS, decay=DECAYS)
def test_equal_rewards_of_a_step_move_it_as_one_after_another(counts: list[int], reward: float, decay: float) -> None:
    """Closed form: n equal rewards c leave a baseline of c (1 - decay^n), whatever steps they come in, and an advantage
    of c decay^n.
    """
    found, baselines = run([[("", reward)] * count for count in counts], decay)
    assert baselines[""] == pytest.approx(reward * (1 - decay ** sum(counts)), abs=1e-12)
    seen = [sum(counts[:number]) for number in range(len(counts))]
    wanted = [[reward * decay**before] * count for before, count in zip(seen, counts, strict=True)]
    assert [pytest.approx(each, abs=1e-12) for each in wanted] == found


@settings(deadline=None)
@given(samples=st.lists(SAMPLES, max_size=12), decay=DECAYS, data=st.data())
def test_the_order_of_a_step_has_no_influence_to_the_bit(
    samples: list[Sample], decay: float, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(samples))))
    before = {"first": 0.3, "second": -1.7}
    advantages, after = step(samples, before, decay)
    shuffled, after_shuffled = step([samples[at] for at in order], before, decay)
    assert shuffled == [advantages[at] for at in order]
    assert after_shuffled == after


@settings(deadline=None)
@given(steps=STEPS, decay=DECAYS)
def test_a_role_knows_nothing_of_the_others(steps: list[list[Sample]], decay: float) -> None:
    found, baselines = run(steps, decay)
    for role in ("first", "second", ""):
        alone, after = run([[sample for sample in samples if sample[0] == role] for samples in steps], decay)
        here = [
            [one for one, sample in zip(each, samples, strict=True) if sample[0] == role]
            for each, samples in zip(found, steps, strict=True)
        ]
        assert (here, baselines.get(role)) == (alone, after.get(role))


@settings(deadline=None)
@given(steps=STEPS, decay=DECAYS, data=st.data())
def test_a_restart_repeats_the_steps_behind_its_checkpoint_to_the_bit(
    steps: list[list[Sample]], decay: float, data: st.DataObject
) -> None:
    """Those that were taken before the restart do not count twice: the baselines are those of the checkpoint."""
    cut = data.draw(st.integers(0, len(steps)))
    found, baselines = run(steps, decay)
    _, saved = run(steps[:cut], decay)
    repeated, again = run(steps[cut:], decay, json.loads(json.dumps(saved)))
    assert (repeated, again) == (found[cut:], baselines)


def test_the_mean_gradient_is_the_true_one() -> None:
    """The baseline of a step does not depend on its responses, so it leaves the mean gradient as it is."""
    policy = Policy(Policy.random(3).logits_PV.requires_grad_())
    rewards_N = torch.rand(len(RESPONSES), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    advantages_N, _ = over_baselines(rewards_N, [""] * len(rewards_N), {"": 0.4}, decay=0.95)
    assert torch.equal(advantages_N, rewards_N - 0.4)
    got, wanted = (
        gradient(
            expected(
                loss_by("reinforce", policy.log_probs_T, policy.log_probs_T, per_token(each_N), MASK_T).loss_T, policy
            ),
            policy,
        )
        for each_N in (advantages_N, rewards_N)
    )
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_a_reward_that_is_not_finite_moves_no_baseline() -> None:
    for reward in (math.nan, math.inf):
        assert step([("", reward), ("", 1.0), ("other", reward)], {}, 0.5)[1] == {"": 0.5}


def test_the_role_is_a_key_of_the_metadata() -> None:
    metadata = [{"player": 0}, {"player": 1}, {"topic": "poker"}]
    assert roles_of(metadata, "player", num_samples=3) == ["0", "1", ""]
    assert roles_of((), "", num_samples=2) == ["", ""]
    with refusal(ValueError, place=re.compile(r"rae\.role$"), got="'palyer'"):
        roles_of(metadata, "palyer", num_samples=3)
    with refusal(ValueError, place=re.compile(r"rae\.role$"), got=re.compile(rf"^{MOST_ROLES + 1}\b")):
        step([(str(number), 0.0) for number in range(MOST_ROLES + 1)], {}, 0.5)


def test_the_objective_asks_for_metadata_only_with_roles_and_whitens_if_told() -> None:
    plain, by_role = (
        AlgorithmConfig(advantage="rae"),
        algorithm_of(advantage="rae", rae={"role": "player", "decay": 0.5}, whiten=True),
    )
    assert not Objective(plain).asks and not plain.may_need_metadata
    assert Objective(by_role).asks == {"metadata"} and by_role.may_need_metadata
    rewards_N, trainable_N = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64), torch.tensor([5, 1, 2])
    advantages_N, after = Objective(by_role).over_running_baselines(
        rewards_N, trainable_N, [{"player": 0}, {"player": 1}, {"player": 0}], {"1": 2.0}
    )
    assert after == {"0": 1.5, "1": 1.0}
    raw_N = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    spread_N = raw_N - (trainable_N * raw_N).sum() / 8
    torch.testing.assert_close(advantages_N, spread_N / ((trainable_N * spread_N.square()).sum() / 8 + 1e-8).sqrt())


def test_what_goes_with_it_and_what_does_not() -> None:
    assert LearnerConfig(group_size=1, algorithm=algorithm_of(advantage="rae", rae={"role": "player"}))
    assert AlgorithmConfig(advantage="rae", kl=KLConfig(reward_coef=0.1, reward_by="token"))
    for changes, message in (
        ({"rae": {"decay": 1.0}}, "rae.decay: want < 1, got 1.0"),
        ({"rae": {"decay": -0.1}}, "rae.decay: want >= 0"),
        ({"gamma": 0.9}, "gamma: not used by advantage rae"),
    ):
        with pytest.raises(ValueError, match=message):
            algorithm_of(advantage="rae", **changes)
    for changes in ({"rae": {"decay": 0.9}}, {"rae": {"role": "player"}}):
        with refusal(ValueError, place=re.compile(r"^rae\.")):
            algorithm_of(**changes)
    with refusal(ValueError, place="credit"):
        LearnerConfig(credit="turn", algorithm=AlgorithmConfig(advantage="rae"))
