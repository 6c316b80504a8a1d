"""MiniMax 01: its lightning attention is a recurrent state without a convolution, and its layers unpack a pair."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tidemill.learner.backends.fsdp.family import Family, first_output


def _mix(forward: Callable[..., Any], hidden_BLH: Tensor, **arguments: Any) -> Tensor:
    return first_output(forward, hidden_BLH, attention_mask=None, **arguments)


FAMILY = Family(
    is_mixer=lambda module: type(module).__name__ == "MiniMaxLightningAttention",
    mix=_mix,
    result=lambda hidden_1TH: (hidden_1TH, None),
    fit=lambda settings: settings.update(block_size=8),
)
