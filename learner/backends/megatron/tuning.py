"""The weights that are trained: all, all but those that ``learner.optimizer.freeze`` names, or adapters alone
(``learner.lora``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from tidemill.learner.backends.megatron.layers.dense import freeze_linears
from tidemill.learner.backends.megatron.layers.lora import MegatronAdapters
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel, values_of_stages
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.settings.schedule import frozen_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings about the weights that are trained."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    freeze: tuple[str, ...] = ()
    seed: int = 0
    """Seed of new adapters."""
    trains: bool = True
    """False for a model that is only read: nothing has a gradient."""

    @classmethod
    def of(cls, learner: LearnerConfig) -> "Tuning":
        """Return the learner's settings."""
        return cls(lora=learner.lora, freeze=learner.optimizer.freeze, seed=learner.seed)


def tune(chunks: Sequence[GPTModel], bridge: Any, parallel: Parallel, tuning: Tuning) -> MegatronAdapters | None:
    """Freeze weights and add adapters, before the chunks are wrapped for data parallelism. Returns the adapters. Raises
    ConfigRefused.
    """
    adapters = None
    if tuning.lora.rank:
        adapters = MegatronAdapters(chunks, bridge, parallel, tuning.lora, seed=tuning.seed)
    elif tuning.freeze:
        _freeze(chunks, bridge, parallel, tuning.freeze)
    for chunk in chunks:
        if not tuning.trains:
            chunk.requires_grad_(False)
        freeze_linears(chunk)
        needed = chunk.config.recompute_granularity or len(chunks) > 1
        embedding = getattr(chunk, "embedding", None) if needed else None
        if embedding is not None and not any(parameter.requires_grad for parameter in embedding.parameters()):
            # A recomputed layer that gets an input without gradient returns an output that has none, and nothing in it
            # would be trained. Of several chunks one may have nothing to train, and Megatron's schedule goes back
            # through it. Elsewhere the backward pass ends at the lowest weight that is trained.
            embedding.register_forward_hook(_with_gradient)
    return adapters


def _with_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_(True)


def _freeze(chunks: Sequence[GPTModel], bridge: Any, parallel: Parallel, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters of which the patterns name every part."""
    for chunk in chunks:
        for name, whole_name in bridge.names(chunk):
            parameter = dict(chunk.named_parameters()).get(name)
            if parameter is None:
                continue
            names = bridge._weight_name_mapping_mcore_to_hf(whole_name)
            frozen = frozen_names(patterns, names)
            if frozen and len(frozen) < len(names):
                raise ConfigRefused(
                    "learner.optimizer.freeze",
                    f"all or none of {', '.join(names)}, which are one tensor in Megatron",
                    sorted(frozen),
                )
            parameter.requires_grad_(not frozen)
    trains = values_of_stages(
        any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()), parallel
    )
    if not any(trains):
        raise ConfigRefused("learner.optimizer.freeze", "patterns that leave weights to train", list(patterns))
    if not all(trains):
        want = "patterns that leave weights to train in every stage, or a lower learner.pipeline_parallel"
        raise ConfigRefused(
            "learner.optimizer.freeze", want, f"{list(patterns)}, which leave none in stage {trains.index(False)}"
        )
