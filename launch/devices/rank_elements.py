"""Numbers of elements of one rank under Megatron: of its weights, gradients, and the state of its optimizer. Pure."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.launch.devices.activations import FLOAT32
from tidemill.launch.devices.shapes import Shapes, is_whole, stages_of
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.optimizer import MUON

ADAM, SGD = "adam", "sgd"
VALUE_HEAD = "lm_head.value"  # Name of a critic's value head here: in the last stage, where the output projection is
_EXPERTS = ".experts."  # In the names of the weights of routed experts, and of no other
_NOT_BY_MUON = ("embed", "lm_head", "bias")
"""In names of tensors that AdamW updates in Muon's place."""


class Moments(NamedTuple):
    """Tensors that an optimizer keeps beside the weights."""

    words: str
    elements: int


def moments_of(name: str, tensors: Shapes, count: Callable[[Shapes], int]) -> Moments:
    """Return the moments of an optimizer for trained tensors. ``count``: the elements of tensors on a rank."""
    if name == SGD:
        return Moments("SGD: momentum", count(tensors))
    if name != MUON:
        return Moments("Adam: two moments", 2 * count(tensors))
    matrices = {
        name: shape
        for name, shape in tensors.items()
        if len(shape) == 2 and not any(part in name for part in _NOT_BY_MUON)
    }
    words = "Muon: momentum of matrices, Adam's two moments of others"
    return Moments(words, 2 * count(tensors) - count(matrices))


@dataclass(frozen=True, slots=True)
class RankElements:
    """Numbers of elements of one rank."""

    own: int
    trained: int  # Elements with a gradient, adapters included
    share: int  # Elements with their optimizer state on this rank
    experts: bool  # True where experts are trained
    moments: Moments

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of the optimizer's state: its moments, and main weights for other dtypes than float32."""
        return FLOAT32 * (self.moments.elements + (0 if dtype == "float32" else self.share))


def elements_of(
    stage: Shapes, learner: LearnerConfig, trained: Shapes | None = None, *, by_adam: bool = False
) -> RankElements:
    """Return one rank's elements of its stage, padded for a distributed optimizer; ``trained``: None = all.

    ``by_adam``: as for a critic, whatever the policy's optimizer is.
    """
    ours = stage if trained is None else trained
    total, share = _with_share(ours, learner)
    frozen = rank_elements(
        {name: tensor for name, tensor in stage.items() if name not in ours},
        learner.tensor_parallel,
        learner.expert_parallel,
    )
    moments = moments_of(
        ADAM if by_adam else learner.optimizer.name, ours, lambda tensors: _with_share(tensors, learner)[1]
    )
    experts = any(_EXPERTS in name for name in ours)
    return RankElements(own=frozen + total, trained=total, share=share, experts=experts, moments=moments)


def _with_share(tensors: Shapes, learner: LearnerConfig) -> tuple[int, int]:
    """Return a rank's elements of trained tensors, and those of them whose optimizer state it has."""
    split, spread, sharded = learner.tensor_parallel, learner.expert_parallel, num_shares(learner) > 1
    total = share = 0
    experts = {name: tensor for name, tensor in tensors.items() if _EXPERTS in name}
    shared = {name: tensor for name, tensor in tensors.items() if _EXPERTS not in name}
    for part, shares in ((shared, num_shares(learner)), (experts, num_expert_shares(learner))):
        mine = buffer_elements(part, split, shares, spread) if sharded else rank_elements(part, split, spread)
        total, share = total + mine, share - (-mine // shares)
    return total, share


def num_shares(learner: LearnerConfig) -> int:
    """Return the number of copies of the model over which the optimizer's state is divided."""
    return learner.data_parallel * learner.context_parallel if learner.distributed_optimizer else 1


def num_expert_shares(learner: LearnerConfig) -> int:
    """Return the number of copies of each expert over which its optimizer's state is divided."""
    return num_shares(learner) * learner.tensor_parallel // learner.expert_parallel if num_shares(learner) > 1 else 1


def model_stages(tensors: Shapes, learner: LearnerConfig) -> Sequence[Shapes]:
    """Return the tensors of each stage of the pipeline."""
    return stages_of(tensors, learner.pipeline_parallel, learner.virtual_pipeline, edge_layers=learner.edge_layers)


def largest_stage(tensors: Shapes, learner: LearnerConfig) -> Shapes:
    """Return the tensors of the stage whose ranks have the most elements."""
    split = learner.tensor_parallel, learner.expert_parallel
    return max(model_stages(tensors, learner), key=lambda stage: rank_elements(stage, *split))


def rank_elements(tensors: Shapes, tensor_parallel: int, expert_parallel: int = 1) -> int:
    """Return the number of elements that one rank has of these tensors."""
    return sum(
        math.prod(tensor) // split_of(name, tensor_parallel, expert_parallel) for name, tensor in tensors.items()
    )


def buffer_elements(tensors: Shapes, tensor_parallel: int, shares: int, expert_parallel: int = 1) -> int:
    """Return the elements of a rank's buffer of trained weights, or of gradients, with a distributed optimizer.

    Experts have a buffer of their own.

    Megatron begins each parameter at a multiple of 64 elements and ends a bucket at one of 128 and of the number of
    shares (``_ParamAndGradBuffer``, megatron-core 0.16). With overlap there are several buckets, and their ends add
    some KB.
    """
    joint: dict[str, int] = defaultdict(int)
    for name, tensor in tensors.items():
        # Megatron has one parameter for queries, keys and values, and one for both halves of a gated MLP. Adapters have
        # their own.
        place = name
        if ".lora_" not in name:
            place = re.sub(r"\b(gate|up)_proj\b", "fc1", re.sub(r"\b[qkv]_proj\b", "qkv", name))
        joint[place] += math.prod(tensor) // split_of(name, tensor_parallel)
    divisor = math.lcm(shares, 128)
    aligned = sum(-(-elements // 64) * 64 // split_of(name, 1, expert_parallel) for name, elements in joint.items())
    return -(-aligned // divisor) * divisor


def split_of(name: str, tensor_parallel: int, expert_parallel: int = 1) -> int:
    """Return the number of ranks over which a tensor is split: 1 for norms, routers, a value head, some biases."""
    if _EXPERTS in name:
        return expert_parallel
    is_unsplit = is_whole(name) or "norm" in name or name == VALUE_HEAD
    return 1 if is_unsplit or name.endswith(("o_proj.bias", "down_proj.bias", ".gate.weight")) else tensor_parallel
