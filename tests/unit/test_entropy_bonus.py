"""The adaptive coefficient of the entropy bonus: its bounds, its direction, and that it holds the entropy of a policy
that learns.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import rarely
from tidemill.learner.algorithms.kl import EntropyBonus

ENTROPIES = st.lists(st.one_of(st.floats(0, 3), st.just(math.nan), st.just(math.inf)), max_size=60)


@given(coef=st.floats(0, 0.5), entropies=ENTROPIES, target=st.floats(0.01, 2), delta=st.floats(1e-4, 0.5))
def test_it_stays_within_its_bounds_and_moves_by_delta_towards_the_target(
    coef: float, entropies: list[float], target: float, delta: float
) -> None:
    bonus = EntropyBonus(coef=coef)
    assert bonus.applied == coef, "the first step has the coefficient of the settings"
    for entropy in entropies:
        after = bonus.after(entropy, target=target, delta=delta, most=0.5)
        assert 0 <= after.coef <= 0.5 and abs(after.coef - bonus.coef) <= delta * (1 + 1e-9) + 1e-12
        if not math.isfinite(entropy):
            assert after == bonus
        elif entropy <= target:
            assert after.coef >= bonus.coef and after.applied == after.coef
        else:
            assert after.coef <= bonus.coef and after.applied == 0
        bonus = after


def last_entropies(*, target: float) -> list[float]:
    """Return the entropies of the last 500 of 3,000 steps of a policy of four actions, of which one alone is rewarded;
    0 = no target.
    """
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0, 0, 0]).double()
    bonus, entropies = EntropyBonus(coef=0.0), []
    for _ in range(3000):
        log_probs = logits.log_softmax(0)
        entropy = -(log_probs.exp() * log_probs).sum()
        (gradient,) = torch.autograd.grad((log_probs.exp() * rewards).sum() + bonus.applied * entropy, logits)
        with torch.no_grad():
            logits += 0.5 * gradient
        entropies.append(entropy.item())
        if target:
            bonus = bonus.after(entropies[-1], target=target, delta=0.005, most=1.0)
    return entropies[-500:]


def test_it_holds_the_entropy_of_a_policy_that_would_lose_it() -> None:
    """Exact gradients of the expected reward: the entropy falls below 0.02 nats without, and stays about its target
    with the bonus.
    """
    assert max(last_entropies(target=0.0)) < 0.02
    for target in (0.2, *rarely([0.5])):
        held = last_entropies(target=target)
        assert abs(sum(held) / len(held) - target) < 0.1 * target
        assert min(held) > 0.5 * target
