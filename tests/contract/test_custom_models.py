"""The contracts of a model bridge and of the hooks within a step, ours and yours.

pytest tests/contract/test_custom_models.py --bridge my_bridge:Mine --bridge-model small_model --bridge-log-probs
reference.json \
    --hook-before-log-probs my_hooks:log_pass --hook-before-step my_hooks:log_norms

``--bridge-model`` is a small model of the family. Its log-probs are compared with those of transformers, or with
``--bridge-log-probs``: a list of maps with ``tokens`` and ``log_probs``, the log-prob of each token but the first at
temperature 1, in float32.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch

from docs.examples.extending.my_bridge import Pond
from tests.contract import model_ranks
from tests.learner_steps import make_batches, make_samples, run_ranks
from tests.same_model import (
    LogProbs,
    assert_converts,
    assert_log_probs,
    assert_weights,
    of_transformers,
    scored_rows,
    vocabulary,
)
from tests.skips import inapplicable
from tests.tiny_models import write_tiny_model, write_tiny_pond
from tidemill.bus.wire.messages import Sample, Span
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.settings.config import HooksConfig, OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels
from tidemill.learner.trainer.hooks import BeforeLogProbs, BeforeStep, Hooks
from tidemill.learner.trainer.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidemill.learner.layout.parallel import Parallel

EXAMPLES = "docs.examples.extending."
OURS = {
    "bridge": [EXAMPLES + "my_bridge:Pond"],
    "hook": [("before_log_probs", EXAMPLES + "my_hooks:log_pass"), ("before_step", EXAMPLES + "my_hooks:log_norms")],
}
"""The examples, which are held to the contracts."""
TOLERANCE = 1e-4
"""Largest difference of a log-prob, in nats; both sides compute in float32."""
VOCAB = 300
"""Tokens of the example's model: two ranks can share them."""
STEPS = (9, 10, 11)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    if "bridge" in metafunc.fixturenames:
        metafunc.parametrize("bridge", [*OURS["bridge"], *option("--bridge")])
    if "hook" in metafunc.fixturenames:
        yours = [
            (name, path)
            for name in ("before_log_probs", "before_step")
            for path in option(f"--hook-{name.replace('_', '-')}")
        ]
        metafunc.parametrize("hook", [*OURS["hook"], *yours], ids=lambda one: f"{one[0]} {one[1]}")


@pytest.fixture(scope="module")
def here() -> "Iterator[Parallel]":
    """Yield a world of one rank in this process."""
    from tests.megatron_world import one_rank

    with one_rank() as joined:
        yield joined


# -- bridges


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model directory of the bridge's family, and its log-probs by another program."""

    directory: Path
    log_probs: Path | None
    """None: transformers has the model."""

    def sequences(self) -> list[dict[str, Any]]:
        """Return the sequences of the file with log-probs."""
        assert self.log_probs is not None
        found: list[dict[str, Any]] = json.loads(self.log_probs.read_text(encoding="utf-8"))
        lengths = [(len(one["tokens"]), len(one["log_probs"])) for one in found]
        assert all(tokens - 1 == log_probs > 0 for tokens, log_probs in lengths), (
            f"{self.log_probs}: want a log-prob for each token but the first"
        )
        return found

    def reference(self) -> tuple[list[Sample], LogProbs]:
        """Return samples, and the function that gives the log-probs of their tokens. Fails where no other program has
        computed any.
        """
        if self.log_probs is None:
            samples = make_samples(vocab=vocabulary(self.directory), temperature=0.7)
            return samples, of_transformers(self.directory)
        given = self.sequences()
        known = {tuple(one["tokens"]): torch.tensor(one["log_probs"], dtype=torch.float32) for one in given}
        samples = [_sample(number, one["tokens"]) for number, one in enumerate(given)]
        return samples, lambda tokens, temperature: known[tuple(tokens.tolist())]


