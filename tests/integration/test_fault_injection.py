"""Faults of an engine, a wire or a learner, injected on purpose: each trips an alarm within three steps, and a healthy
run none.

The engine is the built-in one, the learner Megatron; the policy is half trained (reward about 0.8), where mistakes
matter.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.bench.pinned import EngineFault, Named, PinnedLoop, Task
from tests.examples import THOROUGH
from tidemill.bus.wire.messages import Sample, Span
from tidemill.learner.algorithms.alarms import Alarm, AlarmConfig, AlarmWatch, Context
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.layout.parallel import Parallel

TASK = Task(num_digits=3, minibatches=1, lr=1.5e-3)
STEPS = 3
"""Number of steps within which a fault must be detected."""

Make = Callable[..., PinnedLoop]


@pytest.fixture(scope="module")
def half_trained(here: Parallel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Alarm]]:
    """Return a prepared directory with a partly trained model, and the alarms raised during its training."""
    directory = tmp_path_factory.mktemp("half")
    loop = PinnedLoop(directory, AlgorithmConfig(), task=TASK, parallel=here)
    metrics = []
    while len(metrics) < 200 and (not metrics or metrics[-1]["reward"] < 0.75):
        metrics.append(loop.step())
    assert metrics[-1]["reward"] >= 0.75
    save_file(
        {name: tensor.contiguous() for name, tensor in loop.weights().items()},
        directory / "model" / "model.safetensors",
    )
    loop.close()
    return directory, watched(metrics)


@pytest.fixture
def make(here: Parallel, half_trained: tuple[Path, list[Alarm]], tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(**settings: Any) -> PinnedLoop:
            directory = tmp_path / str(len(list(tmp_path.iterdir())))
            shutil.copytree(half_trained[0], directory)
            loop = PinnedLoop(directory, AlgorithmConfig(), parallel=here, **({"task": TASK} | settings))
            stack.callback(loop.close)
            return loop

        yield made


def watched(metrics: list[dict[str, float]], max_lag: int = 0) -> list[Alarm]:
    watch = AlarmWatch(AlarmConfig(), Context(max_lag=max_lag))
    return [alarm for step in metrics for alarm in watch.step(step)]


def log_probs(loop: PinnedLoop, samples: list[Sample]) -> list[np.ndarray[Any, Any]]:
    """Return the log-probs of each sample under the learner's present weights."""
    batch = loop.batch(samples, loop.version + 1)
    found: dict[int, np.ndarray[Any, Any]] = {}
    for row, log_probs_T in zip(batch.micro_batches, loop.trainer.log_probs(batch), strict=True):
        for number in np.unique(row.sample_T[row.loss_mask_T]):
            found[int(number)] = log_probs_T[torch.from_numpy((row.sample_T == number) & row.loss_mask_T)].numpy()
    return [found[number] for number in range(len(samples))]


def reported(samples: list[Sample], values: list[np.ndarray[Any, Any]]) -> list[Sample]:
    return [
        replace(sample, rollout_log_probs=each.astype(np.float32)) for sample, each in zip(samples, values, strict=True)
    ]


def shifted(samples: list[Sample], loop: PinnedLoop) -> list[Sample]:
    return reported(samples, [np.roll(sample.rollout_log_probs, 1) for sample in samples])


def of_another_sample(samples: list[Sample], loop: PinnedLoop) -> list[Sample]:
    whole = [sample for sample in samples if sample.response_length == 4]
    turned = {id(one): other.rollout_log_probs for one, other in zip(whole, whole[1:] + whole[:1], strict=True)}
    return reported(samples, [turned.get(id(sample), sample.rollout_log_probs) for sample in samples])


def inverse(samples: list[Sample], loop: PinnedLoop) -> list[Sample]:
    """Report the log-probs with which the learner would compute mu / pi."""
    return reported(
        samples, [2 * own - one.rollout_log_probs for own, one in zip(log_probs(loop, samples), samples, strict=True)]
    )


def untempered(samples: list[Sample], loop: PinnedLoop) -> list[Sample]:
    """Report raw log-probs, without the temperature of the sampling."""
    return reported(samples, log_probs(loop, samples))


def without_end(samples: list[Sample], loop: PinnedLoop) -> list[Sample]:
    """Remove the end-of-sequence token; the rest is right."""
    cut = []
    for one in samples:
        if int(one.tokens[-1]) in loop.engine.eos_ids and one.response_length > 1:
            length = one.response_length - 1
            one = replace(
                one,
                tokens=one.tokens[:-1],
                response_length=length,
                rollout_log_probs=one.rollout_log_probs[:-1],
                loss_mask=one.loss_mask[:-1],
                spans=(Span(version=one.spans[0].version, num_tokens=length),),
            )
        cut.append(one)
    return cut


def old_weights(loop: PinnedLoop, version: int) -> Named:
    """Return the weights of three versions ago, under the new number."""
    return loop.kept[0]


def torn_weights(loop: PinnedLoop, version: int) -> Named:
    """Return weights of which half of the tensors have not arrived."""
    names = sorted(loop.past[-1])
    return {name: (loop.kept[0] if number % 2 else loop.past[-1])[name] for number, name in enumerate(names)}


FAULTS: dict[str, dict[str, Any]] = {
    "engine at another temperature": {"fault": EngineFault(temperature=0.7)},
    "engine at another temperature, reporting untempered log-probs": {
        "fault": EngineFault(temperature=0.7),
        "corrupt": untempered,
    },
    "top-p renormalised against the full softmax": {"fault": EngineFault(top_p=0.9)},
    "log-probs shifted by one": {"corrupt": shifted},
    "log-probs of another sample": {"corrupt": of_another_sample},
    "end-of-sequence token lost": {"corrupt": without_end},
    "old weights behind a newer version number": {"fault": EngineFault(weights=old_weights)},
    "torn weights": {"fault": EngineFault(weights=torn_weights)},
    "inverse ratio": {"corrupt": inverse, "lag": 4, "task": replace(TASK, lr=5e-3)},
}
ALIKE = ("engine at another temperature", "log-probs of another sample", "old weights behind a newer version number")
"""Faults that show in the numbers of a step as another one does."""
ONLY_THE_GAP = "engine at another temperature, reporting untempered log-probs"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in FAULTS]
)
def test_a_fault_trips_an_alarm_within_three_steps(make: Make, name: str) -> None:
    settings = FAULTS[name]
    loop = make(lag=settings.get("lag", 0), task=settings.get("task", TASK))
    loop.kept = [loop.weights()]
    for _ in range(4):
        loop.step()
    loop.fault, loop.corrupt = settings.get("fault", EngineFault()), settings.get("corrupt")
    alarms = watched([loop.step() for _ in range(STEPS)], max_lag=loop.lag)
    print(name, *alarms, sep="\n  ")
    assert alarms, f"{name}: nobody noticed"
    if name == ONLY_THE_GAP:
        assert {alarm.name for alarm in alarms} == {"entropy_gap"}, "every ratio is perfect here"


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_healthy_run_trips_none(make: Make, lag: int) -> None:
    loop = make(lag=lag)
    assert not watched([loop.step() for _ in range(40 if THOROUGH else 12)], max_lag=lag)


def test_nothing_is_wrong_on_the_way_from_nothing(half_trained: tuple[Path, list[Alarm]]) -> None:
    assert not half_trained[1]
