"""A step is the same if core attention turns queries and keys, and if queries and keys have fused norms.

The kernels stand for their formulas here; ``tests/gpu/test_gpu_heads.py`` compares them.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import heads_by_formula
from tests.integration.megatron_ranks import OPTIMIZER
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import one_rank
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import local_layers
from tidemill.learner.backends.megatron.layers.attention import FusedRotary, PackedParams, PackedRotary
from tidemill.learner.backends.megatron.layers.dense import FusedHeadNorm
from tidemill.learner.backends.megatron.layers.kernels import Kernels, Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.rows import rows_of
from tidemill.learner.trainer.trainer import Trainer


@pytest.fixture(scope="module")
def rank() -> Iterator[Parallel]:
    with one_rank() as joined:
        yield joined


def build(
    directory: Path, rank: Parallel, monkeypatch: pytest.MonkeyPatch, *, fused: bool, recompute: str = "none"
) -> MegatronPolicy:
    choose = local_layers.chosen

    def chosen(*args: Any, **kwargs: Any) -> Kernels:
        return dataclasses.replace(choose(*args, **kwargs), fused_rotary=fused)

    monkeypatch.setattr(local_layers, "chosen", chosen)
    monkeypatch.setitem(sys.modules, "tidemill.learner.kernels.triton_kernels", heads_by_formula)
    policy = build_policy(directory, dtype="float32", parallel=rank, kernels=Wanted(recompute=recompute))
    monkeypatch.setattr(local_layers, "chosen", choose)
    return policy


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4", "qwen3_moe"])
def test_a_step_is_the_same(
    family: str, recompute: str, rank: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without norms of heads, halves and neighbours in a part of each head."""
    directory = write_tiny_model(tmp_path, family)
    metrics, weights = [], []
    for fused in (False, True):
        policy = build(directory, rank, monkeypatch, fused=fused, recompute=recompute)
        norms = [module for module in policy.chunks[0].modules() if isinstance(module, FusedHeadNorm)]
        assert isinstance(policy.chunks[0].rotary_pos_emb, FusedRotary) is fused
        assert len(norms) == (2 * policy.config.num_layers if fused and policy.config.qk_layernorm else 0)
        trainer = Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), AlgorithmConfig(), max_lag=2)
        batch = make_batches(make_samples(vocab=len(policy.chunks[0].embedding.word_embeddings.weight)), max_tokens=60)[
            0
        ]
        step = trainer.train(batch)
        metrics.append({name: value for name, value in step.items() if "second" not in name})
        weights.append({name: tensor.clone() for name, tensor in policy.export()})
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)
    assert metrics[0]["train/grad_norm"] > 1e-3
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-4, rtol=0)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_rows_do_not_keep_their_positions_and_pass_none_on(
    recompute: str, rank: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has many rows, and each has the positions of all its tokens."""
    policy = build(write_tiny_model(tmp_path, "qwen3"), rank, monkeypatch, fused=True, recompute=recompute)
    rows = rows_of(make_batches(make_samples(vocab=299), max_tokens=60)[0], rank)
    passed: dict[int, PackedParams] = {}

    def note(module: Any, inputs: Any, given: dict[str, Any]) -> None:
        params = given["packed_seq_params"]
        assert params.rotation is not None
        passed[id(params.row)] = params

    def finish(row: Any, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, bool]:
        kept = [params.rotation is not None for params in passed.values()]
        return hidden_TH.float().square().sum(), kept == [False] * (len(kept) - 1) + [recompute == "full"]

    core = policy.module.decoder.layers[0].self_attention.core_attention
    core.register_forward_pre_hook(note, with_kwargs=True)
    with policy.ready():
        assert policy.run(rows, finish) == [True] * len(rows) and len(rows) > 2
    assert len(passed) == len(rows) and all(params.rotation is None for params in passed.values())
    assert all(bool(parameter.main_grad.isfinite().all()) for parameter in policy.chunks[0].parameters())  # type: ignore[attr-defined]


def test_a_bridge_with_layers_of_another_kind_keeps_megatrons_rotation(
    rank: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_layers, "SDPACoreAttention", int)  # as if every layer had core attention of its own
    policy = build(write_tiny_model(tmp_path, "llama"), rank, monkeypatch, fused=True)
    assert isinstance(policy.chunks[0].rotary_pos_emb, PackedRotary) and not isinstance(
        policy.chunks[0].rotary_pos_emb, FusedRotary
    )


def test_latent_attention_refuses_them(rank: Parallel, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "deepseek_v3")
    with refusal(ConfigRefused, field="learner.fused_rotary"):
        build_policy(directory, dtype="float32", parallel=rank, kernels=Wanted(fused_rotary="always"))
