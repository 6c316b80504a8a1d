"""Prompts that the samples of a group share are computed once: gradients and metrics are those of whole sequences."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithm_cases import CASES, EVERY_REJECTION, EVERY_TERM, algorithm
from tests.algorithm_settings import algorithm_of
from tests.examples import examples, rarely
from tests.integration.gradients import PLAIN
from tests.integration.megatron_layouts import VOCAB, another, samples_of
from tests.learner_steps import make_batches, make_samples, with_long_prompts
from tests.same_metrics import assert_same
from tests.tiny_models import write_tiny_model
from tidemill.bus.wire.messages import Span
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import model
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.backends.megatron.optimizer_pieces import buffers_of
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.trainer.backups import OtherModels
from tidemill.learner.trainer.critic import open_critic
from tidemill.learner.trainer.trainer import Trainer

OFTEN = [EVERY_TERM, EVERY_REJECTION, "gspo", "topr", "kl in the reward of tokens", "top entropy"]
REJECT_ALL = ("geo_mask", "geo_mask, loose", "rejections", "seq_mis")
"""Cases whose rules reject every one of these random samples, so that only metrics are compared."""
RELATIVE = 1e-6
"""Of the largest gradient; Megatron keeps those of a model in float64 in float32."""


class Whole(Trainer):
    """A trainer that computes every sequence whole."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._obstacle = "the other side of the comparison"


class Read(MegatronOptimizer):
    """An optimizer that keeps the gradients of its steps and leaves the weights as they are."""

    gradients: tuple[Tensor, ...] = ()

    def step(self, step: int, *, loss: float, scale: float = 1.0) -> tuple[float | None, float]:
        self.gradients += tuple(buffer.grad_data.clone() for ddp in self._policy.ddps for buffer in buffers_of(ddp))
        return 1.0, 0.0


def step_of(
    kind: type[Trainer], policy: MegatronPolicy, config: AlgorithmConfig, batch: StepBatch, **others: Any
) -> Any:
    """Return the gradients of a step and its metrics."""
    optimizer = Read(policy, PLAIN, steps=10)
    trainer = kind(policy, optimizer, config, max_lag=2, others=OtherModels(**others))
    metrics = trainer.train(batch)
    assert optimizer.gradients
    return optimizer.gradients, metrics | {"computed": sum(tokens for _, tokens in trainer.spans)}


def assert_shared(
    policy: MegatronPolicy,
    config: AlgorithmConfig,
    batch: StepBatch,
    *,
    relative: float = RELATIVE,
    rejects_all: bool = False,
    **others: Any,
) -> None:
    """Fail unless both trainers have the same gradients and metrics, and the prompts were computed once."""
    ours, whole = (step_of(kind, policy, config, batch, **others) for kind in (Trainer, Whole))
    for gradient, wanted in zip(ours[0], whole[0], strict=True):
        assert float((gradient - wanted).abs().max()) <= relative * float(wanted.abs().max())
    assert rejects_all or any(wanted.abs().max() > 0 for wanted in whole[0])
    saved = ours[1].pop("train/shared_tokens")
    assert whole[1].pop("train/shared_tokens") == 0
    assert whole[1].pop("computed") - ours[1].pop("computed") == saved > 0
    assert_same(ours[1], whole[1])


@pytest.fixture(scope="module")
def policy_64(here: Any, model_dir: Path) -> Iterator[MegatronPolicy]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model.DTYPES, "float64", torch.float64)
        yield build_policy(model_dir, dtype="float64", parallel=here)


@pytest.fixture
def policy(here: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MegatronPolicy:
    monkeypatch.setitem(model.DTYPES, "float64", torch.float64)
    return build_policy(model_dir, dtype="float64", parallel=here)


@pytest.mark.parametrize("max_tokens", [1 << 20, 300], ids=["one row", "several"])
@pytest.mark.parametrize("name", [*OFTEN, *rarely(sorted({*CASES} - {*OFTEN}))])
def test_gradients_are_those_of_whole_sequences(policy: MegatronPolicy, name: str, max_tokens: int) -> None:
    config = algorithm(name)
    batch = make_batches(
        with_long_prompts(samples_of(name, 3), vocab=VOCAB), max_tokens=max_tokens, minibatches=CASES[name][1]
    )[0]
    reference = another(policy) if config.needs_reference else None
    assert_shared(policy, config, batch, rejects_all=name in REJECT_ALL, reference=reference)


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 60), st.integers(1, 12)), min_size=2, max_size=9
    ),
    st.sampled_from([30, 150, 1 << 20]),
)
def test_any_common_beginnings_have_the_gradients_of_whole_sequences(
    policy_64: MegatronPolicy, shapes: list[tuple[int, int, int, int]], max_tokens: int
) -> None:
    """Prompts of two texts that are cut anywhere, groups of one sample and of several, prompts longer than rows."""
    draws = np.random.default_rng(len(shapes))
    texts, template = draws.integers(3, VOCAB, (3, 60)), make_samples(vocab=VOCAB)[0]
    samples = []
    for place, (text, common, more, length) in enumerate(sorted(shapes)):
        prompt = np.concatenate([texts[2, :common], texts[text, :more], [5]])
        samples.append(
            replace(
                template,
                task=1 + place // 3,
                index=place % 3,
                group_size=min(3, len(shapes) - place // 3 * 3),
                tokens=np.concatenate([prompt, draws.integers(3, VOCAB, length)]).astype(np.int32),
                response_length=length,
                rollout_log_probs=np.full(length, -4.0, np.float32),
                loss_mask=np.ones(length, np.uint8),
                spans=(Span(version=2, num_tokens=length),),
                reward=1.0 + place % 4,
            )
        )
    batch, config = make_batches(samples, max_tokens=max_tokens)[0], algorithm_of(advantage="reinforce")
    ours, whole = (step_of(kind, policy_64, config, batch)[0] for kind in (Trainer, Whole))
    for gradient, wanted in zip(ours, whole, strict=True):
        assert float((gradient - wanted).abs().max()) <= RELATIVE * float(wanted.abs().max())


@pytest.mark.parametrize("family", ["glm4", "llama", "qwen3_moe", "deepseek_v3"])
def test_families_share_prompts(here: Any, tmp_path: Path, family: str) -> None:
    """With experts, each copy of a token would go to the same ones; latent attention has values of another size."""
    policy = build_policy(write_tiny_model(tmp_path, family), dtype="float32", parallel=here)
    batch = make_batches(with_long_prompts(make_samples(vocab=299), vocab=299))[0]
    assert_shared(policy, AlgorithmConfig(), batch, relative=1e-5)


def test_a_critic_shares_prompts(here: Any, model_dir: Path) -> None:
    config = algorithm_of(advantage="gae", gamma=0.9, lam=0.9)
    learner = LearnerConfig(algorithm=config)
    batch = make_batches(with_long_prompts(make_samples(vocab=VOCAB), vocab=VOCAB), max_tokens=300)[0]
    found = []
    for kind in (Trainer, Whole):
        policy = build_policy(model_dir, dtype="float32", parallel=here)
        critic = open_critic(MegatronBackend(), learner, policy, model_dir)
        optimizer = MegatronOptimizer(policy, learner.optimizer, steps=10)
        trainer = kind(policy, optimizer, config, max_lag=2, others=OtherModels(critic=critic))
        found.append([trainer.train(batch) for _ in range(2)])
    for ours, wanted in zip(*found, strict=True):
        assert ours["train/shared_tokens"] > 0 == wanted["train/shared_tokens"]
        assert_same(ours, wanted)
