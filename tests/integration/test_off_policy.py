"""The learner is right about old data: the real engine and the real Megatron against transformers and against each
other.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.algorithm_settings import algorithm_of
from tests.bench.pinned import Named, PinnedLoop, Task
from tidemill.bus.wire.messages import Sample, score_of
from tidemill.learner.layout.parallel import Parallel

SMALL = Task(num_digits=3, groups=8, group_size=4, minibatches=1, held_out=8)


Make = Callable[..., PinnedLoop]


@pytest.fixture
def make(here: Parallel, tmp_path: Path) -> Iterator[Make]:
    """Return a function ``make(algorithm settings, **loop settings)``; the loops are closed at the end."""
    with ExitStack() as stack:

        def made(algorithm: dict[str, Any] | None = None, **settings: Any) -> PinnedLoop:
            loop = PinnedLoop(
                tmp_path, algorithm_of(**(algorithm or {})), parallel=here, **({"task": SMALL} | settings)
            )
            stack.callback(loop.close)
            return loop

        yield made


def log_probs_of(
    loop: PinnedLoop, weights: Named, samples: list[Sample], temperature: float = 1.0
) -> list[np.ndarray[Any, Any]]:
    """Return the log-probs of every response's tokens under some weights, by transformers, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(loop.directory / "model", dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    found = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()
        with torch.no_grad():
            scores = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
        found.append(scores[:-1].gather(-1, tokens[1:, None])[-sample.response_length :, 0].numpy())
    return found


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_both_sides_mean_the_same_distribution(make: Make, temperature: float) -> None:
    """S2: the engine's decoding, the learner's packed forward pass and transformers agree on every log-prob, at any
    temperature.
    """
    loop = make(task=replace(SMALL, temperature=temperature, lr=5e-3))
    for _ in range(6):
        loop.step()  # away from the uniform policy
    samples = loop.rollout()
    metrics = loop.trainer.train(loop.batch(samples, loop.version + 1))
    assert metrics["offpolicy/logprob_diff_max"] < 1e-4
    reference = log_probs_of(loop, loop.past[-1], samples, temperature)
    for sample, wanted in zip(samples, reference, strict=True):
        np.testing.assert_allclose(sample.rollout_log_probs, wanted, atol=1e-4)


def test_fresh_data_needs_no_correction_to_the_last_bit(make: Make) -> None:
    """S3: where mu is exactly the learner's own log-prob, weights are exactly 1: corrected and uncorrected give the
    same weights.
    """

    def exact(samples: list[Sample], loop: PinnedLoop) -> list[Sample]:
        batch = loop.batch(samples, loop.version + 1)
        own = {}
        for row, log_probs_T in zip(batch.micro_batches, loop.trainer.log_probs(batch), strict=True):
            for number in np.unique(row.sample_T[row.loss_mask_T]):
                own[int(number)] = log_probs_T[torch.from_numpy((row.sample_T == number) & row.loss_mask_T)].numpy()
        return [replace(sample, rollout_log_probs=own[number]) for number, sample in enumerate(samples)]

    digests = set()
    for minibatches in (1, 2):
        for correction in ("decoupled", "icepop", "naive"):
            loop = make({"correction": correction}, task=replace(SMALL, minibatches=minibatches), corrupt=exact)
            for _ in range(3):
                metrics = loop.step()
                assert metrics["offpolicy/lag_max"] == 0
                assert metrics["offpolicy/logprob_diff_max"] == 0
            digests.add((minibatches, loop.policy.digest()))
    assert len(digests) == 2, "one for each number of minibatches"


@pytest.mark.parametrize("lag", [1, 3])
def test_weights_are_the_ratio_of_two_versions(make: Make, lag: int) -> None:
    """S4: the learner's weights of old tokens are the ratios that transformers computes from the two checkpoints."""
    loop = make({"weight": {"high": 1.3}}, lag=lag, task=replace(SMALL, lr=5e-3))
    for _ in range(6):
        loop.step()
    samples = loop.rollout()
    now, then = loop.past[-1], loop.past[-1 - lag]
    metrics = loop.trainer.train(loop.batch(samples, loop.version + 1))
    assert {span.version for sample in samples for span in sample.spans} == {loop.version - lag}
    assert metrics[f"offpolicy/lag_share/{lag}"] == 1
    groups = [samples[at : at + SMALL.group_size] for at in range(0, len(samples), SMALL.group_size)]
    # The others have no gradient, and are not computed.
    trained = [sample for group in groups if len({score_of(sample.reward) for sample in group}) > 1 for sample in group]
    assert metrics["train/zero_samples_skipped"] == len(samples) - len(trained)
    mu = np.concatenate(log_probs_of(loop, then, trained))
    delta = np.concatenate(log_probs_of(loop, now, trained)) - mu
    assert np.abs(delta).max() > 0.1, "nothing has moved: there is nothing to see"
    assert metrics["offpolicy/k1"] == pytest.approx(-delta.mean(), abs=1e-4)
    assert metrics["offpolicy/weight_mean"] == pytest.approx(np.exp(delta).mean(), rel=1e-4)
    assert metrics["offpolicy/tis_weight_mean"] == pytest.approx(np.exp(delta).clip(max=1.3).mean(), rel=1e-4)
    assert metrics["offpolicy/tis_clipped_high"] == pytest.approx((np.exp(delta) > 1.3).mean(), abs=0.011)


def test_rejecting_changes_the_update_and_not_what_is_measured(make: Make) -> None:
    """S10: diagnostics cover all trainable tokens, including those rejected by a rule."""

    def noisy(samples: list[Sample], loop: PinnedLoop) -> list[Sample]:
        generator = np.random.default_rng(0)
        noise = [generator.normal(0, 0.05, sample.response_length).astype(np.float32) for sample in samples]
        return [
            replace(one, rollout_log_probs=one.rollout_log_probs + each)
            for one, each in zip(samples, noise, strict=True)
        ]

    plain = make(corrupt=noisy).step()
    strict = make({"reject": {"rules": ("k1 token 0.99 1.01",)}}, corrupt=noisy).step()
    assert strict["train/grad_norm"] != plain["train/grad_norm"]
    measured = [name for name in plain if name.startswith("offpolicy/") and "reject" not in name]
    assert {name: strict[name] for name in measured} == {name: plain[name] for name in measured}


def test_the_loop_is_the_same_every_time(make: Make) -> None:
    """The later tests in this file and tests/bench/staleness compare runs: a run must depend on its seed alone."""
    runs = []
    for _ in range(2):
        loop = make(lag=2, task=replace(SMALL, minibatches=2))
        metrics = [loop.step() for _ in range(4)]
        runs.append(
            (loop.policy.digest(), [{name: one[name] for name in one if "second" not in name} for one in metrics])
        )
    assert runs[0][0] == runs[1][0]
    assert json.dumps(runs[0][1]) == json.dumps(runs[1][1])
