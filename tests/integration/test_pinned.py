"""The closed loop of tests/bench/pinned: the lag is the requested one, and evaluations change nothing. And the sweep's
conclusions.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.bench.pinned import Named, PinnedLoop, Task
from tests.bench.staleness import VERSIONS, Run, claims, read, sweep
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.layout.parallel import Parallel

EASY = Task(num_digits=1, groups=16, group_size=8, minibatches=2, held_out=64, lr=3e-3, eps=1e-5)

Make = Callable[..., PinnedLoop]


@pytest.fixture
def make(here: Parallel, tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(**settings: Any) -> PinnedLoop:
            loop = PinnedLoop(tmp_path, AlgorithmConfig(), parallel=here, **({"task": EASY} | settings))
            stack.callback(loop.close)
            return loop

        yield made


def greedy_accuracy(loop: PinnedLoop, weights: Named) -> float:
    """Return the accuracy of greedy decoding on the held-out prompts, by transformers, without a cache; all prompts are
    of one length.
    """
    model = AutoModelForCausalLM.from_pretrained(loop.directory / "model", dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    rows = [json.loads(line) for line in (loop.directory / "prompts.jsonl").read_text().splitlines()][
        -loop.task.held_out :
    ]
    tokens_BT = torch.tensor([loop.engine.text.encode(row["prompt"]) for row in rows])
    for _ in range(loop.task.num_digits + 1):
        with torch.no_grad():
            tokens_BT = torch.cat([tokens_BT, model(tokens_BT).logits[:, -1:].argmax(-1)], 1)
    (eos_id,) = loop.engine.eos_ids
    ids = {row["label"]: [*loop.engine.text.encode(row["label"]), eos_id] for row in rows}
    right = [
        answer == ids[row["label"]]
        for answer, row in zip(tokens_BT[:, -loop.task.num_digits - 1 :].tolist(), rows, strict=True)
    ]
    return float(np.mean(right))


def test_the_lag_is_reached_and_kept(make: Make) -> None:
    """The version numbers have that lag; test_off_policy shows that the weights belong to them."""
    loop = make(lag=3)
    seen = []
    for _ in range(6):
        version = loop.version
        samples = loop.rollout()
        assert {span.version for sample in samples for span in sample.spans} == {max(0, version - 3)}
        metrics = loop.step()
        seen.append(metrics["offpolicy/lag_max"])
        assert metrics["offpolicy/lag_mean"] == metrics["offpolicy/lag_max"]
    assert seen == [0, 1, 2, 3, 3, 3]


def test_the_evaluation_is_greedy_and_of_the_present_weights(make: Make) -> None:
    loop = make(lag=4)
    for _ in range(9):
        loop.step()
    present, lagged = greedy_accuracy(loop, loop.past[-1]), greedy_accuracy(loop, loop.past[-1 - loop.lag])
    assert present > lagged + 0.1, "nothing has been learnt meanwhile: there is nothing to see"
    assert loop.evaluate() == present


def test_evaluation_changes_nothing(make: Make) -> None:
    digests = []
    for looks in (False, True):
        loop = make(lag=2)
        for _ in range(4):
            loop.step()
            if looks:
                loop.evaluate()
        digests.append(loop.policy.digest())
    assert digests[0] == digests[1]


def row(
    method: str, lag: int, seed: int, accuracies: list[float], entropy: float = 0.01, sampled: float = 0.95
) -> dict[str, Any]:
    curve = [[10 * (number + 1), 1.0, sampled, accuracy] for number, accuracy in enumerate(accuracies)]
    run = {"method": method, "lag": lag, "seed": seed, "versions": VERSIONS}
    return run | {"curve": curve, "near": 10, "max_k3": 0.1, "entropy": entropy, "reward": sampled, "seconds": 1.0}


def verdicts(rows: list[dict[str, Any]]) -> list[bool]:
    return [said.startswith("HOLDS") for said in claims(rows, sorted({one["lag"] for one in rows}))]


def test_a_claim_is_about_the_end_and_about_every_seed() -> None:
    good = [row("tis", lag, seed, [0.5, 1.0, 1.0, 1.0]) for lag in (0, 8) for seed in range(3)]
    assert verdicts(good) == [True]
    assert verdicts([*good[:-1], row("tis", 8, 2, [1.0, 1.0, 1.0, 0.9])]) == [False], (
        "one seed falls back from its peak"
    )
    assert verdicts([*good[:-1], row("tis", 8, 2, [0.5, 0.5, 1.0, 1.0])]) == [False], (
        "one seed gets there at the last moment"
    )
    assert verdicts([row("none", 8, 0, [1.0, 0.7, 0.7, 0.7]), row("none", 16, 0, [0.2, 0.3])]) == [True]
    assert verdicts([row("none", 8, 0, [1.0, 0.7, 0.7, 0.7]), row("none", 16, 0, [0.2, 1.0, 1.0, 1.0])]) == [False]
    slower = [row("bypass", 4, 0, [1.0]), row("bypass", 8, 0, [1.0], entropy=0.3, sampled=0.5)]
    assert verdicts(slower) == [True, True]
    assert verdicts([slower[1] | {"lag": 4}, slower[0] | {"lag": 8}]) == [False, False]


def test_a_sweep_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "there.jsonl"
    there = [row("tis", lag, 0, [1.0]) for lag in (0, 1)]
    file.write_text("".join(json.dumps(one) + "\n" for one in there))
    wanted = [Run(method="tis", lag=1, seed=0), Run(method="tis", lag=0, seed=0)]
    assert sweep(wanted, file, 1) == [there[1], there[0]]
    assert read(file) == there
