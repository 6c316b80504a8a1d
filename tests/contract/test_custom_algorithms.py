"""The contracts of a loss, an advantage estimator, an importance weight, a rejection and an aggregation, ours and
yours.

pytest tests/contract/test_custom_algorithms.py --loss my_package.losses:mine --advantage my_package.estimators:mine \
    --weight my_package.weights:mine --reject my_package.rules:mine --aggregation my_package.reducers:mine
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithm_settings import algorithm_of
from tests.refusals import refusal
from tidemill.bus.system.functions import Defect, FunctionRefused, find_function
from tidemill.learner.algorithms.aggregation import Denominators, Reducer, coefficients
from tidemill.learner.algorithms.choices import ADVANTAGES, AGGREGATIONS, LOSSES, PRESETS
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.correction import LEVELS, WeightFunction, raw_weights
from tidemill.learner.algorithms.objective import Coupled, Objective
from tidemill.learner.algorithms.policy_losses import PolicyLoss
from tidemill.learner.algorithms.tokens import RewardParts, Tokens

LENGTHS = (5, 1, 7, 3, 4)
"""Tokens of each sample; the last one is padding."""
RULES = ("k1 token 0.5 2", "k2 seq_sum 0.5", "k3 seq_mean 0.05", "k1 seq_max 2")
EXAMPLES = "docs.examples.extending.my_algorithm:"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "objective" in metafunc.fixturenames:
        metafunc.parametrize("objective", [*LOSSES, *metafunc.config.getoption("--loss")], indirect=True)
    if "estimator" in metafunc.fixturenames:
        metafunc.parametrize(
            "estimator",
            [*ADVANTAGES, EXAMPLES + "by_level", EXAMPLES + "over_the_step", *metafunc.config.getoption("--advantage")],
            indirect=True,
        )
    if "level" in metafunc.fixturenames:
        metafunc.parametrize(
            "level", [*LEVELS, EXAMPLES + "squared", *metafunc.config.getoption("--weight")], indirect=True
        )
    if "rule" in metafunc.fixturenames:
        metafunc.parametrize(
            "rule", [*RULES, EXAMPLES + "drifting", *metafunc.config.getoption("--reject")], indirect=True
        )
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize(
            "mode", [*AGGREGATIONS, EXAMPLES + "by_root", *metafunc.config.getoption("--aggregation")], indirect=True
        )


@pytest.fixture
def objective(request: pytest.FixtureRequest) -> Objective:
    """Return an objective with the named loss, anchored at mu where possible."""
    preset = next((name for name, fields in PRESETS.items() if fields["loss"] == request.param), None)
    changes = {"correction": preset or "decoupled"} | (
        {} if preset else {"loss": request.param, "weight": {"level": "none"}, "anchor": "rollout"}
    )
    return Objective(algorithm_of(**changes))


@pytest.fixture
def estimator(request: pytest.FixtureRequest) -> Objective:
    return Objective(AlgorithmConfig(advantage=request.param, whiten=False))


@pytest.fixture
def level(request: pytest.FixtureRequest) -> str | WeightFunction:
    return find_function(request.param, "weight") if ":" in request.param else request.param


@pytest.fixture
def rule(request: pytest.FixtureRequest) -> Objective:
    return Objective(algorithm_of(correction="bypass", reject={"rules": (request.param,)}))


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> str | Reducer:
    return find_function(request.param, "aggregation") if ":" in request.param else request.param


def row(seed: int = 0, spread: float = 0.3) -> tuple[Tensor, Tokens]:
    """Return log-probs (a leaf, float64) and the other tensors of their row."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(LENGTHS)
    rollout_T = -0.2 - 2 * torch.rand(size, generator=generator, dtype=torch.float64)
    sample_T = torch.repeat_interleave(torch.tensor([*range(len(LENGTHS) - 1), -1]), torch.tensor(LENGTHS))
    advantages_N = torch.tensor([1.0, -0.5, -1.5, 0.7], dtype=torch.float64)
    log_probs_T = (rollout_T + spread * torch.randn(size, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    tokens = Tokens(
        mask_T=(torch.rand(size, generator=generator) < 0.8) & (sample_T >= 0),
        sample_T=sample_T,
        num_samples=len(LENGTHS) - 1,
        rollout_T=rollout_T,
        lag_T=torch.randint(0, 3, (size,), generator=generator),
        advantages_T=torch.where(sample_T >= 0, advantages_N[sample_T.clamp(min=0)], 0.0),
        old_T=(rollout_T + 0.1 * torch.randn(size, generator=generator, dtype=torch.float64)).clamp(max=-1e-3),
    )
    return log_probs_T.requires_grad_(), tokens


def made(objective: Objective, log_probs_T: Tensor, tokens: Tokens) -> PolicyLoss:
    """Compute the loss by itself, without weights."""
    anchor_T = tokens.old_T if objective.config.anchor == "proximal" else tokens.rollout_T
    assert anchor_T is not None
    return objective.loss(log_probs_T, anchor_T, tokens, objective.config)


def gradient(objective: Objective, log_probs_T: Tensor, tokens: Tokens) -> Tensor:
    return torch.autograd.grad(made(objective, log_probs_T, tokens).loss_T.sum(), log_probs_T)[0]


def test_a_loss_returns_one_number_and_one_clipped_flag_per_token(objective: Objective) -> None:
    log_probs_T, tokens = row()
    loss = made(objective, log_probs_T, tokens)
    assert isinstance(loss, PolicyLoss)
    assert (loss.loss_T.shape, loss.loss_T.dtype) == (log_probs_T.shape, torch.float64)
    assert (loss.clipped_T.shape, loss.clipped_T.dtype, loss.clipped_T.requires_grad) == (
        log_probs_T.shape,
        torch.bool,
        False,
    )
    assert gradient(objective, log_probs_T, tokens)[tokens.mask_T].abs().sum() > 0, "it teaches nothing"


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_masked_tokens_affect_neither_value_nor_gradient(objective: Objective, rubbish: float) -> None:
    log_probs_T, tokens = row()
    wanted, wanted_gradient = made(objective, log_probs_T, tokens), gradient(objective, log_probs_T, tokens)
    spoilt: dict[str, Any] = {
        name: torch.where(tokens.mask_T, getattr(tokens, name), rubbish)
        for name in ("rollout_T", "advantages_T", "old_T")
    }
    dirty_T = torch.where(tokens.mask_T, log_probs_T.detach(), rubbish).requires_grad_()
    dirty = Tokens(**{name: spoilt.get(name, getattr(tokens, name)) for name in Tokens.__slots__})
    torch.testing.assert_close(made(objective, dirty_T, dirty).loss_T, wanted.loss_T, atol=0, rtol=0)
    torch.testing.assert_close(gradient(objective, dirty_T, dirty), wanted_gradient, atol=0, rtol=0)
    assert not wanted.loss_T[~tokens.mask_T].any()
    assert not wanted_gradient[~tokens.mask_T].any()
    assert not wanted.clipped_T[~tokens.mask_T].any()


def test_extreme_ratios_stay_finite(objective: Objective) -> None:
    log_probs_T, tokens = row()
    far_T = torch.where(torch.arange(len(log_probs_T)) % 2 == 0, -1e-6, -200.0).double().requires_grad_()
    assert torch.isfinite(made(objective, far_T, tokens).loss_T).all()
    assert torch.isfinite(gradient(objective, far_T, tokens)).all()


def test_the_loss_of_a_sample_does_not_depend_on_other_samples(objective: Objective) -> None:
    """Alone in a row each sample has the loss that it has among others: packing changes nothing."""
    log_probs_T, tokens = row()
    whole = made(objective, log_probs_T, tokens).loss_T
    for sample in range(tokens.num_samples):
        at = (tokens.sample_T == sample).nonzero()[:, 0]
        alone = Tokens(
            **{
                name: value[at] if torch.is_tensor(value := getattr(tokens, name)) else value
                for name in Tokens.__slots__
            }
        )
        torch.testing.assert_close(made(objective, log_probs_T[at], alone).loss_T, whole[at], atol=1e-12, rtol=0)


def test_tokens_marked_as_clipped_have_no_gradient(objective: Objective) -> None:
    """None by their advantage: that of a penalty stays."""
    log_probs_T, tokens = row(spread=1.5)
    clipped_T = made(objective, log_probs_T, tokens).clipped_T
    without = gradient(objective, log_probs_T, replace(tokens, advantages_T=torch.zeros_like(tokens.advantages_T)))
    assert torch.equal(gradient(objective, log_probs_T, tokens)[clipped_T], without[clipped_T])


def test_arguments_are_not_modified(objective: Objective) -> None:
    log_probs_T, tokens = row()
    before = {name: value.clone() for name in Tokens.__slots__ if torch.is_tensor(value := getattr(tokens, name))}
    made(objective, log_probs_T, tokens)
    for name, value in before.items():
        assert torch.equal(getattr(tokens, name), value), name


GROUPS = torch.tensor([7, 3, 7, 9, 3, 7, 3, 5, 5, 3])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.0, 1.0, 0.25, 0.25, 0.0], dtype=torch.float64)
RESPONSES = torch.tensor([3, 5, 2, 8, 1, 9, 4, 6, 2, 7])
TRAINABLE = torch.tensor([3, 5, 0, 8, 1, 9, 4, 6, 2, 7])


