"""Memory of a rank with ``learner.backend: fsdp``: tensors are divided over the ranks, and gathered for their layer."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable

from tidemill.launch.devices.memory_table import MemoryRow, dtype_on, of_rank, sending_rows
from tidemill.launch.devices.rank_memory import ADAM, FLOAT32, ITEM_BYTES, Moments, moments_of
from tidemill.launch.devices.shapes import Shapes, trained_tensors
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.settings.backends import FSDP
from tidemill.learner.settings.config import LearnerConfig

GATHERED = 2  # layers that are whole at a time: the layer that computes, and the next one, which is gathered meanwhile
_LAYER = re.compile(r"(.*\.layers\.\d+)\.")


def fsdp_rows(tensors: Shapes, config: RunConfig, *, cuda: bool, critic: Shapes | None = None) -> tuple[MemoryRow, ...]:
    """Return the rows of one rank by the model's tensors, without activations and logits.

    ``critic``: the tensors of the critic's model; None = as many as the policy's. Weights are float32 whatever the
    dtype of the passes, and the optimizer has no further copy of them.
    """
    learner, dtype = config.learner, dtype_on(config.learner.dtype, cuda=cuda)
    rows = _models(tensors, dtype, learner, cuda=cuda, critic=critic)
    sending = sending_rows(tensors, config, cuda=cuda, sharded=num_parts(learner))
    return (*rows, *_copies(tensors, config, cuda=cuda), *sending)


def sharded_bytes(
    tensors: Shapes, dtype: str, learner: LearnerConfig, *, cuda: bool, critic: Shapes | None = None
) -> int:
    """Return what ``training_bytes`` does, of a rank under FSDP: with the layers that are whole at a time."""
    return sum(row.bytes for row in _models(tensors, dtype, learner, cuda=cuda, critic=critic) if not row.on_host)


def _models(
    tensors: Shapes, dtype: str, learner: LearnerConfig, *, cuda: bool, critic: Shapes | None
) -> list[MemoryRow]:
    models = {"": tensors} | ({"critic: ": critic or tensors} if learner.algorithm.by_critic else {})
    item = ITEM_BYTES[dtype]
    return [row for prefix, shapes in models.items() for row in _model(shapes, learner, item, prefix, cuda=cuda)]


def _model(tensors: Shapes, learner: LearnerConfig, item: int, prefix: str, *, cuda: bool) -> Iterable[MemoryRow]:
    ours = tensors if prefix else trained_tensors(tensors, learner, backend=FSDP)
    trained = _divided(ours, learner)
    among = ", adapters among them" if learner.lora.rank and not prefix else ""
    share = f", 1/{num_parts(learner)} of them" if num_parts(learner) > 1 else ""
    yield of_rank(f"{prefix}weights{among}, float32{share}", FLOAT32 * _divided({**tensors, **ours}, learner))
    yield of_rank(f"{prefix}gradients, float32{share}", FLOAT32 * trained)
    on_host = learner.offload_optimizer and cuda
    words, state = _moments(ours, learner, by_adam=bool(prefix))
    yield of_rank(f"{prefix}{words}, float32{share}", FLOAT32 * state, on_host=on_host)
    if num_parts(learner) > 1 or item != FLOAT32:
        yield of_rank(
            f"{prefix}whole weights of {GATHERED} layers, and those outside of layers",
            item * _whole({**tensors, **ours}),
        )


def _copies(tensors: Shapes, config: RunConfig, *, cuda: bool) -> Iterable[MemoryRow]:
    learner, num_weights = config.learner, _divided(tensors, config.learner)
    copies = {
        "reference model": learner.algorithm.needs_reference,
        "weights of the last version": config.weights.push_every > 1,
    }
    kept = [part for part, is_kept in copies.items() if is_kept]
    for part in [*kept, *(["own weights, while one of these is in their place"] if kept else [])]:
        yield of_rank(part, FLOAT32 * num_weights, on_host=cuda)
    if learner.checkpoint.background:
        saved = 1 + len([part for part in kept if part != "reference model" or learner.algorithm.kl.moves])
        trained = trained_tensors(tensors, learner, backend=FSDP)
        _, state = _moments(trained, learner, by_adam=learner.algorithm.by_critic)
        size = FLOAT32 * (saved * num_weights + state) * (2 if learner.algorithm.by_critic else 1)
        yield of_rank("copy of weights and the optimizer's state, for checkpoints, at most", size, on_host=cuda)


def _moments(tensors: Shapes, learner: LearnerConfig, *, by_adam: bool) -> Moments:
    """Return the moments of these tensors' optimizer on a rank. ``by_adam``: as for a critic."""
    name = ADAM if by_adam else learner.optimizer.name
    return moments_of(name, tensors, lambda shapes: _divided(shapes, learner))


def num_parts(learner: LearnerConfig) -> int:
    """Return the number of ranks over which every weight is divided."""
    return learner.data_parallel // learner.fsdp_copies


def _divided(tensors: Shapes, learner: LearnerConfig) -> int:
    """Return the elements of the rank with the most: every tensor is divided by its rows."""
    ranks = num_parts(learner)
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) if shape else 1 for shape in tensors.values())


def _whole(tensors: Shapes) -> int:
    """Return the elements that are whole on a rank at a time."""
    layers: dict[str, int] = defaultdict(int)
    for name, shape in tensors.items():
        layer = _LAYER.match(name)
        layers[layer[1] if layer else ""] += math.prod(shape)
    outside = layers.pop("", 0)
    return outside + GATHERED * max(layers.values(), default=0)
