"""Sizes of parallelism that contradict each other or the model are refused before the start."""

import pytest

from tests.rank_sizes import rank_parameters
from tests.unit.test_memory_table import QWEN3_8B, SHAPE
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.launch.devices.demand import want_of
from tidemill.launch.devices.memory_table import parameters
from tidemill.launch.devices.shapes import Node, stages_of
from tidemill.launch.settings.config_loader import load
from tidemill.learner.layout.sizes import refusals, stage_layers
from tidemill.learner.settings.config import LearnerConfig

ALL = LearnerConfig(
    data_parallel=3,
    tensor_parallel=2,
    sequence_parallel=True,
    pipeline_parallel=2,
    virtual_pipeline=3,
    context_parallel=5,
)


def test_ranks_are_the_product() -> None:
    assert (ALL.num_ranks, ALL.ranks_of_replica, ALL.row_multiple) == (60, 20, 10), (
        "virtual stages have no ranks of their own"
    )
    config = load(
        [],
        (
            "learner.data_parallel=2",
            "learner.pipeline_parallel=2",
            "learner.context_parallel=2",
            "learner.tensor_parallel=2",
        ),
    )
    want = want_of(config.config, Node(rank=0, host="a"), learner=True, engines=0)
    assert (want.ranks, want.tp, want.pp, want.cp) == (16, 2, 2, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"virtual_pipeline": 2}, r"virtual_pipeline: want 1 without a pipeline, got 2"),
        ({"sequence_parallel": True}, r"sequence_parallel: want false with tensor_parallel: 1, got true"),
        ({"pipeline_parallel": 0}, r"pipeline_parallel: want > 0, got 0"),
        ({"context_parallel": -1}, r"context_parallel: want > 0, got -1"),
        (
            {"pipeline_parallel": 2, "virtual_pipeline": 2, "overlap_grad_reduce": "always"},
            r"overlap_grad_reduce: want auto or never",
        ),
        ({"nodes": 2, "tensor_parallel": 2}, r"nodes: want a divisor of data_parallel = 1"),
        ({"nodes": 4, "pipeline_parallel": 2, "tensor_parallel": 2}, r"nodes: want a divisor of pipeline_parallel = 2"),
        (
            {"nodes": 4, "data_parallel": 3, "context_parallel": 2},
            r"nodes: want a divisor of data_parallel x context_parallel = 6",
        ),
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
        (
            {"pipeline_parallel": 5},
            "num_hidden_layers: want a multiple of learner.pipeline_parallel = 5, or learner.first_stage_layers",
        ),
        (
            {"pipeline_parallel": 4, "virtual_pipeline": 2},
            "num_hidden_layers: want a multiple of learner.pipeline_parallel x learner.virtual_pipeline = 8, or",
        ),
        (
            {"pipeline_parallel": 4, "last_stage_layers": 5},
            "num_hidden_layers: want 5, of learner.last_stage_layers, and equal numbers for 3 other stages, got 36",
        ),
        (
            {"pipeline_parallel": 3, "first_stage_layers": 35},
            "want 35, of learner.first_stage_layers, and equal numbers for 2 other stages",
        ),
        (
            {"pipeline_parallel": 2, "first_stage_layers": 16, "last_stage_layers": 19},
            "num_hidden_layers: want 35, of learner.first_stage_layers and learner.last_stage_layers, got 36",
        ),
        (
            {"context_parallel": 3},
            "num_attention_heads: want a multiple of learner.tensor_parallel x learner.context_parallel = 3",
        ),
        ({"tensor_parallel": 8, "context_parallel": 8}, "num_attention_heads: want a multiple of"),
    ],
)
def test_sizes_that_a_model_does_not_have(sizes: dict[str, int], wanted: str) -> None:
    [refused] = refusals(QWEN3_8B, where="config.json", **({"tensor_parallel": 1} | sizes))
    assert wanted in str(refused)


def test_sizes_that_it_has() -> None:
    fitting = {"tensor_parallel": 8, "pipeline_parallel": 4, "virtual_pipeline": 3, "context_parallel": 4}
    assert refusals(QWEN3_8B, where="config.json", **fitting) == []


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((61, 4, 0, 13), [16, 16, 16, 13]),
        ((61, 4, 13, 0), [13, 16, 16, 16]),
        ((61, 4, 15, 14), [15, 16, 16, 14]),
        ((4, 2, 1, 0), [1, 3]),
        ((36, 3, 0, 0), [12, 12, 12]),
        ((7, 1, 0, 0), [7]),
    ],
)
def test_the_first_and_the_last_stage_may_have_another_number_of_layers(
    sizes: tuple[int, ...], wanted: list[int]
) -> None:
    assert stage_layers(*sizes) == wanted
    layers, stages, first, last = sizes
    values = QWEN3_8B | {"num_hidden_layers": layers}
    edges = {"first_stage_layers": first, "last_stage_layers": last}
    assert refusals(values, where="config.json", tensor_parallel=1, pipeline_parallel=stages, **edges) == []
    tensors = {f"model.layers.{layer}.q_proj.weight": (1,) for layer in range(layers)} | {"lm_head.weight": (1,)}
    found = stages_of(tensors, stages, edge_layers=(first, last))
    assert [sum(".layers." in name for name in stage) for stage in found] == wanted


def test_the_largest_stage_of_a_pipeline() -> None:
    """The first and the last stage are equal but for the last norm; with tied embeddings both have the matrix."""
    tied = ModelShape.of(QWEN3_8B | {"tie_word_embeddings": True}, where="tied")
    matrix = 151936 * 4096
    layers = parameters(SHAPE) - 2 * matrix - 4096
    assert rank_parameters(SHAPE, 1, 4) == rank_parameters(tied, 1, 4) == layers // 4 + matrix + 4096
    assert sum(name.endswith("q_proj.weight") for name in stages_of(SHAPE.tensors(), 4)[3]) == 9