TRUNCATED = torch.tensor([False, False, True, False, True, False, False, True, True, False])


def advantages(
    estimator: Objective,
    rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    trainable: Tensor = TRAINABLE,
    *,
    truncated: Tensor = TRUNCATED,
    order: Sequence[int] = range(len(GROUPS)),
) -> Tensor:
    """Call the estimator with all that one may ask for. ``order``: of the samples, whose metadata is that of their
    groups.
    """
    parts = RewardParts(names=("right",), values_NK=rewards[:, None])
    metadata = [{"level": "hard" if int(GROUPS[at]) == 3 else "easy"} for at in order]
    return estimator.advantages(
        rewards, groups, lengths, trainable, parts=parts, truncated_N=truncated, metadata=metadata
    )


def test_an_estimator_gives_every_sample_a_finite_number(estimator: Objective) -> None:
    """A group of one and a group of equal rewards are among them."""
    found = advantages(estimator, REWARDS, GROUPS, RESPONSES)
    assert (found.shape, found.dtype) == (REWARDS.shape, torch.float64)
    assert torch.isfinite(found).all()
    assert bool(found.abs().sum() > 0) == (estimator.config.advantage != "none"), "only `none` credits nothing"


def test_order_and_names_of_groups_do_not_matter(estimator: Objective) -> None:
    found = advantages(estimator, REWARDS, GROUPS, RESPONSES)
    order = torch.randperm(len(GROUPS), generator=torch.Generator().manual_seed(1))
    columns = (REWARDS[order], 100 - GROUPS[order], RESPONSES[order], TRAINABLE[order])
    again = advantages(estimator, *columns, truncated=TRUNCATED[order], order=order.tolist())
    torch.testing.assert_close(again, found[order], atol=1e-12, rtol=0)


