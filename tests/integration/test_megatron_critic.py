"""A critic beside the policy on the real Megatron: against plain torch, for every split and layout, skipped, resumed;
moving references.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.algorithm_settings import algorithm_of
from tests.integration import critic_ranks
from tests.integration.critic_ranks import (
    CRITIC,
    DEEP,
    GAE,
    MOVING,
    OF_RANKS,
    OPTIMIZER,
    STEPS,
    VOCAB,
    VTRACE,
    Built,
    build,
)
from tests.learner_steps import make_batches, make_samples, run_ranks
from tests.metric_names import missing, undocumented
from tests.rank_sizes import rank_parameters
from tests.refusals import refusal
from tests.same_metrics import TIMES
from tests.tiny_models import write_tiny_model
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.launch.devices.memory_table import valued
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.debug.comparison import compare_train
from tidemill.learner.debug.train_file import critic_path, read_train, record_path
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout import parallel
from tidemill.learner.settings.config import CriticConfig, LearnerConfig, OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels, OtherWeights
from tidemill.learner.trainer.trainer import Trainer


def same(ours: dict[str, float], wanted: dict[str, float], *, tolerance: float = 1e-5) -> None:
    assert ours.keys() == wanted.keys()
    for name in ours.keys() - TIMES:
        assert ours[name] == pytest.approx(wanted[name], rel=tolerance, abs=tolerance), name


def with_random_head(built: Built) -> torch.Tensor:
    """Return the value head, made random: one of zeros hides the values that it is multiplied with."""
    weight = built.critic.model.module.output_layer.weight
    with torch.no_grad():
        weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    built.critic.optimizer.inner.reload_model_params()
    return weight.detach().clone()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_step_is_that_of_plain_torch(here: parallel.Parallel, tmp_path: Path, tied: bool) -> None:
    """Values, advantages, both losses and both gradient norms agree with loops over transformers, sequence by
    sequence.
    """
    directory = write_tiny_model(tmp_path, vocab_size=VOCAB, tied=tied)
    built = build(directory, here)
    head = with_random_head(built).requires_grad_()
    samples = make_samples(vocab=VOCAB)
    metrics = built.trainer.train(make_batches(samples, max_tokens=60)[0])
    model, valued = (AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32) for _ in range(2))
    values, advantages = [], []
    for sample in samples:
        hidden = valued.model(torch.from_numpy(sample.tokens).long()[None]).last_hidden_state[0]
        values.append((hidden[:-1] @ head[0])[-sample.response_length :])
        backwards, advantage, ahead = [], 0.0, 0.0
        for at in reversed(range(sample.response_length)):
            reward, value = (sample.score if at == sample.response_length - 1 else 0.0), float(values[-1][at].detach())
            advantage = reward + 0.99 * ahead - value + 0.99 * 0.9 * advantage
            backwards, ahead = [*backwards, advantage], value
        advantages.append(torch.tensor(backwards[::-1]))
    flat = torch.cat(advantages)
    targets = flat + torch.cat(values).detach()
    loss = 0.5 * (torch.cat(values) - targets).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([*valued.model.parameters(), head], 1.0)
    assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/value_mean"] == pytest.approx(torch.cat(values).mean().item(), abs=1e-5)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - (flat.var() / targets.var()).item(), abs=1e-5)
    whitened = (flat - flat.mean()) / (flat.var(correction=0) + 1e-8).sqrt()
    total, at = torch.zeros(()), 0
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()
        log_probs = (
            model(tokens[None])
            .logits[0]
            .log_softmax(-1)[:-1]
            .gather(-1, tokens[1:, None])[-sample.response_length :, 0]
        )
        weights = (log_probs.detach() - torch.from_numpy(sample.rollout_log_probs)).exp().clamp(0, 2)
        total = total - (weights * (log_probs - log_probs.detach()).exp() * whitened[at : at + len(weights)]).sum()
        at += len(weights)
    (total / len(flat)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert metrics["train/loss"] == pytest.approx(total.item() / len(flat), abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_numbers_do_not_depend_on_how_a_step_is_split(here: parallel.Parallel, model_dir: Path) -> None:
    def run(max_tokens: int) -> list[dict[str, float]]:
        built = build(model_dir, here, kl=KLConfig(reward_coef=0.1, reward_by="token"))
        with_random_head(built)
        return [built.train(step, here, max_tokens=max_tokens, minibatches=2) for step in STEPS[:2]]

    whole = run(1 << 20)
    assert whole[1]["critic/grad_norm"] > 0 and not undocumented(whole[0])
    for split in (60, 1):
        for ours, wanted in zip(run(split), whole, strict=True):
            same(ours, wanted)


def test_policy_and_critic_have_the_numbers_of_each_alone(here: parallel.Parallel, model_dir: Path) -> None:
    """A critic that cannot move has values of 0: then GAE is REINFORCE++. And a policy that is not trained changes no
    bit of the critic.
    """
    fixed = replace(CRITIC, optimizer=replace(CRITIC.optimizer, lr=1e-30))
    learner = LearnerConfig(steps=10, optimizer=OPTIMIZER, critic=fixed, algorithm=AlgorithmConfig(advantage="gae"))
    both = build(model_dir, here, learner=learner)
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    alone = Trainer(
        policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), AlgorithmConfig(advantage="reinforce_pp"), max_lag=2
    )
    for step in STEPS:
        batch = make_batches(make_samples(vocab=VOCAB, step=step), step=step, max_tokens=60)[0]
        metrics = both.trainer.train(batch)
        same(
            {name: value for name, value in metrics.items() if not name.startswith("critic/")},
            alone.train(batch),
            tolerance=2e-6,
        )

    taught = build(model_dir, here)
    waiting = build(
        model_dir,
        here,
        learner=LearnerConfig(steps=10, critic=replace(CRITIC, warmup_steps=9), algorithm=algorithm_of(**GAE)),
    )
    before = waiting.policy.digest()
    for step in STEPS:
        ours, wanted = waiting.train(step, here), taught.train(step, here)
        same(
            *({name: value for name, value in each.items() if name.startswith("critic/")} for each in (ours, wanted)),
            tolerance=0,
        )
        assert ours["train/lr"] == ours["train/grad_norm"] == 0 < ours["train/tokens"]
    assert waiting.policy.digest() == before != taught.policy.digest()
    assert all(torch.equal(tensor, waiting.weights()[name]) for name, tensor in taught.weights().items())


def test_the_policy_waits_for_the_last_step_of_the_warm_up(here: parallel.Parallel, model_dir: Path) -> None:
    learner = LearnerConfig(
        steps=10, optimizer=OPTIMIZER, critic=replace(CRITIC, warmup_steps=4), algorithm=algorithm_of(**GAE)
    )
    built = build(model_dir, here, learner=learner)
    assert [built.train(step, here)["train/lr"] > 0 for step in STEPS] == [False, False, True]


ADAPTIVE = KLConfig(reward_coef=0.1, target=0.01, horizon=2.0)


def first(number: int) -> np.ndarray[Any, Any]:
    """Return the first samples of a step as demonstrations."""
    return np.arange(16) < number


def test_the_coefficient_of_the_divergence_counts_samples_of_the_policy(
    here: parallel.Parallel, model_dir: Path
) -> None:
    """In the first steps the divergence is below its target: one sample takes a tenth, demonstrations nothing; many
    never turn the sign.
    """
    built = build(model_dir, here, sft_coef=0.5, kl=ADAPTIVE)
    assert built.train(1, here, demonstration_N=first(15))["train/kl_scale"] == pytest.approx(0.9)
    assert built.train(2, here, demonstration_N=first(16))["train/kl_scale"] == pytest.approx(0.9)
    built = build(model_dir, here, sft_coef=0.5, kl=ADAPTIVE)
    assert 0 < built.train(1, here)["train/kl_scale"] < 0.1


def test_the_coefficient_of_the_divergence_waits_for_the_policy(here: parallel.Parallel, model_dir: Path) -> None:
    algorithm = algorithm_of(**GAE, kl=replace(ADAPTIVE, horizon=100.0))
    built = build(
        model_dir, here, learner=LearnerConfig(steps=10, critic=replace(CRITIC, warmup_steps=3), algorithm=algorithm)
    )
    assert [built.train(step, here)["train/kl_scale"] for step in (3, 4)] == [1.0, pytest.approx(1 - 0.2 * 16 / 100)]


def test_demonstrations_alone_leave_the_critic_as_it_is(here: parallel.Parallel, model_dir: Path) -> None:
    """Adam would go on with its momentum, though the gradient is 0."""
    built = build(model_dir, here, sft_coef=0.5)
    built.train(STEPS[0], here)
    before = built.weights()
    metrics = built.train(STEPS[1], here, demonstration_N=first(16))
    assert metrics["critic/skipped_minibatches"] == metrics["critic/lr"] == 0 < metrics["train/sft_loss"]
    assert all(torch.equal(tensor, built.weights()[name]) for name, tensor in before.items())


def test_the_clip_holds_values_back(here: parallel.Parallel, model_dir: Path) -> None:
    """From the second minibatch on, values have moved."""

    def clipped(value_clip: float) -> float:
        learner = LearnerConfig(steps=10, critic=replace(CRITIC, value_clip=value_clip), algorithm=algorithm_of(**GAE))
        return build(model_dir, here, learner=learner).train(STEPS[0], here, minibatches=2)["critic/clip_fraction"]

    assert clipped(1e-4) > clipped(0.0) == 0


def test_values_come_to_predict_the_reward(here: parallel.Parallel, model_dir: Path) -> None:
    """Trained on one batch again and again, the critic explains its returns, which are the rewards at gamma = lam =
    1.
    """
    quick = CriticConfig(warmup_steps=99, value_clip=0.0, optimizer=OptimizerConfig(lr=1e-2, eps=1e-5))
    built = build(
        model_dir, here, learner=LearnerConfig(steps=100, critic=quick, algorithm=AlgorithmConfig(advantage="gae"))
    )
    explained = [built.train(3, here)["critic/explained_variance"] for _ in range(30)]
    assert explained[0] == 0 and explained[-1] > 0.8


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_resumed_run_ends_with_the_same_bits(
    here: parallel.Parallel, model_dir: Path, tmp_path: Path, dtype: str
) -> None:
    """Critic, its Adam and a moving average of the policy come back exactly."""
    one = build(model_dir, here, dtype=dtype, kl=MOVING)
    one.train(STEPS[0], here)
    one.save(tmp_path, STEPS[0])
    other = build(model_dir, here, dtype=dtype, kl=MOVING)
    assert other.load(tmp_path) == STEPS[0]
    for step in STEPS[1:]:
        same(other.train(step, here), one.train(step, here), tolerance=0)
    assert other.policy.digest() == one.policy.digest()
    assert all(torch.equal(tensor, other.weights()[name]) for name, tensor in one.weights().items())


def test_a_step_that_is_not_finite_leaves_no_trace(here: parallel.Parallel, model_dir: Path) -> None:
    disturbed, undisturbed = build(model_dir, here), build(model_dir, here)
    for built in (disturbed, undisturbed):
        built.train(STEPS[0], here)
    rewards_N = np.array([sample.score for sample in make_samples(vocab=VOCAB, step=STEPS[1])], np.float32)
    rewards_N[0] = np.inf
    skipped = disturbed.train(STEPS[1], here, rewards_N=rewards_N)
    assert skipped["critic/skipped_minibatches"] == skipped["train/skipped_minibatches"] == 1
    assert "critic/loss" not in skipped and not undocumented(skipped)
    same(disturbed.train(STEPS[2], here), undisturbed.train(STEPS[2], here), tolerance=0)
    assert all(torch.equal(tensor, undisturbed.weights()[name]) for name, tensor in disturbed.weights().items())


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_train_what_one_does(here: parallel.Parallel, model_dir: Path, tmp_path: Path, every: bool) -> None:
    """Data, tensor, sequence, pipeline (virtual), context and expert parallel, GAE and V-trace, and from the checkpoint
    of one rank.

    Every metric to 1e-5. Dumps of policy and critic have the same values by token.
    """
    one = build(model_dir, here, kl=MOVING, saves=f"{tmp_path}/one_{{step}}_{{rank}}.safetensors")
    metrics = []
    (tmp_path / "checkpoint").mkdir()
    for step in OF_RANKS:
        metrics.append(one.train(step, here))
        if step == STEPS[0]:
            one.save(tmp_path / "checkpoint", step)
    experts_dir = write_tiny_model(tmp_path / "experts", "qwen3_moe", vocab_size=VOCAB)
    deep_dir = write_tiny_model(tmp_path / "deep", vocab_size=VOCAB, num_hidden_layers=4)
    others = {
        "minibatches": critic_ranks.trained(model_dir, here, minibatches=2)["metrics"],
        "experts": critic_ranks.trained(experts_dir, here)["metrics"],
        "vtrace": critic_ranks.trained(model_dir, here, **VTRACE)["metrics"],
        "deep": critic_ranks.trained(deep_dir, here)["metrics"],
        "vtrace deep": critic_ranks.trained(deep_dir, here, **VTRACE)["metrics"],
    }
    of_vtrace = {name for metrics in others["vtrace"] for name in metrics}
    assert not missing(of_vtrace, ("critic/",)), "every metric is compared"
    args = (model_dir, deep_dir, experts_dir, tmp_path / "checkpoint", every)
    for result in run_ranks(critic_ranks.main, args, world=2, out=tmp_path, timeout_s=400):
        for name, ours in result.items():
            wanted: Any = next(
                (others[end] for end in sorted(others, key=len, reverse=True) if name.endswith(f" {end}")), metrics
            )
            for each, other in zip(ours["metrics"], wanted[-len(ours["metrics"]) :], strict=True):
                try:
                    same(each, other)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from None
    for step, name in product(OF_RANKS, critic_ranks.LAYOUTS.keys() - {DEEP}):
        files = [tmp_path / f"{name}_{step}_{int(name == 'pp2')}.safetensors", tmp_path / f"one_{step}_0.safetensors"]
        for pair in (files, list(map(critic_path, files)), list(map(record_path, map(critic_path, files)))):
            found = compare_train(*map(read_train, pair), 1e-4)
            assert found.first is None and found.notes == ["16 sequences compared"], f"{pair[0]}: {found.first}"


def test_the_critic_has_a_dump_of_its_own(here: parallel.Parallel, model_dir: Path, tmp_path: Path) -> None:
    built = build(model_dir, here, saves=f"{tmp_path}/{{step}}_{{rank}}.safetensors", sft_coef=0.5)
    with_random_head(built)
    metrics = built.train(STEPS[0], here)
    file = tmp_path / f"{STEPS[0]}_0.safetensors"
    dump, policy, record = (read_train(path) for path in (critic_path(file), file, record_path(critic_path(file))))
    assert (dump.role, policy.role, dump.num_steps) == ("critic", "actor", 1)
    assert (dump.steps[0].grad_norm, dump.steps[0].loss_dict["loss"]) == (
        metrics["critic/grad_norm"],
        metrics["critic/loss"],
    )
    assert dump.metrics == {name: value for name, value in metrics.items() if name.startswith("critic/")}
    data, of_policy = dump.steps[0].debug_data, policy.steps[0].debug_data
    for name in ("values", "returns", "advantages", "unconcat_tokens"):
        np.testing.assert_array_equal(np.concatenate(data[name]), np.concatenate(of_policy[name]))
    gaps = np.concatenate(data["current_values"]) - np.concatenate(data["returns"])
    assert 0.5 * np.square(gaps).mean() == pytest.approx(metrics["critic/loss"], rel=1e-5)
    found = compare_train(dump, record, 0.0)
    assert found.first is None and found.compared == ["current_values"]  # the first pass has the weights of the step's
    with refusal(ValueError, place="role", got="critic and actor"):
        compare_train(dump, policy)

    batch = make_batches(
        make_samples(vocab=VOCAB, step=STEPS[1]), step=STEPS[1], max_tokens=60, minibatches=2, pad_to=2
    )[0]
    built.trainer.train(replace(batch, demonstration_N=batch.minibatches_N == 0))  # of which the critic trains none
    taught, trained = read_train(tmp_path / critic_path(Path(f"{STEPS[1]}_0.safetensors"))).steps
    assert taught.grad_norm is None and "current_values" not in taught.debug_data
    assert (
        trained.grad_norm is not None
        and trained.debug_data["sequence_ids"].tolist() == np.flatnonzero(batch.minibatches_N).tolist()
    )


def test_vtrace_trains(here: parallel.Parallel, model_dir: Path) -> None:
    built = build(model_dir, here, advantage="vtrace", correction="tis", weight={"high": 1.0})
    with_random_head(built)
    found = [built.train(step, here) for step in STEPS]
    assert all(np.isfinite(value) for metrics in found for value in metrics.values())
    assert found[0]["critic/return_mean"] != build(model_dir, here).train(STEPS[0], here)["critic/return_mean"]


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ({}, {"advantage": "grpo"}, {"field": "learner.algorithm.advantage", "got": "one without a critic"}),
        ({"kl": MOVING}, {}, {"field": "learner.algorithm.kl", "got": "neither reference_every nor reference_ema"}),
        ({}, {"kl": MOVING}, {"field": "learner.algorithm.kl", "got": "reference_every or reference_ema > 0"}),
    ],
)
def test_a_checkpoint_of_other_roles_is_refused(
    here: parallel.Parallel,
    model_dir: Path,
    tmp_path: Path,
    saved: dict[str, Any],
    now: dict[str, Any],
    message: dict[str, Any],
) -> None:
    built = build(model_dir, here, **saved)
    built.save(tmp_path, STEPS[0])
    other = build(model_dir, here, **(GAE if "advantage" in now else now))
    others = OtherModels() if "advantage" in now else other.saved_models
    with refusal(ConfigRefused, **message):
        state.load(tmp_path, policy=other.policy, optimizer=other.optimizer, others=others)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_reference_follows_the_policy(here: parallel.Parallel, model_dir: Path, dtype: str) -> None:
    """Every two steps it is the policy, so the divergence of the next step is 0; a moving average is that of a loop in
    float32.
    """
    renewed = build(model_dir, here, dtype=dtype, kl=KLConfig(coef=0.1, reference_every=2))
    divergences = [renewed.train(step, here)["train/kl_reference"] for step in (2, 3, 4, 5)]
    assert divergences[0] == divergences[1] == divergences[3] == 0 < divergences[2], "steps 2 and 4 renew it"

    built = build(model_dir, here, dtype=dtype, kl=MOVING)
    wanted = {name: parameter.detach().float().clone() for name, parameter in built.policy.module.named_parameters()}
    for step in STEPS:
        built.train(step, here)
        for name, parameter in built.policy.module.named_parameters():
            wanted[name] = 0.5 * wanted[name] + 0.5 * parameter.detach().float()
    assert built.reference.weights is not None
    for name, tensor in built.reference.weights.tensors.items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-7, rtol=1e-6)
    own = built.policy.digest()
    for in_place in (False, True):
        with OtherWeights(built.policy, in_place=in_place) as others:
            others.take(built.reference.weights)
            there = {
                name: parameter.detach().float().clone() for name, parameter in built.policy.module.named_parameters()
            }
        assert built.policy.digest() == own
        for name, tensor in built.reference.weights.tensors.items():
            assert torch.equal(there[name], tensor.to(built.policy.config.params_dtype).float()), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_table_of_memory_counts_the_critic(here: parallel.Parallel, tmp_path: Path, tied: bool) -> None:
    directory = write_tiny_model(tmp_path, vocab_size=VOCAB, tied=tied)
    critic = build(directory, here).critic.model
    wanted = rank_parameters(valued(ModelShape.read(directory)), 1)
    assert sum(parameter.numel() for parameter in critic.module.parameters()) == wanted
