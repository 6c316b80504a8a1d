"""Sizes of parallelism that contradict each other or the model are refused before the start."""

import pytest

from actors.serving.builtin.shape import ModelShape
from launch.devices.memory_table import parameters, rank_parameters
from launch.devices.shapes import Node
from launch.devices.trained import stages_of
from launch.devices.wanted import want_of
from launch.settings.config_loader import load
from learner.layout.sizes import refusals
from learner.settings.config import LearnerConfig
from tests.unit.test_memory_table import QWEN3_8B, SHAPE

ALL = LearnerConfig(data_parallel=3, tensor_parallel=2, sequence_parallel=True, pipeline_parallel=2, virtual_pipeline=3, context_parallel=5)


def test_ranks_are_the_product() -> None:
    assert (ALL.num_ranks, ALL.ranks_of_replica, ALL.row_multiple) == (60, 20, 10), "virtual stages have no ranks of their own"
    config = load([], ("learner.data_parallel=2", "learner.pipeline_parallel=2", "learner.context_parallel=2", "learner.tensor_parallel=2"))
    want = want_of(config.config, Node(rank=0, host="a"), learner=True, engines=0)
    assert (want.ranks, want.tp, want.pp, want.cp) == (16, 2, 2, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"virtual_pipeline": 2}, r"virtual_pipeline: want 1 without a pipeline, got 2"),
        ({"sequence_parallel": True}, r"sequence_parallel: want false with tensor_parallel: 1, got true"),
        ({"pipeline_parallel": 0}, r"pipeline_parallel: want > 0, got 0"),
        ({"context_parallel": -1}, r"context_parallel: want > 0, got -1"),
        ({"pipeline_parallel": 2, "virtual_pipeline": 2, "overlap_grad_reduce": "always"}, r"overlap_grad_reduce: want auto or never"),
        ({"nodes": 2, "tensor_parallel": 2}, r"nodes: want a divisor of data_parallel = 1"),
        ({"nodes": 4, "pipeline_parallel": 2, "tensor_parallel": 2}, r"nodes: want a divisor of pipeline_parallel = 2"),
        ({"nodes": 4, "data_parallel": 3, "context_parallel": 2}, r"nodes: want a divisor of data_parallel x context_parallel = 6"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerConfig(**settings)  # type: ignore[arg-type]


def test_stages_may_be_on_different_nodes() -> None:
    assert LearnerConfig(nodes=2, pipeline_parallel=2, tensor_parallel=2).num_ranks == 4


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"pipeline_parallel": 5}, "num_hidden_layers: want a multiple of learner.pipeline_parallel = 5, got 36"),
        (
            {"pipeline_parallel": 4, "virtual_pipeline": 2},
            "num_hidden_layers: want a multiple of learner.pipeline_parallel x learner.virtual_pipeline = 8, got 36",
        ),
        ({"context_parallel": 3}, "num_attention_heads: want a multiple of learner.tensor_parallel x learner.context_parallel = 3"),
        ({"tensor_parallel": 8, "context_parallel": 8}, "num_attention_heads: want a multiple of"),
    ],
)
def test_sizes_that_a_model_does_not_have(sizes: dict[str, int], wanted: str) -> None:
    [refused] = refusals(QWEN3_8B, where="config.json", **({"tensor_parallel": 1} | sizes))
    assert wanted in str(refused)


def test_sizes_that_it_has() -> None:
    fitting = {"tensor_parallel": 8, "pipeline_parallel": 4, "virtual_pipeline": 3, "context_parallel": 4}
    assert refusals(QWEN3_8B, where="config.json", **fitting) == []


def test_the_largest_stage_of_a_pipeline() -> None:
    """The first and the last stage are equal but for the last norm; with tied embeddings both have the matrix."""
    tied = ModelShape.of(QWEN3_8B | {"tie_word_embeddings": True}, where="tied")
    matrix = 151936 * 4096
    layers = parameters(SHAPE) - 2 * matrix - 4096
    assert rank_parameters(SHAPE, 1, 4) == rank_parameters(tied, 1, 4) == layers // 4 + matrix + 4096
    assert sum(name.endswith("q_proj.weight") for name in stages_of(SHAPE.tensors(), 4)[3]) == 9