def test_a_better_sample_of_a_group_has_no_smaller_advantage(estimator: Objective) -> None:
    found = advantages(estimator, REWARDS, GROUPS, RESPONSES)
    for group in GROUPS.unique():
        at = (group == GROUPS).nonzero()[:, 0]
        order = REWARDS[at].argsort(stable=True)
        assert (found[at][order].diff() >= -1e-12).all()


@pytest.mark.parametrize(
    ("path", "defect"),
    [("no_such_module:f", Defect.MODULE), ("math:no_such_function", Defect.NAME), ("math:pi", Defect.KIND)],
)
def test_an_import_path_that_does_not_exist_is_refused(path: str, defect: Defect) -> None:
    with refusal(FunctionRefused, setting="loss", path=path, defect=defect):
        Objective(AlgorithmConfig(loss=path))
    with refusal(FunctionRefused, setting="advantage", path=path, defect=defect):
        Objective(AlgorithmConfig(advantage=path))


def asks_for_all(
    rewards_N: Tensor,
    groups_N: Tensor,
    lengths_N: Tensor,
    *,
    truncated_N: Tensor,
    parts: Mapping[str, Tensor],
    metadata: Sequence[Mapping[str, object]],
    own: float = 1.0,
) -> Tensor:
    levels_N = torch.tensor([len(str(one["level"])) for one in metadata])
    return own * parts["right"] + 10 * truncated_N + 100 * lengths_N + 1000 * levels_N


