"""The examples of docs/extending.md are type-checked against the ports, and run."""

import asyncio
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.algorithm_settings import algorithm_of
from tests.contract import test_custom_algorithms as contract
from tests.web_hook import web_hook
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.bus.wire.messages import Sampling, Status
from tidemill.launch.cli.metrics import open_sink
from tidemill.launch.metrics.sinks import StepMetrics
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.objective import Objective
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import load
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.store import snapshot_files

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples/extending"
SETTINGS = """
[mypy]
disallow_untyped_defs = true
follow_imports = silent
ignore_missing_imports = true

[mypy-torch.*,transformers.*,aiohttp.*,nats.*,megatron.*]
follow_imports = skip
"""
"""Settings of the type check. Large libraries are left out, so that the types of the ports are checked in seconds."""
CHECKED = """
from collections.abc import Callable
from pathlib import Path

from tidemill.actors.config import EngineConfig
from tidemill.actors.serving.port import Factory, ServedEngine
from tidemill.rewards.port import Reward
from shared_directory import SharedDirectory
from uniform_engine import UniformEngine
from tidemill.rewards.group import GroupReward
from my_group_reward import behind_the_best
from my_hooks import log_norms, log_pass
from tidemill.learner.trainer.hooks import BeforeLogProbs, BeforeStep
from my_rewards import tagged
from tidemill.weightstore.transport.port import WeightReceiver

reward: Reward = tagged
group_reward: GroupReward = behind_the_best
before_log_probs: Callable[[BeforeLogProbs], None] = log_pass
before_step: Callable[[BeforeStep], None] = log_norms
factory: Factory = UniformEngine
engine: ServedEngine = UniformEngine(Path(), EngineConfig())


def transport(engine: WeightReceiver) -> WeightReceiver:
    return SharedDirectory(engine, Path())
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in [path.stem for path in EXAMPLES.glob("*.py")]:
        sys.modules.pop(name, None)


def module(name: str) -> ModuleType:
    return __import__(name)


def test_the_examples_have_the_types_of_the_ports(tmp_path: Path) -> None:
    (tmp_path / "checked.py").write_text(CHECKED)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", str(tmp_path / "mypy.ini"), str(tmp_path / "checked.py")]
    environment = {"MYPYPATH": f"{ROOT}:{EXAMPLES}", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


async def test_the_reward_scores_an_answer_between_tags() -> None:
    score = load("my_rewards:tagged", {"format_bonus": 0.2})

    async def of(response: str) -> Any:
        return await score(RewardRequest(prompt="3 + 4?", response=response, label=7, status=Status.COMPLETED))

    assert await of("so <answer> 7 </answer>") == pytest.approx({"score": 1.2, "correct": 1.0, "form": 1.0})
    assert await of("<answer>8</answer>") == pytest.approx({"score": 0.2, "correct": 0.0, "form": 1.0})
    assert await of("7") == {"score": 0.0, "correct": 0.0, "form": 0.0}


def test_the_loss_and_the_estimator_hold_the_contract() -> None:
    given = {
        "objective": Objective(algorithm_of(loss="my_algorithm:one_sided", anchor="rollout", weight={"level": "none"})),
        "estimator": Objective(AlgorithmConfig(advantage="my_algorithm:median_baseline")),
        "rubbish": math.nan,
    }
    held = 0
    for name, test in vars(contract).items():
        wanted = set(inspect.signature(test).parameters) if name.startswith("test_") else set()
        if wanted & {"objective", "estimator"}:
            test(**{argument: given[argument] for argument in wanted})
            held += 1
    assert held > 8


async def test_the_engine_answers_the_client_of_an_actor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    updates: list[tuple[int, int]] = []
    engine = module("uniform_engine").UniformEngine(
        tmp_path, EngineConfig(), on_update=lambda *update: updates.append(update)
    )
    await asyncio.to_thread(engine.load)
    client = HttpEngine(await engine.start())
    try:
        await engine.load_snapshot(tmp_path, 3, 1)
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=5, seed=9)
        answer, again = [await client.generate([1, 2], sampling) for _ in range(2)]
        assert await client.healthy()
        assert await client.version() == 3
    finally:
        await client.close()
        await engine.close()
    assert updates == [(3, 1)]
    assert [(span.version, span.num_tokens) for span in answer.spans] == [(3, 5)]
    assert answer.finish == "length"
    np.testing.assert_allclose(answer.log_probs, -math.log(50), rtol=1e-6)
    np.testing.assert_array_equal(answer.tokens, again.tokens)


class Loading:
    """An engine behind the transport: records the snapshots that it was given."""

    url = "http://engine"

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []

    async def load_snapshot(self, directory: str, version: int) -> float:
        self.loaded.append((directory, version))
        return 0.25


async def test_the_transport_brings_all_tensors(tmp_path: Path) -> None:
    engine = Loading()
    transport = module("shared_directory").SharedDirectory(engine, tmp_path)
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.arange(5)}
    await transport.join(None)
    for version in (1, 2):
        await transport.begin(version)
        for bucket in Manifest.of(tensors.items()).buckets(16):
            parts = [tensors[spec.name].contiguous().view(-1).view(torch.uint8) for spec in bucket.specs]
            await transport.bucket(bucket.specs, torch.cat(parts))
        assert await transport.end() == 0.25
    directory = tmp_path / "version-2"
    assert engine.loaded == [(str(tmp_path / "version-1"), 1), (str(directory), 2)]
    assert await asyncio.to_thread(os.listdir, tmp_path) == ["version-2"]
    assert snapshot_files.verify(directory).version == 2
    found = load_file(directory / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)


async def test_the_sink_posts_the_reward_of_each_step_and_raises_when_nothing_answers() -> None:
    one = StepMetrics(run="r", step=3, epoch=1, metrics={"data/reward_mean": 0.5})
    with web_hook() as (url, got):
        sink = open_sink("my_sink:hook", {"url": url})
        await asyncio.to_thread(sink, one)
        sink(StepMetrics(run="r", step=3, epoch=1, metrics={"eval/a/mean": 1.0}, evaluation=True))
    assert got == [{"run": "r", "step": 3, "reward": 0.5}]
    with pytest.raises(OSError):
        sink(one)
