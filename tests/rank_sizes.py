"""The number of parameters of a rank, as the table of memory counts them."""

from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.launch.devices.rank_memory import rank_elements
from tidemill.launch.devices.shapes import stages_of


def rank_parameters(shape: ModelShape, tensor_parallel: int, stages: int = 1, expert_parallel: int = 1) -> int:
    """Return the number of parameters of one rank, in the largest stage of a pipeline, adapters excluded."""
    return max(rank_elements(stage, tensor_parallel, expert_parallel) for stage in stages_of(shape.tensors(), stages))