def _sample(number: int, tokens: list[int]) -> Sample:
    """Return a sample of which all tokens but the first are trained."""
    length = len(tokens) - 1
    return replace(
        make_samples(vocab=10, groups=1, group_size=1)[0],
        task=number + 1,
        group_size=1,
        tokens=np.array(tokens, np.int32),
        response_length=length,
        rollout_log_probs=np.full(length, -1.0, np.float32),
        loss_mask=np.ones(length, np.uint8),
        spans=(Span(version=2, num_tokens=length),),
    )


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the model of the examples, with the log-probs of the qwen2 model that has the same weights."""
    root = tmp_path_factory.mktemp("pond")
    wanted = of_transformers(write_tiny_model(root / "qwen2", "qwen2", vocab_size=VOCAB))
    sequences = [torch.from_numpy(sample.tokens).long() for sample in make_samples(vocab=VOCAB)]
    given = [{"tokens": tokens.tolist(), "log_probs": wanted(tokens, 1.0).tolist()} for tokens in sequences]
    (root / "log_probs.json").write_text(json.dumps(given))
    return Model(directory=write_tiny_pond(root / "pond", vocab_size=VOCAB), log_probs=root / "log_probs.json")


@pytest.fixture
def model(request: pytest.FixtureRequest, bridge: str, pond: Model) -> Model:
    """Return the model that a bridge is tried with: ``--bridge-model``, or the one of the examples."""
    yours = request.config.getoption("--bridge-model")
    if bridge in OURS["bridge"] or not yours:
        return pond
    reference = request.config.getoption("--bridge-log-probs")
    return Model(directory=Path(yours), log_probs=Path(reference) if reference else None)


@pytest.fixture
def policy(here: "Parallel", bridge: str, model: Model) -> MegatronPolicy:
    return build_policy(model.directory, dtype="float32", parallel=here, bridge_class=bridge)


def test_a_bridge_gives_the_files_again(
    here: "Parallel", tmp_path: Path, bridge: str, model: Model, policy: MegatronPolicy
) -> None:
    """Every tensor of the files, bit for bit: as pushed to engines, and by way of a checkpoint as ``tidemill convert``
    writes it.
    """
    assert_weights(dict(policy.export()), model.directory)
    assert_converts(model.directory, tmp_path, here, bridge_class=bridge)


def test_log_probs_through_a_bridge_are_those_of_the_model(model: Model, policy: MegatronPolicy) -> None:
    """Of transformers or of ``--bridge-log-probs``: in rows of many sequences, at every place."""
    samples, wanted = model.reference()
    assert_log_probs(scored_rows(policy, samples, max_tokens=100), samples, wanted, tolerance=TOLERANCE)


def test_a_step_through_a_bridge_changes_the_weights_and_not_their_names(model: Model, policy: MegatronPolicy) -> None:
    before = {name: weight.clone() for name, weight in policy.export()}
    trainer = Trainer(
        policy, MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=10), AlgorithmConfig(), max_lag=2
    )
    metrics = trainer.train(make_batches(make_samples(vocab=vocabulary(model.directory)), max_tokens=100)[0])
    assert metrics["train/skipped_minibatches"] == 0 and metrics["train/grad_norm"] > 0
    after = dict(policy.export())
    assert {name: weight.shape for name, weight in after.items()} == {
        name: weight.shape for name, weight in before.items()
    }
    assert any(not torch.equal(after[name], before[name]) for name in after)


def test_two_ranks_through_a_bridge_have_the_model_of_one(
    tmp_path: Path, bridge: str, model: Model, policy: MegatronPolicy
) -> None:
    """Tensor parallelism divides every tensor that can be: the same log-probs, and the files again, bit for bit."""
    ranks = run_ranks(model_ranks.bridged, (model.directory, bridge), world=2, out=tmp_path, timeout_s=300)
    if ranks[0]["refused"]:
        inapplicable(f"two ranks cannot share this model: {ranks[0]['refused']}")
    samples = make_samples(vocab=vocabulary(model.directory), temperature=0.7)
    alone = dict(scored_rows(policy, samples, max_tokens=100, pad_to=2))
    for rank in ranks:
        assert rank["differing"] == []
        assert len(rank["rows"]) == len(alone)
        for number, found in rank["rows"]:
            np.testing.assert_allclose(found, alone[number], atol=TOLERANCE, rtol=0)


class Exchanged(Pond):
    """A wrong bridge: it has the two norms of a layer in each other's place."""

    _NORMS: ClassVar[Mapping[str, str]] = dict(zip(Pond._NORMS, reversed(Pond._NORMS.values()), strict=True))


def test_a_bridge_with_exchanged_norms_is_found_by_its_log_probs(here: "Parallel", pond: Model) -> None:
    policy = build_policy(pond.directory, dtype="float32", parallel=here, bridge_class=f"{__name__}:Exchanged")
    assert_weights(dict(policy.export()), pond.directory)
    with pytest.raises(AssertionError, match="not close"):
        test_log_probs_through_a_bridge_are_those_of_the_model(pond, policy)


# -- hooks


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("contract") / "model")


def _trained(here: "Parallel", model_dir: Path, hooks: HooksConfig, steps: tuple[int, ...]) -> tuple[str, list[float]]:
    """Train steps of two minibatches from the files' weights. Returns the digest of the weights and the losses."""
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=20)
    trainer = Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2, others=OtherModels(), hooks=hooks)
    samples = {step: make_samples(vocab=vocabulary(model_dir), step=step) for step in steps}
    metrics = [trainer.train(make_batches(samples[step], step=step, minibatches=2)[0]) for step in steps]
    assert all(one["train/skipped_minibatches"] == 0 for one in metrics)
    return policy.digest(), [one["train/loss"] for one in metrics]


def test_steps_with_a_hook_that_are_taken_again_end_in_the_same_bits(
    here: "Parallel", model_dir: Path, hook: tuple[str, str]
) -> None:
    """It is accepted at the start, and called in every step; what it changes is a function of its argument, as a
    resumed run needs.
    """
    hooks = HooksConfig(**{hook[0]: hook[1]})
    Hooks(hooks)
    assert _trained(here, model_dir, hooks, STEPS) == _trained(here, model_dir, hooks, STEPS)


def test_ranks_with_a_hook_keep_the_same_weights(tmp_path: Path, model_dir: Path, hook: tuple[str, str]) -> None:
    """Two replicas with different samples: collectives of the hook are called by both, and none has weights of its own
    afterwards.
    """
    ranks = run_ranks(model_ranks.hooked, (model_dir, *hook, STEPS), world=2, out=tmp_path, timeout_s=300)
    assert len({rank["digest"] for rank in ranks}) == 1


CALLS = itertools.count()


@torch.no_grad()
def remembers(moment: BeforeLogProbs | BeforeStep) -> None:
    """Break the contract: change the weights by the number of calls so far."""
    for weight in moment.chunks[0].parameters():
        weight.mul_(1 + 1e-3 * next(CALLS))


@pytest.mark.parametrize("name", ["before_log_probs", "before_step"])
def test_a_hook_with_a_memory_is_found(here: "Parallel", model_dir: Path, name: str) -> None:
    """It is called, and the steps end in other bits."""
    hooks = HooksConfig(**{name: f"{__name__}:remembers"})
    assert _trained(here, model_dir, hooks, STEPS) != _trained(here, model_dir, hooks, STEPS)
