"""Training: from the sample stream to the next version of the weights."""

from typing import TYPE_CHECKING

from tidemill.bus.public_names import public_names

if TYPE_CHECKING:
    from tidemill.learner.algorithms.aggregation import Denominators
    from tidemill.learner.algorithms.config import AlgorithmConfig
    from tidemill.learner.algorithms.policy_losses import PolicyLoss
    from tidemill.learner.algorithms.tokens import Tokens, log_ratio, sequence_means, spread
    from tidemill.learner.backends.fsdp.family import Family, first_output
    from tidemill.learner.backends.megatron.local_layers import LocalLayers
    from tidemill.learner.debug.train_file import read_train
    from tidemill.learner.filters import Decision, FilterBuffer, FilterGroup
    from tidemill.learner.trainer.hooks import BeforeLogProbs, BeforeStep

_MODULES = {
    "AlgorithmConfig": "algorithms.config",
    "BeforeLogProbs": "trainer.hooks",
    "BeforeStep": "trainer.hooks",
    "Decision": "filters",
    "Denominators": "algorithms.aggregation",
    "Family": "backends.fsdp.family",
    "FilterBuffer": "filters",
    "FilterGroup": "filters",
    "LocalLayers": "backends.megatron.local_layers",
    "PolicyLoss": "algorithms.policy_losses",
    "Tokens": "algorithms.tokens",
    "first_output": "backends.fsdp.family",
    "log_ratio": "algorithms.tokens",
    "read_train": "debug.train_file",
    "sequence_means": "algorithms.tokens",
    "spread": "algorithms.tokens",
}
__all__ = [
    "AlgorithmConfig",
    "BeforeLogProbs",
    "BeforeStep",
    "Decision",
    "Denominators",
    "Family",
    "FilterBuffer",
    "FilterGroup",
    "LocalLayers",
    "PolicyLoss",
    "Tokens",
    "first_output",
    "log_ratio",
    "read_train",
    "sequence_means",
    "spread",
]
__getattr__ = public_names(__name__, _MODULES)