def older(rewards_N: Tensor, groups_N: Tensor, lengths_N: Tensor) -> Tensor:
    return rewards_N + lengths_N


def any_names(rewards_N: Tensor, groups_N: Tensor, **more: object) -> Tensor:
    assert not more
    return rewards_N


def of_one(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    return rewards_N.mean()


def misspelt(rewards_N: Tensor, groups_N: Tensor, *, metdata: object) -> Tensor:
    raise AssertionError("never called")


def of_rewards_alone(rewards_N: Tensor) -> Tensor:
    raise AssertionError("never called")


def by_path(function: Callable[..., Tensor]) -> Objective:
    return Objective(AlgorithmConfig(advantage=f"{__name__}:{function.__name__}"))


def test_an_estimator_gets_what_its_parameters_name() -> None:
    estimator = by_path(asks_for_all)
    assert estimator.asks == {"lengths_N", "truncated_N", "parts", "metadata"}
    levels_N = torch.full_like(REWARDS, 4)  # of "easy" as of "hard"
    wanted = REWARDS + 10 * TRUNCATED + 100 * RESPONSES + 1000 * levels_N
    torch.testing.assert_close(advantages(estimator, REWARDS, GROUPS, RESPONSES), wanted, atol=0, rtol=0)
    assert by_path(older).asks == {"lengths_N"}
    torch.testing.assert_close(
        advantages(by_path(older), REWARDS, GROUPS, RESPONSES), REWARDS + RESPONSES, atol=0, rtol=0
    )
    torch.testing.assert_close(advantages(by_path(any_names), REWARDS, GROUPS, RESPONSES), REWARDS, atol=0, rtol=0)
    assert Objective(AlgorithmConfig()).asks == frozenset()


@pytest.mark.parametrize("setting", ["loss", "weight.level", "aggregation", "reject.rules"])
def test_a_function_with_other_parameters_is_refused(setting: str) -> None:
    path = f"{__name__}:of_rewards_alone"
    name, _, key = setting.partition(".")
    value = {key: (path,) if key == "rules" else path} if key else path
    with refusal(ValueError, path=path, setting=setting):
        Objective(algorithm_of(**{name: value}))


def test_an_estimator_that_cannot_be_called_is_refused_with_what_it_may_ask_for() -> None:
    offered = re.compile(r"\(rewards_N, groups_N, \*, lengths_N, truncated_N, parts, metadata\)")
    with refusal(
        FunctionRefused, setting="advantage", defect=Defect.SIGNATURE, want=offered, reason=re.compile("'metdata'")
    ):
        by_path(misspelt)
    with refusal(
        FunctionRefused, setting="advantage", defect=Defect.SIGNATURE, want=offered, path=f"{__name__}:of_rewards_alone"
    ):
        by_path(of_rewards_alone)
    with refusal(ValueError, place=re.compile(r"of_one$"), got="[]"):
        advantages(by_path(of_one), REWARDS, GROUPS, RESPONSES)


def deltas(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-ratios, mask and sequence of each token; NaN where masked."""
    _, tokens = row(seed)
    delta_T = 0.3 * torch.randn(len(tokens.mask_T), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(tokens.mask_T, delta_T, 0.0), tokens.mask_T, tokens.sample_T


def test_a_weight_is_1_on_fresh_data_and_where_masked(level: str | WeightFunction) -> None:
    delta_T, mask_T, sequence_T = deltas()
    fresh_T = raw_weights(torch.zeros_like(delta_T), mask_T, sequence_T, 4, level=level)
    torch.testing.assert_close(fresh_T, torch.ones_like(delta_T), atol=1e-12, rtol=0)
    old_T = raw_weights(delta_T, mask_T, sequence_T, 4, level=level)
    assert (old_T[~mask_T] == 1).all()
    assert (old_T[mask_T] != 1).any(), "it corrects nothing"


def test_a_weight_is_positive_finite_and_detached(level: str | WeightFunction) -> None:
    delta_T, mask_T, sequence_T = deltas()
    far_T = (delta_T * 60).requires_grad_()
    weight_T = raw_weights(far_T, mask_T, sequence_T, 4, level=level)
    assert torch.isfinite(weight_T).all()
    assert (weight_T >= 0).all()
    assert level in LEVELS or not weight_T.requires_grad


def test_a_weight_does_not_depend_on_other_sequences(level: str | WeightFunction) -> None:
    delta_T, mask_T, sequence_T = deltas()
    whole_T = raw_weights(delta_T, mask_T, sequence_T, 4, level=level)
    for sequence in range(4):
        at = (sequence_T == sequence).nonzero()[:, 0]
        torch.testing.assert_close(
            raw_weights(delta_T[at], mask_T[at], sequence_T[at], 4, level=level), whole_T[at], atol=1e-12, rtol=0
        )


def rejected(rule: Objective, delta_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return the tokens that the only rule rejects, for a policy with these log-ratios; rubbish where masked."""
    zeros_T = torch.zeros_like(delta_T)
    tokens = Tokens(
        mask_T=mask_T,
        sample_T=sequence_T,
        num_samples=4,
        rollout_T=torch.where(mask_T, zeros_T, math.nan),
        lag_T=zeros_T.long(),
        advantages_T=zeros_T,
    )
    [found_T] = rule.rejected(tokens, delta_T, delta_T, Coupled()).values()
    return found_T


def test_a_rule_rejects_nothing_on_fresh_data_and_where_masked(rule: Objective) -> None:
    delta_T, mask_T, sequence_T = deltas()
    assert not rejected(rule, torch.zeros_like(delta_T), mask_T, sequence_T).any()
    far_T = rejected(rule, 60 * delta_T, mask_T, sequence_T)
    assert (far_T.shape, far_T.dtype) == (mask_T.shape, torch.bool)
    assert far_T[mask_T].any(), "it rejects nothing"
    assert not far_T[~mask_T].any()


def test_a_rule_does_not_depend_on_other_sequences(rule: Objective) -> None:
    delta_T, mask_T, sequence_T = deltas()
    whole_T = rejected(rule, 2 * delta_T, mask_T, sequence_T)
    for sequence in range(4):
        at = (sequence_T == sequence).nonzero()[:, 0]
        assert torch.equal(rejected(rule, 2 * delta_T[at], mask_T[at], sequence_T[at]), whole_T[at])


def no_mask(delta_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    return delta_T


def test_a_rule_of_ones_own_joins_the_others_and_returns_a_mask() -> None:
    delta_T, mask_T, sequence_T = deltas()
    with refusal(ValueError, place=re.compile(r"no_mask$"), got="torch.float64 of [20]"):
        rejected(
            Objective(algorithm_of(correction="bypass", reject={"rules": (f"{__name__}:no_mask",)})),
            delta_T,
            mask_T,
            sequence_T,
        )
    both = Objective(
        algorithm_of(correction="bypass", reject={"rules": ("k1 token 0.5 2", EXAMPLES + "drifting"), "veto": 1e-4})
    )
    place = {"mask_T": mask_T, "sample_T": sequence_T, "num_samples": 4, "rollout_T": torch.zeros_like(delta_T)}
    tokens = Tokens(**place, lag_T=sequence_T, advantages_T=delta_T)
    assert set(both.rejected(tokens, delta_T, delta_T, Coupled())) == {"k1_token", "drifting", "veto"}


def denominators(mask_T: Tensor, sample_T: Tensor) -> Denominators:
    trainable_N = torch.zeros(4, dtype=torch.int64).index_add(
        0, sample_T[mask_T], torch.ones(int(mask_T.sum()), dtype=torch.int64)
    )
    groups_N = torch.tensor([5, 5, 2, 2])
    return Denominators(tokens=int(mask_T.sum()), sequences=4, trainable_N=trainable_N, constant=9.0, groups_N=groups_N)


def test_a_factor_is_0_where_masked_and_positive_elsewhere(mode: str | Reducer) -> None:
    _, mask_T, sample_T = deltas()
    factor_T = coefficients(mode, mask_T, sample_T, denominators(mask_T, sample_T))
    assert (factor_T.shape, factor_T.dtype) == (mask_T.shape, torch.float64)
    assert not factor_T[~mask_T].any()
    assert torch.isfinite(factor_T).all()
    assert (factor_T[mask_T] > 0).all()


def test_a_factor_does_not_depend_on_the_split_into_rows(mode: str | Reducer) -> None:
    """Denominators are of the whole step, so a row with half of the tokens gives them the same factors."""
    _, mask_T, sample_T = deltas()
    step = denominators(mask_T, sample_T)
    whole_T = coefficients(mode, mask_T, sample_T, step)
    for at in (
        torch.arange(0, 9),
        torch.arange(9, len(mask_T)),
        torch.randperm(len(mask_T), generator=torch.Generator().manual_seed(2)),
    ):
        torch.testing.assert_close(coefficients(mode, mask_T[at], sample_T[at], step), whole_T[at], atol=0, rtol=0)


def test_a_metric_of_another_shape_is_refused() -> None:
    objective = Objective(AlgorithmConfig(loss=EXAMPLES + "one_sided"))
    log_probs_T, tokens = row()
    step = denominators(tokens.mask_T, tokens.sample_T)
    assert (
        objective.total(log_probs_T, log_probs_T, tokens, step, Coupled())[1].metrics["moved"].shape
        == log_probs_T.shape
    )
    made = objective.loss(log_probs_T, tokens.rollout_T, tokens, objective.config)
    objective.loss = lambda *_: replace(made, metrics={"moved": torch.zeros(())})
    with refusal(ValueError, place=re.compile(r"one_sided: metrics\.moved$"), got="[]"):
        objective.total(log_probs_T, log_probs_T, tokens, step, Coupled())


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with refusal(ValueError, path="no_such_module:f", defect="module", setting="reject.rules"):
        Objective(algorithm_of(reject={"rules": ("no_such_module:f",)}))
    with refusal(ValueError, place="reject.rules", got="'mine'"):
        algorithm_of(reject={"rules": ("mine",)})


@pytest.mark.parametrize("setting", ["weight.level", "aggregation"])
def test_other_functions_that_do_not_exist_are_refused(setting: str) -> None:
    name, _, key = setting.partition(".")
    with refusal(ValueError, defect="module", setting=setting):
        Objective(algorithm_of(**{name: {key: "no_such_module:f"} if key else "no_such_module:f"}))
    with refusal(ValueError, place=setting, got="'tokens'"):
        algorithm_of(**{name: {key: "tokens"} if key else "tokens"})
