"""Recomputed activations change no bit of a step, in one rank and in two that share the model, and use no kernel that
CUDA lacks.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algorithm_settings import algorithm_of
from tests.cuda_kernels import RaisingOnCuda
from tests.learner_steps import make_batches, make_samples, run_ranks
from tests.megatron_world import one_rank
from tests.refusals import refusal
from tests.same_metrics import TIMES
from tests.tiny_models import write_tiny_model
from tidemill.learner.backends.megatron import groups
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import RECOMPUTE, OptimizerConfig
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.trainer import Trainer

VOCAB = 300


@pytest.fixture(scope="module")
def world() -> Iterator[Parallel]:
    with one_rank() as joined:
        yield joined


def trained(model_dir: Path, here: Parallel, recompute: str, dtype: str = "float32") -> dict[str, Any]:
    """Train two steps of several micro-batches, with passes that need no gradients between them. Returns metrics and
    digest.
    """
    policy = build_policy(model_dir, dtype=dtype, parallel=here, kernels=Wanted(recompute=recompute))
    assert policy.bridge.kernels.recompute == recompute
    optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=3e-3, weight_decay=0.01), steps=10)
    trainer = Trainer(
        policy,
        optimizer,
        algorithm_of(entropy={"coef": 0.01}),
        max_lag=2,
        others=OtherModels(proximal=WeightBackup(policy)),
    )
    metrics, random, raising = [], torch.get_rng_state(), RaisingOnCuda()
    for step in (3, 4):
        batch = make_batches(make_samples(vocab=VOCAB, step=step), step=step, max_tokens=70)[0]
        assert len(batch.micro_batches) > 1
        with raising:
            found = trainer.train(batch)
        metrics.append({name: value for name, value in found.items() if name not in TIMES})
    assert torch.equal(torch.get_rng_state(), random)
    return {"metrics": metrics, "digest": policy.digest(), "raising": raising.found}


def test_arguments_of_megatron_reach_its_configuration(world: Parallel, tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path, vocab_size=VOCAB)
    named = {"deallocate_pipeline_outputs": True, "config_logger_dir": str(tmp_path)}
    config = build_policy(model_dir, dtype="float32", parallel=world, kernels=Wanted(megatron=named)).config
    assert {name: getattr(config, name) for name in named} == named
    with refusal(ConfigRefused, field="learner.megatron.config_logger", got="config_logger"):
        build_policy(model_dir, dtype="float32", parallel=world, kernels=Wanted(megatron={"config_logger": ""}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_recomputation_changes_no_bit(world: Parallel, tmp_path: Path, family: str, dtype: str) -> None:
    model_dir = write_tiny_model(tmp_path, family, vocab_size=VOCAB)
    plain, *others = (trained(model_dir, world, recompute, dtype) for recompute in RECOMPUTE)
    assert plain["metrics"][0]["train/grad_norm"] > 0
    for other in others:
        assert other == plain
    assert plain["raising"] == []


def main(model_dir: Path, out: Path) -> None:
    """One of two ranks that share the model."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    here = groups.join(tensor_parallel_size=2, device=torch.device("cpu"), seed=0)
    results = {recompute: trained(model_dir, here, recompute) for recompute in RECOMPUTE}
    groups.leave()
    (out / f"rank-{here.rank}.json").write_text(json.dumps(results))


def test_recomputation_changes_no_bit_of_two_ranks_that_share_the_model(tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "model", vocab_size=VOCAB)
    for found in run_ranks(main, (model_dir,), world=2, out=tmp_path):
        assert found["selective"] == found["none"]
        assert found["full"] == found["none"]
